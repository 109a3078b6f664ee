"""Processes of a job, with their start-up, Accelerator, agreement between ranks, and tensor layouts.

Start reading with accelerator.py and process.py, which contains the entry point of a train script.
"""
