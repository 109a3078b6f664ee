"""Code that determines the results of a training step: sample order, augmentation, BatchNorm, optimizers.

Start with order.py, which assigns samples and random numbers to training steps.
"""
