"""Pages of runs and their comparison, used by logbook.py. Start with run_record.py, which reads a run."""
