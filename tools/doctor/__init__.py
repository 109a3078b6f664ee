"""Facts about hosts, checks of these facts, and findings for doctor.py. Start reading in checks.py."""
