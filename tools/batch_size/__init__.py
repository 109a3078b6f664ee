"""Search for the largest batch that fits, for find_batch_size.py. Start with largest.py."""
