"""Host facts, checks and findings for doctor.py. Start reading in checks.py."""
