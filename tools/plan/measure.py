"""Times steps of a script's training on the device at hand: one process, alone, under one engine.

`python -m tools.plan.measure CONFIG SIZE SCRIPT [its flags]` prepares model and optimizer as a training
does, and prints the median times of STEPS steps as JSON. Images are random and lie ready on the device; the
engine's collectives have no partner.
"""

import contextlib
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# DeepSpeed reads it on import, and Accelerate imports DeepSpeed.
os.environ.setdefault("DS_ACCELERATOR", "cpu" if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else "cuda")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator

from common.distributed.accelerator import make_accelerator, prepare
from common.distributed.devices import keep_freed_memory, rehearse_on_cpu
from common.distributed.launch_config import check_launch_config, disable_meaningless
from common.distributed.precision import input_dtype
from common.optim import EMA
from common.order import reseed
from common.recipe import Batch, parse
from common.script import AFRESH, CLASSES, load_script, recipe_class
from tools.plan.fake_rank import launchers_environment

WARM_UP, STEPS = 3, 7


class Clock:
    """Marks of the device's time, in seconds: read only when all work is done."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"

    def mark(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: Any, second: Any) -> float:
        if not self.on_gpu:
            return second - first
        torch.cuda.synchronize()
        return first.elapsed_time(second) / 1e3


class TimedTraining:
    """A model and its optimizer under an engine, and steps of it on images without meaning."""

    def __init__(self, config_file: Path, size: int, words: list[str]):
        script = load_script(Path(words[0]))
        recipe: Any = parse(recipe_class(script), words[1:])
        afresh = {name: value for name, value in AFRESH.items() if hasattr(recipe, name)}
        self.recipe = recipe = dataclasses.replace(recipe, **afresh, grad_compression="no", compile="no")
        self.accelerator = _start(config_file, size, recipe)
        device = self.accelerator.device
        torch.manual_seed(recipe.seed)
        model = script.build_model(recipe, CLASSES)
        optimizer = script.build_optimizer(model, recipe)
        self.model, self.optimizer = prepare(self.accelerator, model, optimizer)
        decay = getattr(recipe, "ema_decay", 0)
        self.averaged = EMA(self.model, self.optimizer, decay) if decay else None
        shape = (size, 3, recipe.image_size, recipe.image_size)
        images = torch.randn(shape, device=device).to(memory_format=torch.channels_last)
        self.images = images.to(input_dtype(self.accelerator) or images.dtype)
        self.labels = torch.randint(CLASSES, (size,), device=device)
        self.clock = Clock(device)

    def step(self) -> list[float]:
        """Seconds of forward, backward and optimizer in one optimizer step of one micro-batch."""
        marks = [self.clock.mark()]
        reseed(self.recipe.seed, 0, 0)
        with self.accelerator.accumulate(self.model), self._engines_step(marks):
            loss = F.cross_entropy(self.model(self.images).float(), self.labels)
            marks.append(self.clock.mark())
            self.accelerator.backward(loss)  # under DeepSpeed with the optimizer's step
            if len(marks) == 2:
                marks.append(self.clock.mark())
            clip = getattr(self.recipe, "clip_norm", 0)
            if clip:
                self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.averaged:
            self.averaged.update(0)
        marks.append(self.clock.mark())
        return list(map(self.clock.between, marks, marks[1:]))

    @contextlib.contextmanager
    def _engines_step(self, marks: list[Any]) -> Iterator[None]:
        """Marks where DeepSpeed's backward ends, and its optimizer step begins."""
        engine: Any = self.model if type(self.model).__name__ == "DeepSpeedEngine" else None
        if engine is None:
            yield
            return
        steps = engine.step

        def step(*args: Any, **kwargs: Any) -> Any:
            marks.append(self.clock.mark())
            return steps(*args, **kwargs)

        engine.step = step
        try:
            yield
        finally:
            engine.step = steps


def _start(config_file: Path, size: int, recipe: Any) -> Accelerator:
    """The Accelerator of a job of one process under a config file."""
    os.environ.update(launchers_environment(config_file, 1, 1))
    deepspeed = check_launch_config(os.environ, 1, precision=recipe.mixed_precision)
    on_cpu = not torch.cuda.is_available()
    disable_meaningless(on_cpu)
    if on_cpu:
        keep_freed_memory()
    if "MULTI_GPU" in config_file.read_text() or "ACCELERATE_USE_FSDP" in os.environ or deepspeed:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ.update(alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
        if on_cpu:
            rehearse_on_cpu()
        dist.init_process_group("gloo" if on_cpu else "nccl", rank=0, world_size=1, store=dist.HashStore())
    return make_accelerator(recipe, Batch(size, size, 1, 1), deepspeed, getattr(recipe, "clip_norm", 0.0))


def main() -> None:
    config_file, size = sys.argv[1:3]
    words = sys.argv[3:]
    sys.argv[:] = words  # errors name the script
    try:
        training = TimedTraining(Path(config_file), int(size), words)
    except ValueError as error:
        sys.exit(f"error: {error}")
    for _ in range(WARM_UP):
        training.step()
    steps = [training.step() for _ in range(STEPS)]
    names = ("forward_s", "backward_s", "optimizer_s")
    print(
        json.dumps(dict(zip(names, map(statistics.median, zip(*steps, strict=True)), strict=True))),
        flush=True,
    )
    os._exit(0)  # gloo's threads sometimes abort in their destructors


if __name__ == "__main__":
    main()
