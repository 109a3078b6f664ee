"""A training run: its folder, steps, log, trackers, evaluations and result.

Start with run.py. session.py runs on all ranks, record.py only on the main process.
"""
