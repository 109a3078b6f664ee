"""Measurements during training: utilisation of hosts and GPUs, profiles and FLOPs.

Start with sampling.py, which samples the utilisation of each host in a thread.
"""
