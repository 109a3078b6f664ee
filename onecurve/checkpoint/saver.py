"""Saves checkpoints in the background, so that training waits only for the snapshot."""

import math
import os
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from onecurve.checkpoint import format as checkpoints
from onecurve.checkpoint.format import step_name, steps_in, steps_to_keep
from onecurve.checkpoint.gather import GatherError
from onecurve.checkpoint.snapshot import Snapshot
from onecurve.checkpoint.training import TrainingState
from onecurve.system.files import describe_free_space, files_inside, sync
from onecurve.system.output import log
from onecurve.system.threads import lower_priority

if TYPE_CHECKING:  # imported at runtime only with --s3
    from onecurve.checkpoint.mirror import Mirror

# Seconds to wait after a failed gather. If a rank died, onecurve/distributed/watch.py ends the job within
# this time and reports the original cause.
CAUSE_REPORT_DELAY_S = 3.0


class HeldCheckpoint(NamedTuple):
    """Checkpoint in memory, with the arguments of Saver._write_checkpoint()."""

    step: int
    snapshots: dict[str, Snapshot]
    state: dict[str, Any]
    best_step: int | None


class Saver:
    """Saver that writes one checkpoint at a time in the background.

    All ranks call save(). Background threads gather the snapshots on the main process, which writes the
    checkpoint. A held snapshot stays in memory until write_held() writes it or a newer snapshot replaces it.

    Args:
        training: Training state to save.
        folder: Run folder on the main process, or None on other ranks.
        about: Additional entries for the manifest.
        keep_every: Interval in steps at which checkpoints are kept permanently. None keeps only the newest
            checkpoints and the best checkpoint.
        mirror: Mirror that uploads the checkpoints, or None.
        committed_step: Step of the newest checkpoint on disk, or None.
        takeover_error: Function that returns None until another run takes over the folder, and an error
            message afterwards. Once the function returns an error message, the saver writes no more
            checkpoints.
    """

    def __init__(
        self,
        training: TrainingState,
        folder: Path | None,
        about: dict[str, Any],
        keep_every: int | None = None,
        mirror: "Mirror | None" = None,
        committed_step: int | None = None,
        takeover_error: Callable[[], str | None] = lambda: None,
    ):
        self.training, self.folder, self.keep_every = training, folder, keep_every
        self.manifest_entries, self.mirror = about, mirror
        self.executor = futures.ThreadPoolExecutor(max_workers=1, initializer=lower_priority)
        # Allocate the snapshots in the background. The first save waits until they are allocated
        self.pending_futures = [self.executor.submit(training.allocate, training.expected_specs())]
        self.gathered_step: int | None = None  # step of the latest complete snapshots
        self.held_checkpoint: HeldCheckpoint | None = None
        self.last_write_began_at = -math.inf  # time.monotonic() at the start of this process's last write
        self.committed_step, self.takeover_error = committed_step, takeover_error
        self.problem: str | None = None  # error message of the first failed save

    def save(self, step: int, state: dict[str, Any], best: int | None, hold: bool = False) -> None:
        """Wait for the previous save, take a snapshot, and start writing the checkpoint.

        This method is collective. The background thread first gathers the snapshots and then writes the
        checkpoint. The new snapshot replaces any held snapshot. After a failed save, this method still takes
        snapshots but writes no checkpoints, because other ranks may not have noticed the failure yet.

        Args:
            step: Step of the checkpoint.
            state: Content of state.json.
            best: Step of the best checkpoint, which is never removed.
            hold: True to hold the snapshot in memory instead of writing the checkpoint immediately.
        """
        self.wait()
        self.held_checkpoint = None
        snapshots = self.training.take_snapshots()
        self.pending_futures.append(self.executor.submit(self._gather_snapshots, step))
        if self.folder:
            self.held_checkpoint = HeldCheckpoint(step, snapshots, state, best)
            if not hold:
                self.write_held()

    def write_held(self, after_s: float = 0.0) -> None:
        """Start writing the held checkpoint unless the last write began less than after_s seconds ago.

        The write runs in the background. After a failed save, this method writes nothing.
        """
        if self.held_checkpoint and not self.problem and self.since_write_s() >= after_s:
            self.pending_futures.append(self.executor.submit(self._write_checkpoint, *self.held_checkpoint))
            self.held_checkpoint = None
            self.last_write_began_at = time.monotonic()

    def since_write_s(self) -> float:
        """Return the seconds since the last write began, or infinity before this process's first write."""
        return time.monotonic() - self.last_write_began_at

    def wait(self, heartbeat: Callable[[], None] = lambda: None) -> None:
        """Wait until the current save is on disk or has failed, and call heartbeat() meanwhile."""
        while not self.wait_up_to(wait_s=0.2):
            heartbeat()

    def wait_up_to(self, wait_s: float) -> bool:
        """Wait up to wait_s seconds for the current save. Return False if the save is still in progress.

        The save stops pausing for training, and runs at full speed until the next snapshot.
        """
        self.training.gatherer.pauses_disabled.set()
        _, unfinished_futures = futures.wait(self.pending_futures, wait_s)
        if not unfinished_futures:
            finished_futures, self.pending_futures = self.pending_futures, []
            for finished_future in finished_futures:
                finished_future.result()  # re-raise an unexpected error
        return not self.pending_futures

    def _gather_snapshots(self, step: int) -> None:
        """Complete the main process's snapshots in the background thread, or record the failure."""
        try:
            self.training.gather()
            self.gathered_step = step
        except GatherError as error:
            time.sleep(CAUSE_REPORT_DELAY_S)
            self._record_failure(step, f"gathered: {error}", "Run the same command again to resume training")

    def _write_checkpoint(
        self, step: int, snapshots: dict[str, Snapshot], state: dict[str, Any], best_step: int | None
    ) -> None:
        """Write a checkpoint in the background thread, offer it to the mirror, and remove old checkpoints.

        Without a complete snapshot of this step, or after a takeover of the folder, nothing is written. An
        OSError is recorded in `problem`.
        """
        assert self.folder, "only the main process writes checkpoints"
        checkpoints_folder = self.folder / "checkpoints"
        try:
            if self.gathered_step != step:  # the gather failed
                return
            for metrics_file in files_inside(self.folder, "metrics.jsonl"):
                sync(metrics_file)  # the log on disk must never be older than the checkpoint
            if self.takeover_error():
                return
            # A run that resumed from an earlier step may write the same step again
            if os.path.lexists(checkpoints_folder / step_name(step)):
                checkpoints.remove_checkpoint(checkpoints_folder / step_name(step))
            checkpoints.write_checkpoint(checkpoints_folder, step, snapshots, state, self.manifest_entries)
            self.committed_step = step
            if self.takeover_error():  # another run took over the folder during the write
                return
            checkpoints.write_step_index(checkpoints_folder, step, best_step)
            upload_steps = set()
            if self.mirror:
                self.mirror.offer(step, best_step)
                upload_steps = self.mirror.steps_needed_on_disk()
            saved_steps = {saved_step for saved_step in steps_in(checkpoints_folder) if saved_step <= step}
            kept_steps = steps_to_keep(saved_steps, best_step, self.keep_every)
            for old_step in saved_steps - kept_steps - upload_steps:
                _try_to_remove_checkpoint(checkpoints_folder / step_name(old_step))
        except OSError as error:
            error_text, free_space_text = error.strerror or error, describe_free_space(self.folder, error)
            self._record_failure(
                step,
                f"written to {checkpoints_folder}: {error_text} ({free_space_text})",
                "Free some disk space, or move the run folder and set --output_dir to the new path."
                " Then run the command again to resume training",
            )

    def _record_failure(self, step: int, failed_action: str, resume_advice: str) -> None:
        """Record the first save failure. `failed_action` completes "The checkpoint can't be ..."."""
        saved_steps = steps_in(self.folder / "checkpoints") if self.folder else []
        earlier_checkpoint = "There is no earlier checkpoint"
        if saved_steps:
            earlier_checkpoint = f"The checkpoint of step {max(saved_steps):,} is intact"
        save_problem = (
            f"the checkpoint of step {step:,} can't be {failed_action}. {earlier_checkpoint}. {resume_advice}"
        )
        self.problem = self.problem or save_problem


def _try_to_remove_checkpoint(old_checkpoint: Path) -> None:
    """Remove an old checkpoint, or print a warning if some of its files can't be removed.

    The next start of the run removes the remaining files, for example files that were open over NFS.
    """
    try:
        checkpoints.remove_checkpoint(old_checkpoint)
    except OSError as error:
        log.warning(f"warning: the checkpoint {old_checkpoint} can't be removed: {error.strerror or error}")
