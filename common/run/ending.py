"""Ends a run that does not finish: stopped by a signal, interrupted, or failed; explains known errors."""

import contextlib
import errno
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from common.checkpoint.format import steps_in
from common.distributed.preemption import agreed, reason
from common.distributed.strategy import device_name, unused_parameters, without_gradient
from common.distributed.watch import begin_exit, let_main_close_first, report_failure
from common.recipe import Batch
from common.run import finish
from common.run.folder import folders
from common.run.lease import RECORD
from common.run.opening import run_name
from common.system.env import report
from common.system.files import not_written, read_json, write_json
from common.system.paths import ROOT, python_command, shortest
from common.system.phase import ENDING, SAVING, now
from common.system.processes import says_out_of_memory

if TYPE_CHECKING:
    from common.run.run import Run

UPLOAD_GRACE_S = 15  # how long a preempted run waits for S3: launchers kill 30 s after SIGTERM
WRITING_GRACE_S = 8  # for a checkpoint in flight in a failed run; the other processes wait 10 s
ONE_VALUE = "Expected more than 1 value per channel when training"  # torch's words, as the next
NOT_DETERMINISTIC = " does not have a deterministic implementation"


def end_preempted(run: "Run") -> None:
    """Saves once. The others wait for the main process, because a launcher kills all when one exits.

    Collective. Raises FloatingPointError or ValueError if nothing could be saved.
    """
    agreed()
    if run.checkpoints is None:
        if run.accelerator.is_main_process:
            _record_early_preemption(run)
        let_main_close_first(run.accelerator)
        return
    now.enter(SAVING)
    exchange = run.exchange
    why = next(filter(None, exchange.poll.gather(reason())), "")
    if run.log:
        run.log.write_mark({"interrupted_at": time.time(), "why": why})
    # A single process may stop within a step, while it waits for a shard: that step does not count.
    try:
        run.checkpoints.flush()
    except (FloatingPointError, ValueError):
        close(run, "failed")
        raise
    exchange.gather(None)  # collects the telemetry since the newest snapshot
    exchange.wait_for_main(run.saver.done)
    problem = run.problem()
    close(run, "failed" if problem else "preempted")
    if problem := broadcast_object_list([problem])[0]:
        raise ValueError(problem)


def end_failed(error: BaseException, run: "Run") -> None:
    """Raises the error that all processes report, explained if its cause is known."""
    begin_exit()
    now.enter(ENDING)
    if run.checkpoints:
        _write_best(run)
    if isinstance(error, KeyboardInterrupt):
        own: BaseException = KeyboardInterrupt()
        if run.accelerator.is_main_process:
            step = _resume_step(run)
            place = f"at step {step:,}" if step else "from the beginning"
            own = KeyboardInterrupt(f"run the same command to resume {place}")
    else:
        own = explained(error, run)
    first = report_failure(own)
    if run.checkpoints:
        is_interrupted = isinstance(first, KeyboardInterrupt)
        close_failed(run, "interrupted" if is_interrupted else str(first) or type(first).__name__)
    let_main_close_first(run.accelerator)
    if first is not error:
        raise first from error


def close_failed(run: "Run", error: str) -> None:
    """Closes the run, also where another rank has failed. Writes a held checkpoint, and waits up to
    WRITING_GRACE_S for it or one in flight."""
    if run.log:
        _write_best(run)
        run.saver.done(WRITING_GRACE_S)
        close(run, "failed", error)


def close(run: "Run", status: str, error: str | None = None) -> None:
    """Closes files and trackers, releases the folder, and prints the command that makes the run's page.
    Ignores a full disk."""
    if not run.log or not run.place:
        return
    run.log.progress.stop()
    report("step", step=run.state.step)
    with contextlib.suppress(OSError):
        if status != "finished":
            content = finish.result(run, status, run.saver.committed, error)
            write_json(run.folder / "result.json", content)
    if status == "preempted" and run.place.mirror:
        run.place.mirror.wait(UPLOAD_GRACE_S)
    run.log.close(failed=status == "failed")
    print(python_command(shortest(ROOT / "logbook.py"), "add", run.folder), flush=True)
    run.place.release()


def _write_best(run: "Run") -> None:
    """Starts to write a held snapshot, unless a device error may have spoilt it."""
    if run.saver.training.is_copied():
        run.saver.write_held()


def _resume_step(run: "Run") -> int:
    """The step from which the same command resumes after Ctrl-C, which saves nothing."""
    if run.checkpoints:
        run.saver.done(WRITING_GRACE_S)
        return run.saver.committed or run.steps.first
    folder = _own_folder(run)
    return max(steps_in(folder / "checkpoints"), default=0) if folder else 0


def _record_early_preemption(run: "Run") -> None:
    """Writes `preempted` into result.json after a signal before the training. There is nothing to save."""
    folder = _own_folder(run)
    if folder is None or (folder / RECORD).exists():
        return  # in the second case another process runs there, or was killed
    file = folder / "result.json"
    with contextlib.suppress(ValueError, OSError):
        before = read_json(file) if file.exists() else finish.result(run, "preempted")
        write_json(file, before | {"status": "preempted"})


def _own_folder(run: "Run") -> Path | None:
    """The folder that this recipe would get, before it is opened; None where there can be none."""
    with contextlib.suppress(ValueError, OSError):
        return next(folders(run.recipe, run_name(run), None))
    return None


def explained(error: BaseException, run: "Run") -> BaseException:
    """A ValueError that says what to do, or the error itself."""
    if is_out_of_memory(error):
        return ValueError(out_of_memory(run.accelerator, run.batch, error))
    if str(error).endswith("--on_bad_image skip") and run.checkpoints:
        is_given = not (run.recipe.output_dir or "*").endswith("*")
        resumes = is_given or run.saver.gathered or run.saved_step  # what the next start does
        return ValueError(f"{error} --allow_changed on_bad_image") if resumes else error
    if ONE_VALUE in str(error):
        return ValueError(f"BatchNorm: {error}: give a larger --per_device_batch_size or --image_size")
    if NOT_DETERMINISTIC in str(error):
        operation = str(error).partition(NOT_DETERMINISTIC)[0].strip()
        return ValueError(
            f"--deterministic: {operation} has no deterministic form on a GPU: replace it in the script, or"
            " train without the flag"
        )
    if run.checkpoints and (unused := unused_parameters(error, [*run.saver.training.layout.parameters])):
        return ValueError(without_gradient(unused))
    if run.checkpoints and run.place and isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return not_written("the run", run.folder, error)  # the script itself was writing
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
