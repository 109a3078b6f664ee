"""A job's processes: startup, Accelerator, agreement between ranks, and tensor layouts.

Start reading with accelerator.py. process.py contains the train scripts' entry point.
"""
