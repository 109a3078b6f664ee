"""Errors that end a run, explained where their cause is known."""

import errno
from collections.abc import Iterable
from pathlib import Path

from accelerate import Accelerator

from common.distributed.gradients import unused_parameters, without_gradient
from common.recipe import Batch
from common.system.files import not_written
from common.telemetry.memory import is_out_of_memory, out_of_memory


def explained(
    error: BaseException,
    accelerator: Accelerator,
    batch: Batch,
    parameters: Iterable[str],
    folder: Path | None,
) -> BaseException:
    """A ValueError that says what to do, or the error itself.

    parameters: names of the trained ones, none before the training begins. folder: of the run, on the main
    process, once the training has begun.
    """
    if is_out_of_memory(error):
        return ValueError(out_of_memory(accelerator, batch))
    if unused := unused_parameters(error, list(parameters)):
        return ValueError(without_gradient(unused))
    if folder and isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return not_written("the run", folder, error)  # by the script itself
    return error


def where_it_resumes(step: int) -> KeyboardInterrupt:
    """After Ctrl-C, which saves nothing. step: of the newest checkpoint, 0 without one."""
    return KeyboardInterrupt(
        f"the same command goes on {f'at step {step:,}' if step else 'from the beginning'}"
    )
