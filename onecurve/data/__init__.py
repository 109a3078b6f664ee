"""Images from every source that `--data` accepts: cached, decoded and served in micro-batches.

Start reading with images.py, which opens the data. splits.py reads the samples of a step.
"""
