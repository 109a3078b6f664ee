"""Command-line flags, recipes, and the division of batches among processes.

Start with recipe.py, which declares the shared flags. fields.py turns a dataclass's fields into flags.
"""
