"""Ends a run that was preempted, interrupted or failed, and explains known errors."""

import contextlib
import errno
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from onecurve.checkpoint.format import steps_in
from onecurve.distributed.channel import let_main_close_first
from onecurve.distributed.strategy import device_name, unused_parameters, without_gradient
from onecurve.distributed.watch import watch
from onecurve.flags.recipe import Batch, Recipe
from onecurve.run.folder import folders
from onecurve.run.identity import run_name
from onecurve.run.lease import RECORD
from onecurve.run.record import WRITING_GRACE_S
from onecurve.run.session import Ranks
from onecurve.system.files import not_written, read_json, write_json
from onecurve.system.phase import ENDING, SAVING, now
from onecurve.system.processes import says_out_of_memory

ONE_VALUE = "Expected more than 1 value per channel when training"  # torch's message
NOT_DETERMINISTIC = " does not have a deterministic implementation"


def end_preempted(ranks: Ranks, why: str) -> None:
    """Save a last checkpoint after a signal, and close the run. Collective.

    The other processes wait for the main process, because the launcher kills all processes as soon as one
    exits.

    Args:
        ranks: State of the run that all ranks share.
        why: Reason on this process; empty if this process received no signal.

    Raises:
        FloatingPointError: The loss is not finite, so nothing was saved.
        ValueError: The checkpoint could not be written.
    """
    now.enter(SAVING)
    exchange, record = ranks.exchange, ranks.record
    why = next(filter(None, exchange.poll.gather(why)), "")
    if record:
        record.log.write_mark({"interrupted_at": time.time(), "why": why})
    # A single process may stop within a step, while it waits for a shard. The partial step is discarded.
    try:
        ranks.flush()
    except (FloatingPointError, ValueError):
        if record:
            record.close("failed")
        raise
    exchange.gather(None)  # sends the telemetry recorded since the newest snapshot
    exchange.poll.wait_for_main(record is not None, ranks.saver.done)
    problem = record and record.problem()
    if record:
        record.close("failed" if problem else "preempted")
    if problem := broadcast_object_list([problem])[0]:
        raise ValueError(problem)


def end_early(accelerator: Accelerator, recipe: Recipe, batch: Batch) -> None:
    """Write `preempted` into result.json if a signal arrives before training. No checkpoint is saved."""
    folder = _expected_folder(accelerator, recipe, batch) if accelerator.is_main_process else None
    if folder and not (folder / RECORD).exists():  # otherwise, another process uses the folder or was killed
        file = folder / "result.json"
        with contextlib.suppress(ValueError, OSError):
            write_json(file, (read_json(file) if file.exists() else {}) | {"status": "preempted"})
    let_main_close_first(accelerator)


def end_failed(
    error: BaseException, accelerator: Accelerator, recipe: Recipe, batch: Batch, ranks: Ranks | None
) -> None:
    """Raise the error that all processes report. Explain the error if the cause is known.

    ranks: State of the run; None before begin().
    """
    watch.begin_exit()
    now.enter(ENDING)
    record = ranks.record if ranks else None
    if record:
        record.write_best()
    if isinstance(error, KeyboardInterrupt):
        local_error: BaseException = KeyboardInterrupt()
        if accelerator.is_main_process:
            step = _resume_step(accelerator, recipe, batch, ranks)
            position = f"at step {step:,}" if step else "from the beginning"
            local_error = KeyboardInterrupt(f"run the same command to resume {position}")
    else:
        local_error = explained(error, accelerator, batch, ranks)
    first_error = watch.report_failure(local_error)
    if record:
        is_interrupted = isinstance(first_error, KeyboardInterrupt)
        record.close_failed(
            "interrupted" if is_interrupted else str(first_error) or type(first_error).__name__
        )
    let_main_close_first(accelerator)
    if first_error is not error:
        raise first_error from error


def _resume_step(accelerator: Accelerator, recipe: Recipe, batch: Batch, ranks: Ranks | None) -> int:
    """Return the step at which the same command resumes. Ctrl-C itself saves no checkpoint."""
    if ranks:
        ranks.saver.done(WRITING_GRACE_S)
        return ranks.saver.committed or ranks.steps.first
    folder = _expected_folder(accelerator, recipe, batch)
    return max(steps_in(folder / "checkpoints"), default=0) if folder else 0


def _expected_folder(accelerator: Accelerator, recipe: Recipe, batch: Batch) -> Path | None:
    """Return the folder that a run of this recipe would use, before the run is opened, or None."""
    with contextlib.suppress(ValueError, OSError):
        return next(folders(recipe, run_name(accelerator, recipe, batch), None))
    return None


def explained(
    error: BaseException, accelerator: Accelerator, batch: Batch, ranks: Ranks | None
) -> BaseException:
    """Return a ValueError that explains a known error and the remedy, or the error itself."""
    if is_out_of_memory(error):
        return ValueError(out_of_memory(accelerator, batch, error))
    if str(error).endswith("--on_bad_image skip") and ranks:
        is_given = not (ranks.recipe.output_dir or "*").endswith("*")
        # Truthy if the next start resumes this run
        resumes = ranks.newest or (is_given and ranks.state.logged_step)
        return ValueError(f"{error} --allow_changed on_bad_image") if resumes else error
    if ONE_VALUE in str(error):
        return ValueError(f"BatchNorm: {error}. Give a larger --per_device_batch_size or --image_size")
    if NOT_DETERMINISTIC in str(error):
        operation = str(error).partition(NOT_DETERMINISTIC)[0].strip()
        return ValueError(
            f"--deterministic: {operation} has no deterministic implementation on a GPU. Replace it in the"
            " script, or train without the flag"
        )
    if ranks and (unused := unused_parameters(error, [*ranks.saver.training.layout.parameters])):
        return ValueError(without_gradient(unused))
    if ranks and ranks.record and isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return not_written("the run", ranks.record.folder, error)  # the script failed to write a file
    return error


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True for out-of-memory errors of torch (GPU or CPU), of CUDA libraries and of Python."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and says_out_of_memory(str(error))
    )


def out_of_memory(accelerator: Accelerator, batch: Batch, error: BaseException) -> str:
    """Return a message with a batch size to try. Errors that do not mention memory are quoted."""
    smaller = batch.smaller()
    advice = "shard the model (fsdp_4gpu, zero3_4gpu, zero3_offload_4gpu) or use a smaller model"
    if smaller:
        advice = (
            f"try --per_device_batch_size {smaller}, which keeps --batch_size {batch.total} with"
            f" {batch.total // (smaller * batch.processes)} accumulations, or {advice}"
        )
    device = device_name(accelerator)
    first_line = str(error).partition("\n")[0]
    quoted = "" if "memory" in first_line or not first_line else f" (the error was: {first_line})"
    return f"out of memory on {device} with --per_device_batch_size {batch.per_device}: {advice}{quoted}"
