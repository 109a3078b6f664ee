"""Facts about hosts, their checks and the findings that doctor.py prints. Start with checks.py."""
