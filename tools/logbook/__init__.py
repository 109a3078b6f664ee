"""Log book pages for logbook.py. Start with run_record.py, which reads a run's folder."""
