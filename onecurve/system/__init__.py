"""Operating system, files, processes, S3 and the command line. This package knows nothing about training.

Start with files.py and processes.py.
"""
