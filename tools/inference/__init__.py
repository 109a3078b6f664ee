"""Inference with a trained model, for validate.py, predict.py and export.py.

Start reading in inference.py.
"""
