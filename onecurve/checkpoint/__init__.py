"""The checkpoint format, saves in the background, the mirror in S3, and trained weights.

Start with format.py; training.py copies the tensors of a training into a snapshot and back.
"""
