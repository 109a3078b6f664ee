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
from onecurve.distributed.strategy import device_name, missing_gradient_message, unused_parameters
from onecurve.distributed.watch import watch
from onecurve.flags.recipe import Batch, Recipe
from onecurve.run.folder import ANY_FOLDER_NAME, candidate_folders
from onecurve.run.identity import run_name
from onecurve.run.lease import OWNER_FILE
from onecurve.run.record import MAX_CHECKPOINT_WAIT_S
from onecurve.run.session import RunSession
from onecurve.system.files import read_json, write_error, write_json
from onecurve.system.phase import ENDING, SAVING, now
from onecurve.system.processes import says_out_of_memory
from onecurve.system.text import plural

# Errors of a full disk and of an exhausted disk quota
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
# Parts of error messages from torch
BATCH_NORM_ERROR = "Expected more than 1 value per channel when training"
NOT_DETERMINISTIC_ERROR = " does not have a deterministic implementation"


def end_preempted(session: RunSession, local_reason: str) -> None:
    """Save a final checkpoint after a signal, and close the run. All ranks must call this function.

    The main process writes the reason to metrics.jsonl, and the status to result.json. All other processes
    wait for the main process, because the launcher kills all processes as soon as one process exits.

    Args:
        session: State of the open run.
        local_reason: Reason why the run ends, or an empty string on a process that received no signal.

    Raises:
        FloatingPointError: If the loss is not finite, in which case no checkpoint is saved.
        ValueError: If the checkpoint can't be written.
    """
    now.enter(SAVING)
    exchange, main_record = session.exchange, session.main_record
    stop_reason = next(filter(None, exchange.poll.gather(local_reason)), "")
    if main_record:
        main_record.log.write_entry({"interrupted_at": time.time(), "why": stop_reason})
    # A single-process job may stop in the middle of a step, while it waits for a shard. An unfinished step
    # is discarded.
    try:
        session.write_newest_snapshot()
    except (FloatingPointError, ValueError):
        if main_record:
            main_record.close("failed")
        raise
    exchange.gather(None)  # Send the telemetry that was recorded after the newest snapshot
    # Wait until the main process has written the checkpoint
    exchange.poll.wait_for_main(main_record is not None, session.saver.wait_up_to)
    main_failure = main_record and main_record.failure_message()
    if main_record:
        main_record.close("failed" if main_failure else "preempted")
    [main_failure] = broadcast_object_list([main_failure])
    if main_failure:  # All processes raise the main process's error
        raise ValueError(main_failure)


def end_early(accelerator: Accelerator, recipe: Recipe, batch: Batch) -> None:
    """End a job that received a signal before the run was opened. No checkpoint is saved.

    The main process writes the status `preempted` to result.json in the run's folder. All other processes
    wait for the main process.
    """
    expected_folder = _expected_folder(accelerator, recipe, batch) if accelerator.is_main_process else None
    # OWNER_FILE exists if another process owns the folder, or if the owner was killed
    if expected_folder and not (expected_folder / OWNER_FILE).exists():
        result_file = expected_folder / "result.json"
        with contextlib.suppress(ValueError, OSError):
            recorded_result = read_json(result_file) if result_file.exists() else {}
            write_json(result_file, recorded_result | {"status": "preempted"})
    let_main_close_first(accelerator)


def end_failed(
    error: BaseException, accelerator: Accelerator, recipe: Recipe, batch: Batch, session: RunSession | None
) -> None:
    """Report an error to all ranks, record the failure, and close the run.

    Each process that fails calls this function. The main process first starts writing a snapshot that is held
    in memory. A known error is replaced with an error that explains the cause. All other processes wait for
    the main process to close its files.

    Args:
        error: Error that ended this process's training.
        accelerator: Accelerator of the job.
        recipe: Recipe of the run.
        batch: Division of the batch among processes.
        session: State of the open run, or None if the run has not been opened.

    Raises:
        BaseException: The error to report, if it is not `error` itself. This error explains `error`, or is
            another rank's error that caused `error`. Otherwise, the function returns, and Python raises
            `error` again at the end of the run's `with` statement.
    """
    watch.begin_exit()  # From now on, another rank's failure can't terminate this process
    now.enter(ENDING)
    main_record = session.main_record if session else None
    if main_record:
        main_record.write_held_snapshot()
    if isinstance(error, KeyboardInterrupt):
        local_error: BaseException = KeyboardInterrupt()
        if accelerator.is_main_process:
            resume_step = _resume_step(accelerator, recipe, batch, session)
            resume_action = f"resume at step {resume_step:,}" if resume_step else "start from the beginning"
            local_error = KeyboardInterrupt(f"run the same command to {resume_action}")
    else:
        local_error = explained_error(error, accelerator, batch, session)
    first_error = watch.report_failure(local_error)
    if main_record:
        error_message = str(first_error) or type(first_error).__name__
        is_run_interrupted = isinstance(first_error, KeyboardInterrupt)
        main_record.close_failed("interrupted" if is_run_interrupted else error_message)
    let_main_close_first(accelerator)
    if first_error is not error:
        raise first_error from error


