"""Measurements during training: utilisation of hosts and GPUs, profiles and FLOPs.

Start with sampling.py, which reads the counters of each host in a thread.
"""
