"""Gathers and writes checkpoints in the background: a training step waits only for the snapshot."""

import math
import os
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onecurve.checkpoint import format as checkpoints
from onecurve.checkpoint.format import step_name, steps_in, to_keep
from onecurve.checkpoint.gather import NotGathered
from onecurve.checkpoint.snapshot import Snapshot
from onecurve.checkpoint.training import TrainingState
from onecurve.system.files import free_space, own_files, sync
from onecurve.system.output import log
from onecurve.system.threads import lower_priority

if TYPE_CHECKING:  # for --s3
    from onecurve.checkpoint.mirror import Mirror

FIRST_CAUSE_S = 3.0  # by then onecurve/distributed/watch.py ends a job in which a process has died


class Saver:
    """Saves one checkpoint at a time. All processes call save(); in threads their parts go to the main
    process, which writes.

    about: further keys of the manifest. mirror: uploads checkpoints. committed: the newest step on the disk.
    lost(): a message once another run owns the folder; then nothing is written. A snapshot may be held in
    memory until write_held() writes it, or the next snapshot replaces it.
    """

    def __init__(
        self,
        training: TrainingState,
        folder: Path | None,
        about: dict[str, Any],
        keep_every: int | None = None,
        mirror: "Mirror | None" = None,
        committed: int | None = None,
        lost: Callable[[], str | None] = lambda: None,
    ):
        self.training, self.folder, self.keep_every = training, folder, keep_every
        self.about, self.mirror = about, mirror
        self.thread = futures.ThreadPoolExecutor(1, initializer=lower_priority)
        self.running = [self.thread.submit(training.allocate, training.expected())]
        self.gathered: int | None = None  # the step of the snapshots, once they are complete
        self.held: tuple[int, dict[str, Snapshot], dict[str, Any], int | None] | None = None
        self.written_at = -math.inf  # time.monotonic() of the last write's start in this process
        self.committed, self.lost = committed, lost
        self.problem: str | None = None  # why the first save that failed did

    def save(self, step: int, state: dict[str, Any], best: int | None, hold: bool = False) -> None:
        """Takes a snapshot and starts to write it, or holds it. It replaces a held one. Collective.

        Writes nothing after a problem, which the other processes may not know yet.
        """
        self.wait()
        self.held = None
        snapshots = self.training.take()
        self.running.append(self.thread.submit(self._gather, step))
        if self.folder:
            self.held = (step, snapshots, state, best)
            if not hold:
                self.write_held()

    def write_held(self, after_s: float = 0.0) -> None:
        """Starts to write the held snapshot, if any, once the last write began at least after_s ago."""
        if self.held and not self.problem and self.since_write_s() >= after_s:
            self.running.append(self.thread.submit(self._write, *self.held))
            self.held = None
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
        self.training.gathering.hurry.set()
        if not futures.wait(self.running, wait_s).not_done:
            ended, self.running = self.running, []
            for one in ended:
                one.result()  # raises an unexpected error
        return not self.running

    def _gather(self, step: int) -> None:
        try:
            self.training.gather()
            self.gathered = step
        except NotGathered as error:
            time.sleep(FIRST_CAUSE_S)
            self._fail(step, f"gathered: {error}", "Run the same command to resume")

    def _write(
        self, step: int, snapshots: dict[str, Snapshot], state: dict[str, Any], best: int | None
    ) -> None:
        assert self.folder, "the main process has one"
        parent = self.folder / "checkpoints"
        try:
            if self.gathered != step:
                return
            for log in own_files(self.folder, "metrics.jsonl"):
                sync(log)  # the log is never behind the checkpoint
            if self.lost():
                return
            if os.path.lexists(parent / step_name(step)):
                checkpoints.remove(parent / step_name(step))
            checkpoints.commit(parent, step, snapshots, state, self.about)
            self.committed = step
            if self.lost():  # while it was written
                return
            checkpoints.write_step_index(parent, step, best)
            needed = set()
            if self.mirror:
                self.mirror.offer(step, best)
                needed = self.mirror.needs()
            steps = {s for s in steps_in(parent) if s <= step}
            for old in steps - to_keep(steps, best, self.keep_every) - needed:
                _try_to_remove(parent / step_name(old))
        except OSError as error:
            self._fail(
                step,
                f"written to {parent}: {error.strerror or error} ({free_space(self.folder, error)})",
                "Free some space, or move the folder and give its new path as --output_dir, then run the same"
                " command to resume",
            )

    def _fail(self, step: int, what: str, advice: str) -> None:
        latest = max(steps_in(self.folder / "checkpoints"), default=None) if self.folder else None
        since = "there is none before it" if latest is None else f"that of step {latest:,} is intact"
        self.problem = self.problem or f"the checkpoint of step {step:,} can't be {what}; {since}. {advice}"


def _try_to_remove(folder: Path) -> None:
    """Removes an old checkpoint. What stays, as a file that is open over NFS, goes with a later one."""
    try:
        checkpoints.remove(folder)
    except OSError as error:
        log.info(f"{folder} can't be removed: {error.strerror or error}")
