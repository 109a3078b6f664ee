"""Processes of a job: start-up, the Accelerator, agreement between ranks, and tensor layouts.

Start reading with process.py, the entry point of a train script, and accelerator.py.
"""
