"""The snapshot of a checkpoint, taken while the optimizer steps, against a blocking copy."""

import json
import statistics

import torch
from torch import nn

from benchmarks.gpu.ceilings import median_s
from benchmarks.gpu.rows import FAIL, OK, Result, Row, Setting, need_gpu, succeeds


def rows() -> dict[str, Row]:
    return {"snapshots are of one step": consistent, "a blocking copy": blocking, "vit saves": saves}


def consistent(setting: Setting) -> Result:
    """Steps go on right after each snapshot. A copy that is overtaken by one would have its numbers."""
    from common.checkpoint.training import TrainingState
    from common.distributed.accelerator import prepare, start
    from common.recipe import Job

    accelerator, _ = start(Job(batch_size=8, mixed_precision="no"))
    size = setting.size(8192, 64)
    model = nn.Linear(size, size)
    model, optimizer = prepare(accelerator, model, torch.optim.SGD(model.parameters(), lr=1.0))
    inputs = torch.ones(8, size, device=accelerator.device)
    training = TrainingState(accelerator, model, optimizer, None)
    training.allocate(training.expected())
    wrong = 0
    for _ in range(10):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        snapshots = training.take()
        for _ in range(3):
            model(inputs).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        training.wait_until_copied()
        taken = snapshots["model.safetensors"].views
        wrong += any(not torch.equal(before[name].cpu(), taken[name].cpu()) for name in before)
    return Result(wrong, "of another step", 0, FAIL if wrong else OK)


def blocking(setting: Setting) -> Result:
    """Milliseconds of the copy of a model of ViT-B's size that waits for it."""
    need_gpu(setting)
    weights = torch.zeros(86_000_000, device=setting.device)
    return Result(round(1e3 * median_s(lambda: weights.cpu(), repeats=2), 1), "ms", 150)


def saves(setting: Setting) -> Result:
    """How long a save holds up a step, beside accelerator.save_state."""
    model = ["--model", "vit_tiny_patch16_224"] if setting.is_small else []
    file = setting.folder / "saves.json"
    words = ["-m", "benchmarks.checkpoint_saves", "--rounds", setting.size(5, 1), *model, "--json", file]
    succeeds(setting, [*words, "--folder", setting.folder / "saves"])
    rounds = json.loads(file.read_text())[1:]  # the first is a warm-up
    ours, theirs = (
        1e3 * statistics.median(each[f"{arm} held up"] for each in rounds) for arm in ("ours", "save_state")
    )
    return Result(round(ours, 1), "ms", "below save_state's", note=f"save_state {theirs:,.1f} ms")
