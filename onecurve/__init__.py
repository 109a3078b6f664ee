"""One loss curve, wherever it runs: sample order, exact evaluation and checkpoints for Accelerate loops.

docs/your_own_loop.md uses the package in a loop of your own; docs/architecture.md is the map of its rooms.
"""
