"""Measures how long a save blocks a step of ViT-B/32 with AdamW, compared with accelerator.save_state.

Results and machine: benchmarks/README.md.

    python -m benchmarks.checkpoint_saves
    accelerate launch --config_file accelerate_configs/ddp_2gpu.yaml -m benchmarks.checkpoint_saves
    accelerate launch --config_file accelerate_configs/ddp_2gpu.yaml -m benchmarks.checkpoint_saves --resume

A round is a step, a save by each of the two in alternating order, and a step during the writing. A barrier
precedes and follows each save, so the slowest process counts. --resume, after a run without it, measures the
time from the start of the process to the first step after its checkpoint.

held up    seconds that the call takes: for ours the snapshot, for save_state everything
committed  seconds from the call until all is on the disk (save_state does not wait for the disk)
"""

import argparse
import dataclasses
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F
from accelerate.utils import broadcast_object_list

from common.checkpoint.format import STATE_FILE, newest
from common.checkpoint.saver import Saver
from common.checkpoint.training import TrainingState
from common.distributed.accelerator import prepare, start
from common.distributed.process import run_process
from common.distributed.strategy import device_name, strategy
from common.order import reseed
from common.system.env import world_size
from train_vit import Vit, build_model, build_optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", default="vit_base_patch32_224")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--per_device_batch_size", type=int, default=4)
    parser.add_argument("--mixed_precision")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "checkpoint_saves")
    parser.add_argument("--resume", action="store_true", help="time a resume from what an earlier run left")
    parser.add_argument("--json", type=Path, help="where to write every round")
    flags = parser.parse_args()
    Benchmark(flags).resume() if flags.resume else Benchmark(flags).save()


class Benchmark:
    def __init__(self, flags: argparse.Namespace):
        self.flags = flags
        recipe = Vit(model=flags.model, per_device_batch_size=flags.per_device_batch_size, ema_decay=0)
        recipe = dataclasses.replace(recipe, mixed_precision=flags.mixed_precision)
        processes = world_size()
        recipe = dataclasses.replace(recipe, batch_size=flags.per_device_batch_size * processes)
        self.accelerator, _ = start(recipe, recipe.clip_norm)
        torch.manual_seed(0)
        model = build_model(recipe, 10)
        size = recipe.image_size
        self.inputs = torch.randn(flags.per_device_batch_size, 3, size, size, device=self.accelerator.device)
        self.labels = torch.zeros(flags.per_device_batch_size, dtype=torch.int64, device=self.inputs.device)
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
        """Seconds, from all processes ready to all processes done."""
        self.wait()
        began = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.accelerator.wait_for_everyone()

    def save(self) -> None:
        folder, main = self.flags.folder, self.accelerator.is_main_process
        if main:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            (folder / "metrics.jsonl").touch()
        saver = Saver(self.training, folder if main else None, None, {"recipe": {}, "classes": []}, None)
        rounds = []
        self.step()
        for number in range(self.flags.rounds + 1):  # the first is a warm-up, reported separately
            found = {"step": self.timed(self.step)}
            arms = [lambda found=found: self.ours(saver, found), lambda found=found: self.theirs(found)]
            for arm in arms if number % 2 == 0 else reversed(arms):
                arm()
            rounds.append(found)
            if main:
                print(json.dumps({name: round(value, 3) for name, value in found.items()}), flush=True)
        if main:
            self.report(rounds)

    def ours(self, saver: Saver, found: dict[str, float]) -> None:
        began = time.perf_counter()
        state = {"step": self.steps, **self.training.scalars()}
        found["ours held up"] = self.timed(lambda: saver.save(self.steps, state, None))
        found["step beside the writing"] = self.timed(self.step)
        saver.wait()
        self.wait()
        found["ours committed"] = time.perf_counter() - began
        if saver.problem:
            sys.exit(saver.problem)

    def theirs(self, found: dict[str, float]) -> None:
        folder = self.flags.folder / "save_state"
        found["save_state held up"] = self.timed(lambda: self.accelerator.save_state(str(folder)))
        if self.accelerator.is_main_process:
            shutil.rmtree(folder)

    def report(self, rounds: list[dict[str, float]]) -> None:
        first, rest = rounds[0], rounds[1:]
        place = f"{strategy(self.accelerator)} x {self.accelerator.num_processes}"
        print(f"{self.flags.model}, {place}, {device_name(self.accelerator)}, {len(rest)} rounds")
        for name in first:
            print(
                f"{name}: median {statistics.median(r[name] for r in rest):.2f} s, first {first[name]:.2f} s"
            )
        ratios = [r["ours held up"] / r["save_state held up"] for r in rest]
        print(f"ours / save_state, held up: {statistics.median(ratios):.3f}")
        if self.flags.json:
            self.flags.json.write_text(json.dumps(rounds) + "\n")

    def resume(self) -> None:
        main, found = self.accelerator.is_main_process, None
        if main:
            found = newest(self.flags.folder / "checkpoints", lambda: None, print)
            if found is None:
                raise ValueError(
                    f"--folder {self.flags.folder} holds no checkpoint: run without --resume first"
                )
            self.training.check(found)
        # The state has the optimizer's scalars, but nothing of a run.
        scalars = json.loads((found.folder / STATE_FILE).read_text()) if found else None
        scalars = broadcast_object_list([scalars])[0]
        self.training.restore(found, scalars)
        self.step()
        self.wait()
        if found:
            since = time.time() - psutil.Process().create_time()
            print(f"from the start of the process to the first step after {found.folder.name}: {since:.1f} s")


if __name__ == "__main__":
    run_process(main)
