"""One loss curve on any hardware: sample order, exact evaluation and checkpoints for Accelerate loops.

docs/your_own_loop.md explains how to use this package in your own training loop. docs/architecture.md
describes the structure of the code.
"""

__version__ = "2.0.0"  # Also stored in recipe.json, in checkpoint manifests and on run pages
