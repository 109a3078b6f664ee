"""Predictions of memory, traffic and time for plan.py. Start reading in planning.py."""
