"""Conversion of archives, folders and tables to shards, for prep_imagenet.py. Start with preparation.py."""
