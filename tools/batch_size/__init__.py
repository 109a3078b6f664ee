"""Search for the largest batch that fits, used by find_batch_size.py. Start with largest.py."""
