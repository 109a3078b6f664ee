"""Flags, recipes and the arithmetic of a batch.

Start with recipe.py, the flags that all train scripts share. fields.py turns a dataclass into flags.
"""
