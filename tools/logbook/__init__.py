"""Log book: pages of runs and comparisons, for logbook.py. Start with run_record.py, which reads a run."""
