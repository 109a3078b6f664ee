"""What a run says of itself in its folder: recipe.json at its start; at its end result.json, confusion.json
and, of classes, pictures of what it predicts."""

import contextlib
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from accelerate import Accelerator

from common.checkpoint.format import step_name
from common.distributed import accelerator as job
from common.recipe import Batch, Recipe
from common.run.folder import script_name
from common.system.env import processes_per_host
from common.system.paths import ROOT
from common.system.version import project_version
from common.telemetry.collect import Seat, energy_wh
from common.telemetry.memory import memory_gib

if TYPE_CHECKING:
    from common.run.run import Run

VAL_CHOSEN = "a hash of their ids"  # decides which images --max_val_images evaluates; once it was the first
ENTRIES = ("accelerate", "torchrun", "deepspeed")  # launchers
MODULES = ("accelerate.commands.launch", "torch.distributed.run")  # the same, as modules


def run_name(accelerator: Accelerator, recipe: Recipe, batch: Batch) -> str:
    """<strategy>_<batch>_<epochs>_<hosts>_<processes per host>"""
    hosts = _hosts(batch)
    return f"{job.strategy(accelerator)}_{batch.total}_{recipe.epochs}_{hosts}_{batch.processes // hosts}"


def about_run(
    accelerator: Accelerator, recipe: Recipe, seats: list[Seat], resumed_from: str | None, source: str
) -> dict[str, Any]:
    """recipe.json. seats: of all processes. source: a name of the data that changes with its content."""
    return {
        "script": script_name(),
        "strategy": job.strategy(accelerator),
        "sharding": job.sharding(accelerator),
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
        "hosts": list(dict.fromkeys(seat.host for seat in seats)),
        "devices": [seat.device for seat in seats],
    }


def result(run: "Run", status: str) -> dict[str, Any]:
    """result.json. Of the main process."""
    recipe, batch, accelerator = run.recipe, run.batch, run.accelerator
    memory = run.memory or [memory_gib(accelerator)]  # of all processes only where a run has finished
    # Otherwise a launcher waits for this, and a day of telemetry takes seconds to read; its page does it.
    summed = {}
    if status == "finished":
        telemetry = run.telemetry.summaries()
        summed = {"telemetry": telemetry, "energy_wh": energy_wh(telemetry)}
    return {
        "script": script_name(),
        "status": status,
        "strategy": job.strategy(accelerator),
        "mixed_precision": job.precision(accelerator),
        "compile": str(accelerator.compilation),
        "grad_checkpointing": accelerator.grad_checkpointing,
        "hosts": _hosts(batch),
        "processes": batch.processes,
        "device": job.device_name(accelerator),
        "data": recipe.data,
        "batch_size": batch.total,
        "per_device_batch_size": batch.per_device,
        "accumulation_steps": batch.accumulations,
        "epochs": recipe.epochs,
        "steps": run.step,
        "best_accuracy": run.best.get("accuracy"),
        "best_loss": run.best.get("loss") if "accuracy" not in run.best else None,
        "best_step": run.best.get("step"),
        "final_accuracy": run.last.get("accuracy"),
        "final_loss": run.last.get("loss"),
        "val_name": run.val_name,
        "val_images": run.last.get("images"),
        "bad_images": len(run.bad_images),
        "train_s": run.train_s,
        "wall_s": run.wall_s(),
        "images_per_s": run.logged_step * batch.total / run.train_s if run.train_s else None,
        "peak_memory_gib": max(peak["peak"] for peak in memory),
        "memory_gib": memory,
        **summed,
        "seed": recipe.seed,
        "checkpoint": _name(run.saver.committed if run.begun else None),
        "best_checkpoint": _name(run.best.get("step")),
        "error": run.error,
    }


def draw_predictions(run: "Run") -> list[Path]:
    """plots/confusion.png and predictions.png of the last evaluation.

    None where there are no classes, or too many, and where a restart came after the last evaluation.
    """
    if run.confusion is None:
        return []
    from common.report import plots

    step, folder = run.evaluated_step, run.folder / "plots"
    files = [folder / "confusion.png", folder / "predictions.png"]
    plots.confusion_matrix(files[0], run.confusion.tolist(), run.classes, f"step {step:,}")
    pixels, labels, logits = (
        torch.cat([getattr(part, name) for part in run.examples]) for name in ("pixels", "labels", "logits")
    )
    shares, predicted = logits.softmax(1).max(1)
    captions = [
        f"{run.classes[label]}\n{run.classes[guess]}\n{share:.2f}"
        for label, guess, share in zip(labels, predicted, shares, strict=True)
    ]
    title = f"step {step:,}: the true class, the predicted one and its probability"
    plots.image_sheet(files[1], pixels.numpy(), captions, title, (labels != predicted).tolist())
    return files


def _defaults(recipe: Recipe) -> dict[str, Any]:
    """The script's own recipe; what is derived from batch_size follows from this recipe's."""
    own = type(recipe)()
    return dataclasses.asdict(type(recipe)(batch_size=recipe.batch_size)) | {"batch_size": own.batch_size}


def _hosts(batch: Batch) -> int:
    return max(1, batch.processes // processes_per_host())


def _name(step: int | None) -> str | None:
    """Of a step's checkpoint, in the run's folder."""
    return f"checkpoints/{step_name(step)}" if step else None


def _command() -> list[str]:
    """What was typed: of the outermost launcher that was given this script, else our own words.

    Of launchers alone: what stands before them (sudo, env, a shell) may name a secret, and this is published.
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
    """The commit of the code, with + behind it when files differ from it; None outside of a repository."""
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
