"""One training run from its folder to its result: steps, log, trackers, evaluation, and its end.

Start with run.py; session.py serves all ranks, record.py only the main process.
"""
