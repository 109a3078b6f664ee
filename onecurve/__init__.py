"""One loss curve on any hardware: sample order, exact evaluation and checkpoints for Accelerate loops.

docs/your_own_loop.md explains how to use the package in your own loop. docs/architecture.md is the map of
the code.
"""

__version__ = "2.0.0"  # also stored in recipe.json, in checkpoint manifests and on pages of runs
