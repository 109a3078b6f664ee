"""The end of a run: result.json, plots/, and the last upload."""

import dataclasses
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator

from common.checkpoint.format import Checkpoint, Damaged, step_name, steps_in, verify, write_index
from common.distributed import strategy as job
from common.distributed.rendezvous import hosts
from common.recipe import Batch, Recipe
from common.run import result_tables
from common.run.folder import script_name
from common.run.log import Predictions
from common.run.opening import OpenRun, writing
from common.run.state import RunState
from common.system.files import read_json, sync, write_json
from common.system.threads import Heartbeat
from common.telemetry.summary import energy_wh

if TYPE_CHECKING:  # imported where it is needed
    from common.telemetry.flops import Utilisation


def find_best(opened: OpenRun, heartbeat: Heartbeat) -> Checkpoint | None:
    """Finds and verifies the checkpoint of the best evaluation, here or in S3; None if it is gone. Main
    process only."""
    assert opened.folder
    opened.wait_for_save(heartbeat)
    step, parent, mirror = opened.state.best_step, opened.folder.path / "checkpoints", opened.folder.mirror
    assert step
    gone: tuple[type[ValueError], ...] = (Damaged,)
    try:
        if mirror and step not in steps_in(parent):
            from common.checkpoint.mirror import committed, fetch
            from common.system.s3 import WrongSize

            gone = (Damaged, WrongSize)
            if step in committed(mirror.store):
                fetch(mirror.store, step, parent, heartbeat, mirror.report)
        return verify(parent / step_name(step), heartbeat)
    except gone as error:
        print(f"no test accuracy: the best weights, of step {step:,}, are gone: {error}", flush=True)
        return None


def write_end(opened: OpenRun, predictions: Predictions, parts: dict[str, Any], heartbeat: Heartbeat) -> None:
    """Completes the run on this disk. A kill or a full disk at any point loses no training.

    Main process only. parts: of result(), known only now. The steps:

    1. The last checkpoint is committed, and index.json names it.
    2. Pictures are drawn into plots/.
    3. The trackers are closed.
    4. result.json says `finished`, and with a mirror `uploaded` false.
    5. upload() sends the checkpoint and the run's files to S3, result.json last.
    6. result.json says `uploaded` true.

    After an interruption the same command restores the last checkpoint, repeats its evaluation, which the
    pictures show, and then all steps. Once result.json says `finished` and, with a mirror, `uploaded` true,
    the same command begins another run.
    """
    assert opened.folder
    assert opened.log
    folder, mirror, state, log = opened.folder.path, opened.folder.mirror, opened.state, opened.log
    opened.final = parts
    log.progress.stop()
    opened.wait_for_save(heartbeat)
    with writing("the end of the run", folder):
        # After an interruption an evaluation may come after its checkpoint.
        write_index(folder / "checkpoints", state.step, state.best_step)
        if mirror:
            mirror.offer(state.step, state.best_step)
        content = result_of(opened, "finished", telemetry=opened.exchange.telemetry.summaries())
        content |= {"uploaded": False} if mirror else {}
        try:
            result_tables.draw(folder, content)
            log.show(state.step, predictions.draw(folder / "plots"))
        except OSError:
            raise
        except Exception as error:  # libraries raise many kinds
            print(f"not all pictures are in {folder / 'plots'}: {type(error).__name__}: {error}", flush=True)
        log.close(failed=False)
        for file in (folder / "metrics.jsonl", *folder.glob("plots/*")):
            sync(file)
        write_json(folder / "result.json", content)
    result_tables.show(folder)


def upload(opened: OpenRun, heartbeat: Heartbeat) -> None:
    """Waits until the mirror has sent everything, and writes into result.json if it succeeded. Main process
    only."""
    assert opened.folder
    assert opened.log
    mirror, file = opened.folder.mirror, opened.folder.path / "result.json"
    if mirror is None:
        return
    mirror.retry()
    while not mirror.wait(0.5):
        opened.log.progress.tell(f"uploading to {mirror.store.url}")
        heartbeat()
    content = read_json(file) | {"uploaded": mirror.failed is None, "wall_s": opened.state.wall_now_s()}
    if content["uploaded"]:
        try:
            mirror.send_last_files(content)
        except (OSError, ValueError) as error:  # StoreError is one
            content["uploaded"] = False
            print(f"the result is not in {mirror.store.url} ({error}): run the same command to send it")
    with writing("result.json", file.parent):
        write_json(file, content)


