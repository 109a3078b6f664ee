"""Training runs, with their folders, steps, logs, trackers, evaluations and results.

Start with run.py. The code in session.py runs on all ranks, and the code in record.py runs only on the main
process.
"""
