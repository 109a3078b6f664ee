"""Verification of finished runs with replays, for verify.py. Start with verification.py."""
