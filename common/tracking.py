"""One run: its folder, its metrics in metrics.jsonl and the trackers, its progress and its result."""

import dataclasses
import json
import math
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from common import accelerator as job
from common import report
from common.agreement import let_main_close_first
from common.files import write_json
from common.progress import progress
from common.recipe import Batch, Recipe, recipe_part
from common.trackers import finish_trackers, start_trackers, tracker_ids


class Run:
    """A context manager around the training loop. All processes call it, the main process writes and prints.

    Raises ValueError when the folder holds another run or can't be made, or when the loop inside ran out of
    memory: then with the size to try.
    """

    def __init__(
        self, accelerator: Accelerator, recipe: Recipe, batch: Batch, steps: int, steps_per_epoch: int
    ):
        self.accelerator, self.recipe, self.batch = accelerator, recipe, batch
        self.steps, self.steps_per_epoch = steps, steps_per_epoch  # optimizer steps of this run, of an epoch
        self.is_main = accelerator.is_main_process
        # summed over the micro-batches since the last line
        self.loss = torch.zeros((), device=accelerator.device)
        self.ids: list[int] = []  # of the samples since the last line, for --log_samples
        self.micro_batches = 0  # of this process, in this run
        self.told = 0.0
        self.logged_step = 0
        self.train_s = 0.0
        self.best: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.saved_weights: Path | None = None
        places = gather_object([(socket.gethostname(), job.device_name(accelerator))])
        if not self.is_main:
            return
        self.folder = open_folder(recipe, run_name(accelerator, recipe, batch))
        about = {
            "script": script_name(),
            "strategy": job.strategy(accelerator),
            "recipe": dataclasses.asdict(recipe),
            "argv": sys.argv,
            "git_commit": _git_commit(),
            "versions": job.versions(),
            "hosts": list(dict.fromkeys(host for host, _ in places)),
            "devices": [device for _, device in places],
        }
        self.trackers = start_trackers(recipe.trackers, self.folder, about)
        write_json(self.folder / "recipe.json", about | tracker_ids(self.trackers))
        self.metrics = open(self.folder / "metrics.jsonl", "w", buffering=1)  # noqa: SIM115 (closed in __exit__)
        if recipe.log_samples:
            self.samples = open(self.folder / "samples.jsonl", "w", buffering=1)  # noqa: SIM115
        self.progress = progress(recipe.epochs, steps)
        print(f"run folder {self.folder}", flush=True)

    def __enter__(self) -> "Run":
        self.mark = time.perf_counter()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.is_main:
            self._close(failed=kind is not None)
        if kind is not None:
            let_main_close_first(self.accelerator)
        if is_out_of_memory(error):
            raise ValueError(self._out_of_memory()) from error

    def _close(self, failed: bool) -> None:
        self.progress.stop()
        if failed:
            write_json(self.folder / "result.json", self._result("failed"))
        self.metrics.close()
        if self.recipe.log_samples:
            self.samples.close()
        finish_trackers(self.trackers, failed)

    def _out_of_memory(self) -> str:
        batch, smaller = self.batch, self.batch.smaller()
        advice = "shard the model (fsdp_4gpu, zero3_4gpu, zero3_offload_4gpu) or take a smaller one"
        if smaller:
            advice = (
                f"try --per_device_batch_size {smaller}, the same --batch_size {batch.total} with"
                f" {batch.total // (smaller * batch.processes)} accumulations, or {advice}"
            )
        device = job.device_name(self.accelerator)
        return f"out of memory on {device} with --per_device_batch_size {batch.per_device}: {advice}"

    def add(self, loss: Tensor, ids: np.ndarray) -> None:
        """One micro-batch: its loss stays on the device until the next line."""
        self.loss += loss.detach()
        self.micro_batches += 1
        self.tell(f"step {self.micro_batches // self.batch.accumulations:,}/{self.steps:,}")
        if self.recipe.log_samples:
            self.ids.extend(ids.tolist())

    def log_training(self, step: int, lr: float) -> None:
        """One line for the steps since the last: mean loss, rate, speed. Collective; waits for the device.

        Raises FloatingPointError on all processes when the loss is not finite.
        """
        summed = (step - self.logged_step) * self.batch.accumulations
        loss = (self.accelerator.reduce(self.loss, "mean") / summed).item()
        self.loss.zero_()
        self._write_samples()
        now = time.perf_counter()
        images_per_s = (step - self.logged_step) * self.batch.total / (now - self.mark)
        self.train_s += now - self.mark
        self.mark, self.logged_step = now, step
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} at step {step} with learning rate {lr:g}")
        self._write(step, {"train/loss": loss, "train/lr": lr, "train/images_per_s": images_per_s})

    def tell(self, doing: str) -> None:
        """Shows that the work gets on: between two lines of the log, without waiting for the device."""
        if self.is_main and time.perf_counter() - self.told > 1:
            self.told = time.perf_counter()
            self.progress.tell(doing)

    def log_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Loss, images and, of classes, accuracy on held-out data; with an EMA raw_accuracy, without it."""
        self.mark = time.perf_counter()
        self.last = metrics
        if not self.best or _score(metrics) > _score(self.best):
            self.best = metrics | {"step": step}
        self._write(step, {f"val/{k}": v for k, v in metrics.items() if k != "images"})

    def finish(self, model_folder: Path, val_name: str) -> None:
        """Writes result.json and plots/, prints the table. Collective."""
        self.peaks = gather_object([peak_memory_gib(self.accelerator)])
        if not self.is_main:
            return
        self.progress.stop()
        self.saved_weights = model_folder
        write_json(self.folder / "result.json", self._result("finished"))
        report.show(self.folder, val_name)

    def checkpoint_folder(self, step: int) -> Path:
        """Where the weights of a step belong; on the other processes a name that is not used."""
        return (self.folder if self.is_main else Path()) / "checkpoints" / f"step_{step:08d}"

    def _write_samples(self) -> None:
        """The sample ids since the last line, each step's in the order of its whole batch."""
        if not self.recipe.log_samples:
            return
        per_rank = gather_object([self.ids])
        self.ids = []
        if not self.is_main:
            return
        share = self.batch.per_device * self.batch.accumulations
        for i in range(len(per_rank[0]) // share):
            ids = [sample for ids in per_rank for sample in ids[i * share : (i + 1) * share]]
            self.samples.write(json.dumps({"step": self.logged_step + i + 1, "samples": ids}) + "\n")

    def _write(self, step: int, values: dict[str, float]) -> None:
        if not self.is_main:
            return
        epoch = step / self.steps_per_epoch
        self.metrics.write(json.dumps({"step": step, "epoch": epoch, **values}) + "\n")
        for tracker in self.trackers:
            tracker.log({"epoch": epoch, **values}, step=step)
        self.progress.show(step, epoch, values)

    def _result(self, status: str) -> dict[str, Any]:
        recipe, batch, accelerator = self.recipe, self.batch, self.accelerator
        return {
            "script": script_name(),
            "status": status,
            "strategy": job.strategy(accelerator),
            "mixed_precision": job.precision(accelerator),
            "hosts": _hosts(batch),
            "processes": batch.processes,
            "device": job.device_name(accelerator),
            "data": recipe.data,
            "batch_size": batch.total,
            "per_device_batch_size": batch.per_device,
            "accumulation_steps": batch.accumulations,
            "epochs": recipe.epochs,
            "steps": self.logged_step,
            "best_accuracy": self.best.get("accuracy"),
            "best_loss": self.best.get("loss") if "accuracy" not in self.best else None,
            "best_step": self.best.get("step"),
            "final_accuracy": self.last.get("accuracy"),
            "final_loss": self.last.get("loss"),
            "val_images": self.last.get("images"),
            "train_s": self.train_s,
            "wall_s": time.time() - _process_start(),
            "images_per_s": self.logged_step * batch.total / self.train_s if self.train_s else None,
            "peak_memory_gib": max(getattr(self, "peaks", [peak_memory_gib(accelerator)])),
            "seed": recipe.seed,
            "checkpoint": str(self.saved_weights.relative_to(self.folder)) if self.saved_weights else None,
        }


def is_out_of_memory(error: BaseException | None) -> bool:
    """Of torch's allocators on GPU and CPU, of CUDA's libraries, of Python."""
    texts = ("out of memory", "ALLOC_FAILED", "CUDA calloc", "can't allocate memory")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    )


