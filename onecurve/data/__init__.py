"""Loading, caching and decoding of images from every source that `--data` accepts.

Start with images.py, which opens the data. splits.py then reads the samples of each step.
"""
