"""Processes of a job: start, Accelerator, messages and agreement between ranks, and layouts of tensors.

Start with process.py, the entry of a train script, and accelerator.py.
"""
