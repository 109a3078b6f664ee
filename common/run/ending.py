"""Ends a run that does not finish: stopped by a signal, interrupted, or failed; explains known errors.

checkpoints: of the run; None before it has begun.
"""

import contextlib
import errno
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from common.checkpoint.format import steps_in
from common.distributed.preemption import agreed, reason
from common.distributed.strategy import device_name, unused_parameters, without_gradient
from common.distributed.watch import begin_exit, let_main_close_first, report_failure
from common.recipe import Batch, Recipe
from common.run import finish
from common.run.checkpoints import Checkpoints
from common.run.folder import folders
from common.run.lease import RECORD
from common.run.opening import OpenRun
from common.run.provenance import run_name
from common.run.result_tables import print_how_to_add
from common.run.state import RunState
from common.system.env import report
from common.system.files import not_written, read_json, write_json
from common.system.phase import ENDING, SAVING, now
from common.system.processes import says_out_of_memory

UPLOAD_GRACE_S = 15  # how long a preempted run waits for S3: launchers kill 30 s after SIGTERM
WRITING_GRACE_S = 8  # for a checkpoint in flight in a failed run; the other processes wait 10 s
NOT_DETERMINISTIC = " does not have a deterministic implementation"  # torch's words


def end_preempted(
    accelerator: Accelerator, recipe: Recipe, batch: Batch, checkpoints: Checkpoints | None
) -> None:
    """Saves once. The others wait for the main process, because a launcher kills all when one exits.

    Collective. Raises FloatingPointError or ValueError if nothing could be saved.
    """
    agreed()
    if checkpoints is None:
        if accelerator.is_main_process:
            _record_early_preemption(accelerator, recipe, batch)
        let_main_close_first(accelerator)
        return
    now.enter(SAVING)
    opened, exchange = checkpoints.opened, checkpoints.exchange
    why = next(filter(None, exchange.poll.gather(reason())), "")
    if opened.log:
        opened.log.write_interruption(opened.state, why)
    # A single process may stop within a step, while it waits for a shard: that step does not count.
    try:
        checkpoints.flush()
    except FloatingPointError:
        close(opened, "failed")
        raise
    exchange.gather(None)  # collects the telemetry since the newest snapshot
    exchange.wait_for_main(opened.saver.done)
    problem = exchange.problem()
    close(opened, "failed" if problem else "preempted")
    if problem := broadcast_object_list([problem])[0]:
        raise ValueError(problem)


def end_failed(
    error: BaseException,
    accelerator: Accelerator,
    recipe: Recipe,
    batch: Batch,
    checkpoints: Checkpoints | None,
) -> None:
    """Raises the error that all processes report, explained if its cause is known."""
    begin_exit()
    now.enter(ENDING)
    opened = checkpoints.opened if checkpoints else None
    if opened:
        _write_best(opened)
    if isinstance(error, KeyboardInterrupt):
        own: BaseException = KeyboardInterrupt()
        if accelerator.is_main_process:
            step = _resume_step(accelerator, recipe, batch, checkpoints)
            place = f"at step {step:,}" if step else "from the beginning"
            own = KeyboardInterrupt(f"run the same command to resume {place}")
    else:
        own = explained(error, accelerator, batch, opened)
    first = report_failure(own)
    if opened:
        is_interrupted = isinstance(first, KeyboardInterrupt)
        close_failed(opened, "interrupted" if is_interrupted else str(first) or type(first).__name__)
    let_main_close_first(accelerator)
    if first is not error:
        raise first from error


def close_failed(opened: OpenRun, error: str) -> None:
    """Closes the run, also where another rank has failed. Writes a held checkpoint, and waits up to
    WRITING_GRACE_S for it or one in flight."""
    if opened.log:
        _write_best(opened)
        opened.saver.done(WRITING_GRACE_S)
        close(opened, "failed", error)


