"""Checkpoint format, background saves, S3 mirror, and weights of trained models.

Start with format.py. training.py copies tensors from a training run into a snapshot and back.
"""
