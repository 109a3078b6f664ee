"""Operating system, files, processes, S3 and the command line. This package is independent of training.

Start with files.py and processes.py.
"""
