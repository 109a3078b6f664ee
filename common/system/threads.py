"""Threads beside the training."""

import contextlib
import os
import threading


def step_aside() -> None:
    """Gives the calling thread, and those that it starts, what the training leaves of the processor.

    On Linux threads have priorities of their own. With 2 cores for ViT-B/32 a step beside the writing takes
    1.0 to 1.3 times its time; at equal priority 2.9 times (benchmarks/checkpoint_saves.py).
    """
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
