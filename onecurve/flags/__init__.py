"""Command-line flags, recipes and batch arithmetic.

Start with recipe.py, which declares the flags that train scripts share. fields.py turns a dataclass into flags.
"""
