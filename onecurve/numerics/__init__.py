"""Sample order, augmentation, BatchNorm and optimizers, which determine a training step's results.

Start with order.py, which assigns samples and random numbers to training steps.
"""
