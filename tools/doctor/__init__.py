"""Facts about hosts, checks of these facts, and the findings that doctor.py prints. Start with checks.py."""
