"""Archives, folders and tables turned into shards, used by prep_imagenet.py. Start with preparation.py."""
