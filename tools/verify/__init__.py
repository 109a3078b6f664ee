"""Verification of finished runs by replays, for verify.py. Start with verification.py."""
