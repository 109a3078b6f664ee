"""timm models and their inputs, faster attention layers, and loading of train scripts.

Start with timm_models.py.
"""
