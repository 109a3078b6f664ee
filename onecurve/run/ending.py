"""Ends a run that does not finish: stopped by a signal, interrupted, or failed; explains known errors."""

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

ONE_VALUE = "Expected more than 1 value per channel when training"  # torch's words, as the next
NOT_DETERMINISTIC = " does not have a deterministic implementation"


def end_preempted(ranks: Ranks, why: str) -> None:
    """Save once. The others wait for the main process, because a launcher kills all when one exits.

    why: the reason on this process, if there is one. Collective. Raises FloatingPointError or ValueError if
    nothing could be saved.
    """
    now.enter(SAVING)
    exchange, record = ranks.exchange, ranks.record
    why = next(filter(None, exchange.poll.gather(why)), "")
    if record:
        record.log.write_mark({"interrupted_at": time.time(), "why": why})
    # A single process may stop within a step, while it waits for a shard: that step does not count.
    try:
        ranks.flush()
    except (FloatingPointError, ValueError):
        if record:
            record.close("failed")
        raise
    exchange.gather(None)  # collects the telemetry since the newest snapshot
    exchange.poll.wait_for_main(record is not None, ranks.saver.done)
    problem = record and record.problem()
    if record:
        record.close("failed" if problem else "preempted")
    if problem := broadcast_object_list([problem])[0]:
        raise ValueError(problem)


def end_early(accelerator: Accelerator, recipe: Recipe, batch: Batch) -> None:
    """Writes `preempted` into result.json after a signal before the training. There is nothing to save."""
    folder = _own_folder(accelerator, recipe, batch) if accelerator.is_main_process else None
    if folder and not (folder / RECORD).exists():  # else another process runs there, or was killed
        file = folder / "result.json"
        with contextlib.suppress(ValueError, OSError):
            write_json(file, (read_json(file) if file.exists() else {}) | {"status": "preempted"})
    let_main_close_first(accelerator)


def end_failed(
    error: BaseException, accelerator: Accelerator, recipe: Recipe, batch: Batch, ranks: Ranks | None
) -> None:
    """Raises the error that all processes report, explained if its cause is known. ranks: after begin()."""
    watch.begin_exit()
    now.enter(ENDING)
    record = ranks.record if ranks else None
    if record:
        record.write_best()
    if isinstance(error, KeyboardInterrupt):
        own: BaseException = KeyboardInterrupt()
        if accelerator.is_main_process:
            step = _resume_step(accelerator, recipe, batch, ranks)
            place = f"at step {step:,}" if step else "from the beginning"
            own = KeyboardInterrupt(f"run the same command to resume {place}")
    else:
        own = explained(error, accelerator, batch, ranks)
    first = watch.report_failure(own)
    if record:
        is_interrupted = isinstance(first, KeyboardInterrupt)
        record.close_failed("interrupted" if is_interrupted else str(first) or type(first).__name__)
    let_main_close_first(accelerator)
    if first is not error:
        raise first from error


def _resume_step(accelerator: Accelerator, recipe: Recipe, batch: Batch, ranks: Ranks | None) -> int:
    """The step from which the same command resumes after Ctrl-C, which saves nothing."""
    if ranks:
        ranks.saver.done(WRITING_GRACE_S)
        return ranks.saver.committed or ranks.steps.first
    folder = _own_folder(accelerator, recipe, batch)
    return max(steps_in(folder / "checkpoints"), default=0) if folder else 0


def _own_folder(accelerator: Accelerator, recipe: Recipe, batch: Batch) -> Path | None:
    """The folder that this recipe would get, before it is opened; None where there can be none."""
    with contextlib.suppress(ValueError, OSError):
        return next(folders(recipe, run_name(accelerator, recipe, batch), None))
    return None


def explained(
    error: BaseException, accelerator: Accelerator, batch: Batch, ranks: Ranks | None
) -> BaseException:
    """A ValueError that says what to do, or the error itself."""
    if is_out_of_memory(error):
        return ValueError(out_of_memory(accelerator, batch, error))
    if str(error).endswith("--on_bad_image skip") and ranks:
        is_given = not (ranks.recipe.output_dir or "*").endswith("*")
        resumes = ranks.newest or (is_given and ranks.state.logged_step)  # what the next start does
        return ValueError(f"{error} --allow_changed on_bad_image") if resumes else error
    if ONE_VALUE in str(error):
        return ValueError(f"BatchNorm: {error}: give a larger --per_device_batch_size or --image_size")
    if NOT_DETERMINISTIC in str(error):
        operation = str(error).partition(NOT_DETERMINISTIC)[0].strip()
        return ValueError(
            f"--deterministic: {operation} has no deterministic form on a GPU: replace it in the script, or"
            " train without the flag"
        )
    if ranks and (unused := unused_parameters(error, [*ranks.saver.training.layout.parameters])):
        return ValueError(without_gradient(unused))
    if ranks and ranks.record and isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return not_written("the run", ranks.record.folder, error)  # the script itself was writing
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
