"""Verification of a finished run by replaying it, for verify.py. Start with verification.py."""
