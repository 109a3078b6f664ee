"""Replay of a finished run, used by verify.py. Start with verification.py."""
