"""Command-line flags, recipes, and the division of batches among processes.

Start with recipe.py, which declares the shared flags. fields.py turns the fields of a dataclass into flags.
"""
