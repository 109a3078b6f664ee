"""Predictions of memory, traffic and time for plan.py. Start with planning.py."""
