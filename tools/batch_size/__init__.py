"""Search for the largest batch that fits into memory, for find_batch_size.py. Start reading in largest.py."""
