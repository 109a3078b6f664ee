"""Operating system, files, processes, S3 and the command line; nothing here knows about training.

Start with files.py and processes.py.
"""
