"""Measurements on each host during a training: devices, profiles and FLOPs.

Start with sampling.py, the thread that reads the counters.
"""
