"""Parts of validate.py, predict.py and export.py. Start with inference.py."""
