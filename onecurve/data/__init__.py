"""Loading, caching and decoding of images from every source that `--data` accepts.

Start reading with images.py, which opens the data. splits.py reads the samples of a step.
"""
