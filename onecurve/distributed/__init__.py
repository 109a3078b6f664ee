"""Processes of a job: start-up, Accelerator, agreement between ranks, and tensor layouts.

Start reading with accelerator.py. process.py contains the entry point of a train script.
"""
