"""One loss curve, wherever it runs: sample order, exact evaluation and checkpoints for Accelerate loops.

docs/your_own_loop.md uses the package in a loop of your own; docs/architecture.md is the map of its rooms.
"""

__version__ = "2.0.0"  # in recipe.json, in manifests of checkpoints and on pages of runs
