"""Ends a run that does not finish: stopped by a signal, interrupted, or failed.

snapshots: of the run; None before it has begun.
"""

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from common.distributed.preemption import agreed, reason
from common.distributed.watch import begin_exit, let_main_close_first, report_failure
from common.recipe import Batch, Recipe
from common.run.failure import WRITING_GRACE_S, explained, interruption
from common.run.opening import OpenRun
from common.run.output import note_early_preemption
from common.run.snapshots import Snapshots
from common.system.phase import ENDING, SAVING, now


def end_preempted(
    accelerator: Accelerator, recipe: Recipe, batch: Batch, snapshots: Snapshots | None
) -> None:
    """Saves once. The others wait for the main process, because a launcher kills all when one exits.

    Collective. Raises FloatingPointError or ValueError if nothing could be saved.
    """
    agreed()
    if snapshots is None:
        if accelerator.is_main_process:
            note_early_preemption(accelerator, recipe, batch)
        let_main_close_first(accelerator)
        return
    now.enter(SAVING)
    opened = snapshots.opened
    state, output, saver, exchange = opened.state, opened.output, opened.saver, opened.exchange
    why = next(filter(None, exchange.poll.gather(reason())), "")
    if output:
        output.log.write_interruption(state.step, state.wall_now_s(), why)
    # A single process may stop within a step, while it waits for a shard: that step does not count.
    try:
        snapshots.flush()
    except FloatingPointError:
        close(opened, "failed")
        raise
    exchange.gather(None)  # collects the telemetry since the newest snapshot
    exchange.wait_for_main(saver.done)
    problem = exchange.problem()
    close(opened, "failed" if problem else "preempted")
    if problem := broadcast_object_list([problem])[0]:
        raise ValueError(problem)


def end_failed(
    error: BaseException,
    accelerator: Accelerator,
    recipe: Recipe,
    batch: Batch,
    snapshots: Snapshots | None,
) -> None:
    """Raises the error that all processes report, explained if its cause is known."""
    begin_exit()
    now.enter(ENDING)
    opened = snapshots.opened if snapshots else None
    saver = opened.saver if opened else None
    if opened:
        write_best(opened)
    if isinstance(error, KeyboardInterrupt):
        first_step = snapshots.steps.first if snapshots else 0
        mine: BaseException = interruption(accelerator, recipe, batch, saver, first_step)
    else:
        parameters = saver.training.layout.parameters if saver else ()
        folder = opened.output.folder if opened and opened.output else None
        mine = explained(error, accelerator, batch, parameters, folder)
    first = report_failure(mine)
    if opened:
        interrupted = isinstance(first, KeyboardInterrupt)
        close_failed(opened, "interrupted" if interrupted else str(first) or type(first).__name__)
    let_main_close_first(accelerator)
    if first is not error:
        raise first from error


def close_failed(opened: OpenRun, error: str) -> None:
    """Closes the run, also where another rank has failed. Writes a held checkpoint, and waits up to
    WRITING_GRACE_S for it or one in flight."""
    if opened.output:
        write_best(opened)
        opened.saver.done(WRITING_GRACE_S)
        close(opened, "failed", error)


def write_best(opened: OpenRun) -> None:
    """Starts to write a held snapshot, unless a device error may have spoilt it."""
    if opened.saver.training.is_copied():
        opened.saver.write_held()


def close(opened: OpenRun, status: str, error: str | None = None) -> None:
    if opened.output:
        opened.output.close(opened.state, status, error)
