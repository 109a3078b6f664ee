"""Code that determines the numbers of a training step: sample order, augmentation, BatchNorm, optimizers.

Start with order.py, which assigns samples and random numbers to steps.
"""
