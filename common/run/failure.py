"""Explains errors that end a run, if their cause is known."""

import errno
from collections.abc import Iterable
from pathlib import Path

from accelerate import Accelerator

from common.checkpoint.saver import Saver
from common.distributed.strategy import unused_parameters, without_gradient
from common.recipe import Batch, Recipe
from common.run.output import newest_step
from common.system.files import not_written
from common.telemetry.memory import is_out_of_memory, out_of_memory

WRITING_GRACE_S = 8  # for a checkpoint in flight in a failed run; the other processes wait 10 s

NOT_DETERMINISTIC = " does not have a deterministic implementation"  # torch's words


def explained(
    error: BaseException,
    accelerator: Accelerator,
    batch: Batch,
    parameters: Iterable[str],
    folder: Path | None,
) -> BaseException:
    """A ValueError that says what to do, or the error itself.

    parameters: names of the trained parameters, empty before the training begins. folder: the run's folder on
    the main process, once the training has begun; else None.
    """
    if is_out_of_memory(error):
        return ValueError(out_of_memory(accelerator, batch, error))
    if NOT_DETERMINISTIC in str(error):
        operation = str(error).partition(NOT_DETERMINISTIC)[0].strip()
        return ValueError(
            f"--deterministic: {operation} has no deterministic form on a GPU: replace it in the script, or"
            " train without the flag"
        )
    if unused := unused_parameters(error, list(parameters)):
        return ValueError(without_gradient(unused))
    if folder and isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return not_written("the run", folder, error)  # the script itself was writing
    return error


def interruption(
    accelerator: Accelerator, recipe: Recipe, batch: Batch, saver: Saver | None, first_step: int
) -> KeyboardInterrupt:
    """The error after Ctrl-C, which saves nothing. On the main process it names the step to resume from.

    saver: None before the run has begun. first_step: the step at which this process began.
    """
    if not accelerator.is_main_process:
        return KeyboardInterrupt()
    if saver is None:
        step = newest_step(accelerator, recipe, batch)
    else:
        saver.done(WRITING_GRACE_S)
        step = saver.committed or first_step
    where = f"at step {step:,}" if step else "from the beginning"
    return KeyboardInterrupt(f"the same command goes on {where}")
