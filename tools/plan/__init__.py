"""Predictions of memory, traffic and time, used by plan.py. Start with planning.py."""
