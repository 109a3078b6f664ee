"""A run's facts: the contents of recipe.json, of result.json, and of the manifests of its checkpoints."""

import contextlib
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
from accelerate import Accelerator

from common.checkpoint.format import step_name
from common.distributed import strategy as job
from common.distributed.rendezvous import hosts, most_hosts
from common.recipe import Batch, Recipe, recipe_part
from common.run.folder import script_name
from common.run.state import RunState
from common.system.env import processes_per_host
from common.system.paths import ROOT, project_version
from common.telemetry.collect import ProcessInfo
from common.telemetry.flops import Utilisation
from common.telemetry.memory import memory_gib
from common.telemetry.summary import energy_wh

VAL_CHOSEN = "a hash of their ids"  # how --max_val_images chooses images; older versions took the first
ENTRIES = ("accelerate", "torchrun", "deepspeed")  # launchers
MODULES = ("accelerate.commands.launch", "torch.distributed.run")  # the same, as modules


def run_name(accelerator: Accelerator, recipe: Recipe, batch: Batch) -> str:
    """<strategy>_<batch>_<epochs>_<hosts>_<processes per host>; hosts that are away count, too."""
    hosts, on_each = most_hosts(), processes_per_host()
    strategy = job.strategy(accelerator)
    strategy = "ddp" if strategy == "single" and hosts * on_each > 1 else strategy
    return f"{strategy}_{batch.total}_{recipe.epochs}_{hosts}_{on_each}"


def about_run(
    accelerator: Accelerator,
    recipe: Recipe,
    processes: list[ProcessInfo],
    resumed_from: str | None,
    source: str,
) -> dict[str, Any]:
    """The content of recipe.json. processes: of all ranks. source: a name that changes with the data."""
    return {
        "script": script_name(),
        "strategy": job.strategy(accelerator),
        "sharding": job.sharding(accelerator),
        **dataclasses.asdict(accelerator.precision),
        "compile": str(accelerator.compilation),
        "grad_checkpointing": accelerator.grad_checkpointing,
        "recipe": dataclasses.asdict(recipe),
        "defaults": _defaults(recipe),
        "source": source,
        "unit": recipe.unit,
        "val_chosen": VAL_CHOSEN,
        "resumed_from": resumed_from,
        "command": _command(),
        "argv": sys.argv,
        "version": project_version(),
        "git_commit": _git_commit(),
        "versions": job.versions(),
        "hosts": list(dict.fromkeys(process.host for process in processes)),
        "devices": [process.device for process in processes],
    }


def about_checkpoint(
    about: dict[str, Any], recipe: Recipe, batch: Batch, accelerator: Accelerator, classes: tuple[str, ...]
) -> dict[str, Any]:
    """The part of a checkpoint's manifest about the run that writes it. about: recipe.json."""
    names = ("script", "strategy", "version", "git_commit", "versions", "hosts", "val_chosen")
    writer = {name: about[name] for name in names} | dataclasses.asdict(accelerator.precision)
    writer |= {"processes": batch.processes, "deterministic": recipe.deterministic}
    return {"recipe": recipe_part(recipe), "data": about["source"], "classes": classes, "written_by": writer}


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
    utilisation: Utilisation | None = None,
    memory: list[dict[str, float]] | None = None,
    telemetry: list[dict[str, Any]] | None = None,
    error: str | None = None,
) -> dict[str, Any]:
    """The content of result.json. Main process only.

    status: `finished`, `preempted` or `failed`. checkpoint: step of the newest. end: of a finished
    run, the steps of all epochs, and what ended it before them. tested: the best weights' metrics on the test
    split. memory: of all processes; by default of this one. telemetry: summaries, only of a finished run:
    after a day they take seconds, for which a launcher does not wait when it stops a run; the run's page then
    makes them. error: of a failed run.
    """
    images_per_s = state.logged_step * batch.total / state.train_s if state.train_s else None
    memory = memory or [memory_gib(accelerator)]
    summed = {} if telemetry is None else {"telemetry": telemetry, "energy_wh": energy_wh(telemetry)}
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
        **summed,
        "seed": recipe.seed,
        "checkpoint": _checkpoint_path(checkpoint),
        "best_checkpoint": _checkpoint_path(state.best_step),
        "error": error,
    }


def _defaults(recipe: Recipe) -> dict[str, Any]:
    """The script's default recipe; fields derived from batch_size have the values of this recipe."""
    own = type(recipe)()
    return dataclasses.asdict(type(recipe)(batch_size=recipe.batch_size)) | {"batch_size": own.batch_size}


def _checkpoint_path(step: int | None) -> str | None:
    """Relative to the run's folder; None at step 0."""
    return f"checkpoints/{step_name(step)}" if step else None


def _command() -> list[str]:
    """The command as typed: that of the outermost launcher of this script, else this process's.

    Words before the launcher (sudo, env, a shell) are left out: pages show the command, and they may be
    secret.
    """
    own = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    found = ["python", sys.argv[0], *own]
    for process in psutil.Process().parents():
        with contextlib.suppress(psutil.Error):
            python, *words = process.cmdline() or [""]
            tail = words[len(words) - len(own) :]
            names_script = any(Path(word).name == Path(sys.argv[0]).name for word in words)
            if not Path(python).name.startswith("python") or not names_script or tail != own:
                continue
            if Path(words[0]).name in ENTRIES:
                found = [Path(words[0]).name, *words[1:]]
            elif Path(words[0]).name == "launch.py" or (words[0] == "-m" and words[1] in MODULES):
                found = ["python", *words]
    return found


def _git_commit() -> str | None:
    """The commit of the code, followed by + if files differ from it; None outside of a repository."""
    try:
        commit, changed = (
            subprocess.run(
                ["git", "-C", ROOT, *words], capture_output=True, text=True, timeout=10, check=True
            ).stdout
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.strip() + ("+" if changed.strip() else "")
