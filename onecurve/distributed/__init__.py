"""Processes of a job, with their start-up, Accelerator, agreement between ranks, and tensor layouts.

Start reading with process.py, the entry point of a train script, and accelerator.py.
"""
