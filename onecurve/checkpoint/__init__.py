"""Checkpoint format, background saves, S3 mirror, and loading of trained weights.

Start reading with format.py. training.py copies tensors from a training run into a snapshot and back.
"""