def result_of(opened: OpenRun, status: str, **parts: Any) -> dict[str, Any]:
    """The content of result.json of a run that has begun. Main process only. parts: as result() has them."""
    parts |= opened.final | {"checkpoint": opened.saver.committed}
    return result(opened.accelerator, opened.recipe, opened.batch, opened.state, status, **parts)


def result(
    accelerator: Accelerator,
    recipe: Recipe,
    batch: Batch,
    state: RunState,
    status: str,
    *,
    checkpoint: int | None = None,
    end: dict[str, Any] | None = None,
    val_name: str | None = None,
    tested: dict[str, Any] | None = None,
    utilisation: "Utilisation | None" = None,
    memory: list[dict[str, float]] | None = None,
    telemetry: list[dict[str, Any]] | None = None,
    error: str | None = None,
) -> dict[str, Any]:
    """The content of result.json. Main process only.

    status: `finished`, `preempted` or `failed`. checkpoint: step of the newest. end: of a finished run, the
    steps of all epochs, and what ended it before them. tested: the best weights' metrics on the test split.
    memory: of all processes; by default of this one. telemetry: summaries, only of a finished run: after a
    day they take seconds, for which a launcher does not wait when it stops a run; the run's page then makes
    them. error: of a failed run.
    """
    images_per_s = state.logged_step * batch.total / state.train_s if state.train_s else None
    memory = memory or [memory_gib(accelerator)]
    return {
        "script": script_name(),
        "status": status,
        "strategy": job.strategy(accelerator),
        **dataclasses.asdict(accelerator.precision),
        "compile": str(accelerator.compilation),
        "grad_checkpointing": accelerator.grad_checkpointing,
        "deterministic": recipe.deterministic,
        "hosts": hosts(),
        "processes": batch.processes,
        "device": job.device_name(accelerator),
        "data": recipe.data,
        "batch_size": batch.total,
        "per_device_batch_size": batch.per_device,
        "accumulation_steps": batch.accumulations,
        "epochs": recipe.epochs,
        "steps": state.step,
        **(end or {}),
        "best_accuracy": state.best.get("accuracy"),
        "best_loss": state.best.get("loss") if "accuracy" not in state.best else None,
        "best_step": state.best_step,
        "final_accuracy": state.last.get("accuracy"),
        "final_loss": state.last.get("loss"),
        "val_name": val_name,
        "val_images": state.last.get("images"),
        **(tested or {}),
        "bad_images": len(state.bad_images),
        "train_s": state.train_s,
        "wall_s": state.wall_now_s(),
        "spent_s": state.spent_now_s(),
        "images_per_s": images_per_s,
        **(utilisation.facts(images_per_s) if utilisation else {}),
        "peak_memory_gib": max(peak["peak"] for peak in memory),
        "memory_gib": memory,
        **({} if telemetry is None else {"telemetry": telemetry, "energy_wh": energy_wh(telemetry)}),
        "seed": recipe.seed,
        "checkpoint": _checkpoint_path(checkpoint),
        "best_checkpoint": _checkpoint_path(state.best_step),
        "error": error,
    }


def _checkpoint_path(step: int | None) -> str | None:
    """Relative to the run's folder; None at step 0."""
    return f"checkpoints/{step_name(step)}" if step else None


def memory_gib(accelerator: Accelerator, is_healthy: bool = False) -> dict[str, float]:
    """Memory of this process in GiB. `peak`: torch's peak allocation on a GPU, the peak resident set on CPU.

    On a GPU also `reserved`, the peak of torch's allocator. is_healthy: the GPU can be asked, which adds
    `other`, the memory in use outside of torch now (CUDA context, NCCL, other processes), and `device`, its
    size. On CPU also `data`, the writable memory requested so far, which RLIMIT_DATA limits.
    """
    if accelerator.device.type == "cuda":
        sizes = {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        if is_healthy:
            free, device = torch.cuda.mem_get_info()
            sizes |= {"other": device - free - torch.cuda.memory_reserved(), "device": device}
        return {name: size / 2**30 for name, size in sizes.items()}
    status = Path("/proc/self/status").read_text()
    data_kib = int(status.partition("VmData:")[2].split()[0])
    return {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, "data": data_kib / 2**20}
