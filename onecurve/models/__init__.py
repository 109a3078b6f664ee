"""timm's models and their inputs, faster attention layers, and train scripts loaded as modules.

Start with timm_models.py.
"""
