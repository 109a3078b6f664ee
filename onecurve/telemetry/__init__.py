"""Measurements during a training: use of hosts and GPUs, profiles and FLOPs.

Start with sampling.py, whose thread reads the counters of each host.
"""
