"""timm models with their inputs and class names, faster attention layers, and a loader for train scripts.

Start with timm_models.py, which adapts timm models.
"""
