"""Checkpoint format, background saves, mirror in S3, and weights of trained models.

Start with format.py. training.py copies the tensors of a training into a snapshot and back.
"""
