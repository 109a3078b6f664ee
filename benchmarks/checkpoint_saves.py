"""Measure how long a checkpoint blocks training, compared with `accelerator.save_state`.

    python -m benchmarks.checkpoint_saves
    accelerate launch --config_file accelerate_configs/ddp_2gpu.yaml -m benchmarks.checkpoint_saves
    accelerate launch --config_file accelerate_configs/ddp_2gpu.yaml -m benchmarks.checkpoint_saves --resume

By default, the model is ViT-B/32 with AdamW. A save by onecurve blocks a step while each process copies its
state. `save_state` blocks a step for the whole save, although it does not wait for the disk. A barrier
precedes and follows each save, so the slowest process determines the measured time.

onecurve gathers and writes the checkpoint during the ten steps after a save. The benchmark compares the ten
steps after the save with ten steps before it. The benchmark also reports the peak resident memory during
these steps for the main process and for the other process that uses the most memory. --resume measures the
time from process start to the first step after resuming the checkpoint of an earlier run without --resume.
docs/resuming.md contains the results.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from accelerate.utils import broadcast_object_list, gather_object

from benchmarks.harness import benchmark_parser, in_turn, report, wait_for_device
from onecurve.checkpoint.format import STATE_FILE, newest
from onecurve.checkpoint.saver import Saver
from onecurve.checkpoint.training import TrainingState
from onecurve.distributed.accelerator import prepare, start
from onecurve.distributed.process import run_process
from onecurve.distributed.strategy import device_name, strategy
from onecurve.numerics.order import reseed
from onecurve.system.env import world_size
from train_vit import Vit, build_model, build_optimizer

STEPS = 10  # number of steps timed before and after a save


def main() -> None:
    parser = benchmark_parser(__doc__, 5, "python -m benchmarks.checkpoint_saves [flags]")
    add = parser.add_argument
    add("--model", default="vit_base_patch32_224", metavar="NAME", help="timm model (default: %(default)s)")
    add("--per_device_batch_size", type=int, default=4, metavar="N", help="images per process (default: 4)")
    add("--mixed_precision", metavar="NAME", help="no, fp16 or bf16 (default: the script's default)")
    add(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / "checkpoint_saves",
        metavar="PATH",
        help="folder for the checkpoints (default: %(default)s)",
    )
    add("--resume", action="store_true", help="measure the time of a resume from an earlier run's checkpoint")
    flags = parser.parse_args()
    Benchmark(flags).resume() if flags.resume else Benchmark(flags).save()


class Benchmark:
    """Benchmark that trains a model with timed saves or a timed resume."""

    def __init__(self, flags: argparse.Namespace):
        self.flags, size = flags, flags.per_device_batch_size
        recipe = Vit(
            model=flags.model,
            batch_size=size * world_size(),
            per_device_batch_size=size,
            mixed_precision=flags.mixed_precision,
            ema_decay=0,
        ).resolved()
        self.accelerator, _ = start(recipe, recipe.clip_norm)
        self.is_main = self.accelerator.is_main_process
        torch.manual_seed(0)
        model, edge = build_model(recipe, 10), recipe.image_size
        self.inputs = torch.randn(size, 3, edge, edge, device=self.accelerator.device)
        self.labels = torch.zeros(size, dtype=torch.int64, device=self.accelerator.device)
        self.model, self.optimizer = prepare(self.accelerator, model, build_optimizer(model, recipe))
        self.training = TrainingState(self.accelerator, self.model, self.optimizer, None)
        self.steps = 0

    def step(self) -> None:
        reseed(0, self.steps, 0)
        with self.accelerator.accumulate(self.model):
            loss = F.cross_entropy(self.model(self.inputs).float(), self.labels)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.steps += 1

    def timed(self, work: Callable[[], None]) -> float:
        """Return the seconds between a barrier before `work` and a barrier after it."""
        self.wait()
        began = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        wait_for_device()
        self.accelerator.wait_for_everyone()

    def save(self) -> None:
        folder = self.flags.folder
        if self.is_main:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            (folder / "metrics.jsonl").touch()
        facts = {"recipe": {}, "classes": []}
        saver = Saver(self.training, folder if self.is_main else None, facts)
        saves: list[dict[str, Any]] = []

        def ours() -> float:
            quiet_s, quiet_gb = self.ten_steps()
            began = time.perf_counter()
            state = {"step": self.steps, **self.training.scalars()}
            seconds = self.timed(lambda: saver.save(self.steps, state, None))
            ended: list[float] = []
            saver.pending_futures[-1].add_done_callback(lambda _: ended.append(time.perf_counter()))
            saving_s, saving_gb = self.ten_steps(saver)
            if saver.problem:
                raise ValueError(saver.problem)
            snapshots = self.training.snapshots.values()
            sizes = gather_object([sum(snapshot.buffer.nbytes for snapshot in snapshots)])
            saves.append(
                {
                    "held_up_s_per_gb": seconds / (sizes[0] / 1e9),
                    "committed_after_s": ended[0] - began,
                    "ten_next_over_quiet_steps": saving_s / quiet_s,
                    "quiet_step_s": quiet_s / STEPS,
                }
                | _main_and_other("snapshot_gb", [size / 1e9 for size in sizes])
                | _main_and_other("quiet_memory_gb", quiet_gb)
                | _main_and_other("memory_gb", saving_gb)
            )
            return seconds

        def save_state() -> float:
            seconds = self.timed(lambda: self.accelerator.save_state(str(folder / "save_state")))
            if self.is_main:
                shutil.rmtree(folder / "save_state")
            return seconds

        self.step()
        arms = {"save_state": save_state, "ours": ours}
        rounds = in_turn(arms, self.flags.rounds + 1)[1:]  # exclude the first round, which is a warm-up
        if self.is_main:
            processes = f"{strategy(self.accelerator)} x {self.accelerator.num_processes}"
            report(
                rounds,
                "s blocked",
                "save_state",
                self.flags.json,
                where=f"{self.flags.model}, {processes}, {device_name(self.accelerator)}",
                **{key: round(statistics.median(save[key] for save in saves[1:]), 3) for key in saves[0]},
                saves=saves[1:],
            )

    def take_steps(self) -> None:
        for _ in range(STEPS):
            self.step()

    def ten_steps(self, saver: Saver | None = None) -> tuple[float, list[float]]:
        """Return the seconds of ten steps and each process's peak memory in GB, including a pending save."""
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak resident memory (VmHWM)
        seconds = self.timed(self.take_steps)
        if saver:
            saver.wait()
            self.wait()
        status = Path("/proc/self/status").read_text()
        return seconds, gather_object([int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e9])

    def resume(self) -> None:
        checkpoint = newest(self.flags.folder / "checkpoints") if self.is_main else None
        if self.is_main:
            if checkpoint is None:
                raise ValueError(
                    f"--folder {self.flags.folder} contains no checkpoint. Run without --resume first."
                )
            self.training.check(checkpoint)
        # The broadcast state contains the optimizer's scalars, but no information about a run.
        scalars = json.loads((checkpoint.folder / STATE_FILE).read_text()) if checkpoint else None
        self.training.restore(checkpoint, broadcast_object_list([scalars])[0])
        self.step()
        self.wait()
        if checkpoint:
            seconds = time.time() - psutil.Process().create_time()
            name = checkpoint.folder.name
            print(f"time from the start of the process to the first step after {name}: {seconds:.1f} s")


def _main_and_other(name: str, by_rank: list[float]) -> dict[str, float]:
    return {name: by_rank[0]} | ({f"{name}_of_others": max(by_rank[1:])} if by_rank[1:] else {})


if __name__ == "__main__":
    run_process(main)