def _resume_step(accelerator: Accelerator, recipe: Recipe, batch: Batch, session: RunSession | None) -> int:
    """Return the step at which the same command resumes the run, after waiting for an unfinished save.

    Ctrl-C does not save a checkpoint. The result is 0 if the same command starts from the beginning.
    """
    if session:
        session.saver.wait_up_to(MAX_CHECKPOINT_WAIT_S)
        return session.saver.committed_step or session.steps.first
    expected_folder = _expected_folder(accelerator, recipe, batch)
    return max(steps_in(expected_folder / "checkpoints"), default=0) if expected_folder else 0


def _expected_folder(accelerator: Accelerator, recipe: Recipe, batch: Batch) -> Path | None:
    """Return the folder that a run of this recipe would use, or None if the folder can't be determined.

    A missing folder is created. The folder is not leased.
    """
    with contextlib.suppress(ValueError, OSError):
        automatic_name = run_name(accelerator, recipe, batch)
        return next(candidate_folders(recipe, automatic_name, last_step=None))
    return None


def explained_error(
    error: BaseException, accelerator: Accelerator, batch: Batch, session: RunSession | None
) -> BaseException:
    """Return a ValueError that explains the cause and remedy of a known error.

    Other errors are returned unchanged. `session` is None if the run has not been opened.
    """
    if is_out_of_memory(error):
        return ValueError(out_of_memory_message(accelerator, batch, error))
    # The error for an undecodable image suggests this flag. Resuming with it also needs --allow_changed.
    if str(error).endswith("--on_bad_image skip") and session:
        has_given_folder = not (session.recipe.output_dir or ANY_FOLDER_NAME).endswith(ANY_FOLDER_NAME)
        # `is_run_resumable` is truthy if the same command would resume this run
        is_run_resumable = session.newest_saved_step or (has_given_folder and session.state.logged_step)
        return ValueError(f"{error} --allow_changed on_bad_image") if is_run_resumable else error
    if BATCH_NORM_ERROR in str(error):
        return ValueError(f"BatchNorm failed: {error}. Increase --per_device_batch_size or --image_size")
    if NOT_DETERMINISTIC_ERROR in str(error):
        operation, *_ = str(error).partition(NOT_DETERMINISTIC_ERROR)
        return ValueError(
            f"--deterministic: {operation.strip()} has no deterministic implementation on GPUs. Replace this"
            " operation in the script, or remove --deterministic"
        )
    if session:
        parameter_names = [*session.saver.training.layout.parameters]
        if unused_parameter_names := unused_parameters(error, parameter_names):
            return ValueError(missing_gradient_message(unused_parameter_names))
    if session and session.main_record and isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
        return write_error("the run", session.main_record.folder, error)  # The script could not write a file
    return error


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True for an out-of-memory error raised by torch (GPU or CPU), a CUDA library or Python."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and says_out_of_memory(str(error))
    )


def out_of_memory_message(accelerator: Accelerator, batch: Batch, error: BaseException) -> str:
    """Return a message that suggests a smaller batch size per device, sharding or a smaller model.

    If the first line of `error` does not mention memory, the message quotes this line.
    """
    smaller_batch_size = batch.smaller_per_device()
    remedy = "Shard the model (fsdp_4gpu, zero3_4gpu, zero3_offload_4gpu), or use a smaller model"
    if smaller_batch_size:
        accumulation_count = batch.total // (smaller_batch_size * batch.processes)
        remedy = (
            f"Try --per_device_batch_size {smaller_batch_size}, which keeps --batch_size {batch.total} with"
            f" {plural(accumulation_count, 'accumulation step')}. {remedy}"
        )
    device = device_name(accelerator)
    error_first_line, *_ = str(error).partition("\n")
    error_quote = ""
    if error_first_line and "memory" not in error_first_line:
        error_quote = f". The error was: {error_first_line}"
    return f"out of memory on {device} with --per_device_batch_size {batch.per_device}. {remedy}{error_quote}"
