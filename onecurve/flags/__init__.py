"""Command-line flags, recipes and batch arithmetic.

Start with recipe.py, which declares the shared flags. fields.py turns a dataclass into flags.
"""
