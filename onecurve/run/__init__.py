"""Training runs: folder, steps, log, trackers, evaluations and result.

Start with run.py. session.py runs on all ranks, and record.py runs only on the main process.
"""