def _score(metrics: dict[str, float]) -> float:
    """What the best evaluation has most of: accuracy, or, where there are no classes, the negative loss."""
    return metrics.get("accuracy", -metrics["loss"])


def run_name(accelerator: Accelerator, recipe: Recipe, batch: Batch) -> str:
    """<strategy>_<batch>_<epochs>_<hosts>_<processes per host>"""
    hosts = _hosts(batch)
    return f"{job.strategy(accelerator)}_{batch.total}_{recipe.epochs}_{hosts}_{batch.processes // hosts}"


def open_folder(recipe: Recipe, name: str) -> Path:
    """Makes the run's folder: exactly --output_dir, or the next free <name>, <name>-2 in --model_folder."""
    try:
        if recipe.output_dir is None:
            return _next_free(Path(recipe.model_folder or "runs") / script_name(), name)
        folder = Path(recipe.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"can't make the run folder {error.filename}: {error.strerror}") from None
    if (folder / "recipe.json").exists():
        raise ValueError(
            f"--output_dir {folder} holds a run already{_differences(folder, recipe)}:"
            " give another folder, or move that one away"
        )
    return folder


def _next_free(parent: Path, name: str) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()  # fails when it exists, so two runs never share one
            return folder
        except FileExistsError:
            number += 1


def _differences(folder: Path, recipe: Recipe) -> str:
    """' (its epochs is 3, here 10)' for the parts of the recipe in which the folder's run differs."""
    try:
        theirs = json.loads((folder / "recipe.json").read_text())["recipe"]
    except (OSError, ValueError, KeyError):
        return ""
    ours = json.loads(json.dumps(recipe_part(recipe)))
    differing = [
        f"its {key} is {theirs.get(key)}, here {value}"
        for key, value in ours.items()
        if theirs.get(key) != value
    ]
    return f" ({'; '.join(differing)})" if differing else ""


def script_name() -> str:
    return Path(sys.argv[0]).stem


def peak_memory_gib(accelerator: Accelerator) -> float:
    """Of this process: what torch allocated at most on the GPU, or the resident set on CPU."""
    if accelerator.device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _hosts(batch: Batch) -> int:
    return max(1, batch.processes // job.processes_per_host())


def _process_start() -> float:
    """Seconds since the epoch at which this process began, imports included."""
    import psutil

    return psutil.Process().create_time()


def _git_commit() -> str | None:
    """The commit of the code, with + behind it when files differ from it; None outside of a repository."""
    here = Path(__file__).parent
    try:
        commit, changed = (
            subprocess.run(
                ["git", "-C", here, *words], capture_output=True, text=True, timeout=10, check=True
            ).stdout
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.strip() + ("+" if changed.strip() else "")
