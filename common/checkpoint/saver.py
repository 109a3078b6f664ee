"""Writes checkpoints in the background: a training step waits only for the snapshot."""

import math
import os
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

from common.checkpoint import format as checkpoints
from common.checkpoint.format import Snapshot, step_name, steps_in, to_keep
from common.checkpoint.mirror import Mirror
from common.checkpoint.training import TrainingState
from common.system.files import free_space, sync
from common.system.threads import lower_priority


class Saver:
    """Saves one checkpoint at a time. All processes call save(); the main process writes, in a thread.

    about: further keys of the manifest. mirror: uploads checkpoints. committed: the newest step on the disk.
    lost(): a message once another run owns the folder, which RunOutput.problem() reports; then nothing is
    written. A snapshot may be held in memory until write_held() writes it, or the next snapshot replaces it.
    """

    def __init__(
        self,
        training: TrainingState,
        folder: Path | None,
        keep_every: int | None,
        about: dict[str, Any],
        mirror: Mirror | None,
        committed: int | None = None,
        lost: Callable[[], str | None] = lambda: None,
    ):
        self.training, self.folder, self.keep_every = training, folder, keep_every
        self.about, self.mirror = about, mirror
        self.thread = futures.ThreadPoolExecutor(1, initializer=lower_priority) if folder else None
        self.writing = self.thread.submit(training.allocate, training.expected()) if self.thread else None
        self.held: tuple[int, dict[str, Snapshot], dict[str, Any], int | None] | None = None
        self.written_at = -math.inf  # time.monotonic() of the last write's start in this process
        self.committed, self.lost = committed, lost
        self.problem: str | None = None  # on the main process: why the last save failed

    def save(self, step: int, state: dict[str, Any], best: int | None, hold: bool = False) -> None:
        """Takes a snapshot and starts to write it, or holds it. It replaces a held one. Collective.

        Writes nothing after a problem, which the other processes may not know yet.
        """
        self.wait()
        self.held = None
        snapshots = self.training.take()
        if self.thread:
            self.held = (step, snapshots, state, best)
            if not hold:
                self.write_held()

    def write_held(self, after_s: float = 0.0) -> None:
        """Starts to write the held snapshot, if any, once the last write began at least after_s ago."""
        if self.held and self.thread and not self.problem and self.since_write_s() >= after_s:
            self.writing, self.held = self.thread.submit(self._write, *self.held), None
            self.written_at = time.monotonic()

    def since_write_s(self) -> float:
        """Seconds since the last write began; infinite before the first one of this process."""
        return time.monotonic() - self.written_at

    def wait(self, heartbeat: Callable[[], None] = lambda: None) -> None:
        """Waits until the save in flight is on the disk or has failed. Calls heartbeat() meanwhile."""
        while not self.done(0.2):
            heartbeat()

    def done(self, wait_s: float) -> bool:
        """Waits up to wait_s. True when no save is in flight."""
        if self.writing and not futures.wait([self.writing], wait_s).not_done:
            self.writing.result()  # raises an unexpected error of _write
            self.writing = None
        return self.writing is None

    def _write(
        self, step: int, snapshots: dict[str, Snapshot], state: dict[str, Any], best: int | None
    ) -> None:
        assert self.folder, "the main process has one"
        parent = self.folder / "checkpoints"
        try:
            self.training.wait_until_copied()
            sync(self.folder / "metrics.jsonl")  # the log is never behind the checkpoint
            if self.lost():
                return
            if os.path.lexists(parent / step_name(step)):
                checkpoints.remove(parent / step_name(step))
            checkpoints.commit(parent, step, snapshots, state, self.about)
            self.committed = step
            if self.lost():  # while it was written
                return
            checkpoints.write_index(parent, step, best)
            needed = set()
            if self.mirror:
                self.mirror.offer(step, best)
                needed = self.mirror.needs()
            steps = {s for s in steps_in(parent) if s <= step}
            for old in steps - to_keep(steps, best, self.keep_every) - needed:
                checkpoints.remove(parent / step_name(old))
        except OSError as error:
            latest = max(steps_in(parent), default=None)
            since = "there is none before it" if latest is None else f"that of step {latest:,} is intact"
            self.problem = (
                f"the checkpoint of step {step:,} can't be written to {parent}: {error.strerror or error}"
                f" ({free_space(self.folder)}); {since}. Free some space, or move the folder and give"
                " its new path as --output_dir, then run the same command to resume"
            )