def close(opened: OpenRun, status: str, error: str | None = None) -> None:
    """Closes files and trackers, and releases the folder. Ignores a full disk."""
    if not opened.log or not opened.folder:
        return
    opened.log.progress.stop()
    report("step", step=opened.state.step)
    with contextlib.suppress(OSError):
        if status != "finished":
            write_json(opened.folder.path / "result.json", finish.result_of(opened, status, error=error))
    if status == "preempted" and opened.folder.mirror:
        opened.folder.mirror.wait(UPLOAD_GRACE_S)
    opened.log.close(failed=status == "failed")
    print_how_to_add(opened.folder.path)
    opened.folder.release()


def _write_best(opened: OpenRun) -> None:
    """Starts to write a held snapshot, unless a device error may have spoilt it."""
    if opened.saver.training.is_copied():
        opened.saver.write_held()


def _resume_step(
    accelerator: Accelerator, recipe: Recipe, batch: Batch, checkpoints: Checkpoints | None
) -> int:
    """The step from which the same command resumes after Ctrl-C, which saves nothing."""
    if checkpoints:
        checkpoints.saver.done(WRITING_GRACE_S)
        return checkpoints.saver.committed or checkpoints.steps.first
    folder = _own_folder(accelerator, recipe, batch)
    return max(steps_in(folder / "checkpoints"), default=0) if folder else 0


def _record_early_preemption(accelerator: Accelerator, recipe: Recipe, batch: Batch) -> None:
    """Writes `preempted` into result.json after a signal before the training. There is nothing to save."""
    folder = _own_folder(accelerator, recipe, batch)
    if folder is None or (folder / RECORD).exists():
        return  # in the second case another process runs there, or was killed
    file = folder / "result.json"
    with contextlib.suppress(ValueError, OSError):
        is_new = not file.exists()
        before = (
            finish.result(accelerator, recipe, batch, RunState(), "preempted") if is_new else read_json(file)
        )
        write_json(file, before | {"status": "preempted"})


def _own_folder(accelerator: Accelerator, recipe: Recipe, batch: Batch) -> Path | None:
    """The folder that this recipe would get, before it is opened; None where there can be none."""
    with contextlib.suppress(ValueError, OSError):
        return next(folders(recipe, run_name(accelerator, recipe, batch), None))
    return None


def explained(
    error: BaseException, accelerator: Accelerator, batch: Batch, opened: OpenRun | None
) -> BaseException:
    """A ValueError that says what to do, or the error itself. opened: None before the training begins."""
    if is_out_of_memory(error):
        return ValueError(out_of_memory(accelerator, batch, error))
    if NOT_DETERMINISTIC in str(error):
        operation = str(error).partition(NOT_DETERMINISTIC)[0].strip()
        return ValueError(
            f"--deterministic: {operation} has no deterministic form on a GPU: replace it in the script, or"
            " train without the flag"
        )
    if opened and (unused := unused_parameters(error, list(opened.saver.training.layout.parameters))):
        return ValueError(without_gradient(unused))
    if opened and opened.folder and isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return not_written("the run", opened.folder.path, error)  # the script itself was writing
    return error


def is_out_of_memory(error: BaseException | None) -> bool:
    """True for errors of torch's allocators on GPU and CPU, of CUDA's libraries, and Python's MemoryError."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and says_out_of_memory(str(error))
    )


def out_of_memory(accelerator: Accelerator, batch: Batch, error: BaseException) -> str:
    """The message, with the batch size to try. It quotes an error that does not mention memory."""
    smaller = batch.smaller()
    advice = "shard the model (fsdp_4gpu, zero3_4gpu, zero3_offload_4gpu) or take a smaller one"
    if smaller:
        advice = (
            f"try --per_device_batch_size {smaller}, the same --batch_size {batch.total} with"
            f" {batch.total // (smaller * batch.processes)} accumulations, or {advice}"
        )
    device = device_name(accelerator)
    first_line = str(error).partition("\n")[0]
    quoted = "" if "memory" in first_line or not first_line else f" (the error was: {first_line})"
    return f"out of memory on {device} with --per_device_batch_size {batch.per_device}: {advice}{quoted}"
