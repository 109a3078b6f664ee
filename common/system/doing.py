"""This process's phase and step, for reports of a job that hangs. Setting them costs an assignment."""

import contextlib
from collections.abc import Iterator


class _Now:
    phase = "starting"
    step = 0


now = _Now()


@contextlib.contextmanager
def doing(phase: str) -> Iterator[None]:
    """Sets the phase within the context."""
    before, now.phase = now.phase, phase
    try:
        yield
    finally:
        now.phase = before
