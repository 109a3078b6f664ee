"""Utilities for files, processes, S3, and the command line that do not depend on training.

Start reading in files.py and processes.py.
"""
