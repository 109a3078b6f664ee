"""Search for the largest batch that fits in memory, used by find_batch_size.py. Start with largest.py."""
