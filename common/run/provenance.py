"""Where a run comes from: the contents of recipe.json, and of the manifests of its checkpoints."""

import contextlib
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator

from common.distributed import strategy as job
from common.distributed.rendezvous import most_hosts
from common.recipe import Batch, Recipe, recipe_part
from common.run.folder import script_name
from common.system.env import processes_per_host
from common.system.paths import ROOT, project_version
from common.telemetry.sampling import ProcessInfo

VAL_CHOSEN = "a hash of their ids"  # how --max_val_images chooses images
ENTRIES = ("accelerate", "torchrun", "deepspeed")  # launchers
MODULES = ("accelerate.commands.launch", "torch.distributed.run")  # the same, as modules


def run_name(accelerator: Accelerator, recipe: Recipe, batch: Batch) -> str:
    """<strategy>_<batch>_<epochs>_<hosts>_<processes per host>; hosts that are away count, too."""
    hosts, on_each = most_hosts(), processes_per_host()
    strategy = job.strategy(accelerator)
    strategy = "ddp" if strategy == "single" and hosts * on_each > 1 else strategy
    return f"{strategy}_{batch.total}_{recipe.epochs}_{hosts}_{on_each}"


def run_record(
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
        "threads": torch.get_num_threads(),
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


def checkpoint_record(
    record: dict[str, Any], recipe: Recipe, batch: Batch, accelerator: Accelerator, classes: tuple[str, ...]
) -> dict[str, Any]:
    """The part of a checkpoint's manifest about the run that writes it. record: recipe.json."""
    names = ("script", "strategy", "version", "git_commit", "versions", "hosts", "val_chosen")
    writer = {name: record[name] for name in names} | dataclasses.asdict(accelerator.precision)
    writer |= {"processes": batch.processes, "deterministic": recipe.deterministic}
    return {"recipe": recipe_part(recipe), "data": record["source"], "classes": classes, "written_by": writer}


def _defaults(recipe: Recipe) -> dict[str, Any]:
    """The script's default recipe; fields derived from batch_size have the values of this recipe."""
    own = type(recipe)()
    return dataclasses.asdict(type(recipe)(batch_size=recipe.batch_size)) | {"batch_size": own.batch_size}


def _command() -> list[str]:
    """The command as typed: that of the outermost launcher of this script, else this process's.

    Words before the launcher (sudo, env, a shell) are left out: pages show the command, and they may be
    secret.
    """
    own = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    command = ["python", sys.argv[0], *own]
    for process in psutil.Process().parents():
        with contextlib.suppress(psutil.Error):
            python, *words = process.cmdline() or [""]
            names_script = any(Path(word).name == Path(sys.argv[0]).name for word in words)
            is_python = Path(python).name.startswith("python")
            if not is_python or not names_script or words[len(words) - len(own) :] != own:
                continue
            if Path(words[0]).name in ENTRIES:
                command = [Path(words[0]).name, *words[1:]]
            elif Path(words[0]).name == "launch.py" or (words[0] == "-m" and words[1] in MODULES):
                command = ["python", *words]
    return command


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
