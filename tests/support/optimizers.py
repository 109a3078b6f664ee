"""Train a tiny model with many optimizers, each for 10 steps, with and without a resume after 5 steps.

Launchers start this module like a train script. The module writes the uninterrupted run's last checkpoint to
FOLDER/<name>/straight and the resumed run's last checkpoint to FOLDER/<name>/resumed. If an optimizer is
refused, the module writes the reason to FOLDER/<name>/refused.

    torchrun --standalone --nproc_per_node=2 -m tests.support.optimizers FOLDER [--only NAME,NAME]
"""

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import timm.optim
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from onecurve.checkpoint import format as checkpoints
from onecurve.checkpoint.training import TrainingState
from onecurve.distributed.accelerator import prepare, start
from onecurve.distributed.process import run_process
from onecurve.flags.recipe import Recipe, flag, parse
from onecurve.run.state import RunState

BATCH = 8


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(5, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 5))


class Net(nn.Module):
    """Model [B, 3, 6, 6] -> [B, 3], whose odd sizes require padding with two processes."""

    _no_split_modules = ("Block",)

    def __init__(self):
        super().__init__()
        # The model's first parameter. This parameter receives no gradient unless the model uses it.
        self.first = nn.Parameter(torch.ones(3))
        self.convolution = nn.Conv2d(3, 5, 3)
        self.block = Block()
        self.head = nn.Linear(5, 3)
        self.uses_first = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.convolution(x).relu().mean((2, 3)))  # Tensor of shape [B, 5]
        return self.head(x) * self.first if self.uses_first else self.head(x)


class ScheduleFree(torch.optim.Optimizer):
    """Small schedule-free SGD (arXiv 2405.15682), with a tensor z per parameter and counters per group."""

    def __init__(self, params, lr: float = 0.1, momentum: float = 0.9, weight_decay: float = 0.0):
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "k": 0, "weight_sum": 0.0, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            weight = group["k"] ** 0.5
            group["weight_sum"] += weight
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                z.sub_(p.grad + group["weight_decay"] * p, alpha=group["lr"])
                p.lerp_(z, 1 - group["momentum"] * (1 - weight / group["weight_sum"]))


@dataclass(frozen=True)
class Case:
    make: Callable[[list[dict]], torch.optim.Optimizer]
    lr: float = 0.01
    only_matrices: bool = False  # Whether to freeze all parameters that are not matrices
    uses_first: bool = True


def adamw(groups: list[dict], **options) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, **options)


CASES = {
    "adamw": Case(adamw),
    "amsgrad": Case(lambda groups: adamw(groups, amsgrad=True)),
    "adamw_first_without_gradient": Case(adamw, uses_first=False),
    "sgd": Case(lambda groups: torch.optim.SGD(groups, lr=0.1), lr=0.1),
    "sgd_momentum": Case(lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9), lr=0.1),
    "lion": Case(lambda groups: timm.optim.Lion(groups, lr=0.01)),
    "lamb": Case(lambda groups: timm.optim.Lamb(groups, lr=0.01)),
    "nadam": Case(lambda groups: torch.optim.NAdam(groups, lr=0.01)),
    "adafactor": Case(lambda groups: torch.optim.Adafactor(groups, lr=0.01)),
    "adafactor_unfactored": Case(lambda g: timm.optim.Adafactor(g, lr=0.01, min_dim_size_to_factor=1000)),
    "muon": Case(lambda groups: torch.optim.Muon(groups, lr=0.01), only_matrices=True),
    # timm's Muon uses AdamW for parameters that are not matrices.
    "muon_mixed": Case(lambda groups: timm.optim.Muon(groups, lr=0.01)),
    "lookahead": Case(lambda groups: timm.optim.Lookahead(adamw(groups), k=3)),
    "schedule_free": Case(ScheduleFree, lr=0.1),
}


@dataclass(frozen=True, kw_only=True)
class Optimizers(Recipe):
    batch_size: int = flag(BATCH, "samples", minimum=1)
    only: tuple[str, ...] = flag((), "of the cases", choices=tuple(CASES))


def train(
    accelerator: Accelerator, case: Case, begin: int, end: int, checkpoint: checkpoints.Checkpoint | None
) -> TrainingState:
    """Train the steps from `begin` up to but not including `end`, and return the training state."""
    torch.manual_seed(0)
    model = Net()
    model.uses_first = case.uses_first
    for p in model.parameters():
        p.requires_grad = p.ndim == 2 or not case.only_matrices
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.05},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    accelerator.deepspeed_engine_wrapped = None  # Remove the previous case's engine
    model, optimizer = prepare(accelerator, model, case.make(groups))
    training = TrainingState(accelerator, model, optimizer, None)
    if checkpoint:
        if accelerator.is_main_process:
            training.check(checkpoint)
            training.optimizer.check(checkpoint, RunState.read(checkpoint).scalars())
        training.restore(
            checkpoint if accelerator.is_main_process else None, RunState.read(checkpoint).scalars()
        )
    for step in range(begin, end):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(BATCH, 3, 6, 6, generator=generator)
        y = torch.randn(BATCH, 3, generator=generator)
        rows = slice(accelerator.process_index, None, accelerator.num_processes)
        for group in optimizer.param_groups:
            group["lr"] = case.lr * (1 - step / 20)
        with accelerator.accumulate(model):
            loss = (model(x[rows]).float() - y[rows]).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return training


def save(training: TrainingState, folder: Path, step: int) -> checkpoints.Checkpoint:
    snapshots, accelerator = training.take_snapshots(), training.accelerator
    training.gather()
    state = RunState(step, logged_step=step, losses=[0.0], **training.scalars()).to_json()
    if accelerator.is_main_process:
        checkpoints.write_checkpoint(folder, step, snapshots, state, training.about())
    accelerator.wait_for_everyone()
    return checkpoints.verify_checkpoint(folder / checkpoints.step_name(step))


def compare(accelerator: Accelerator, case: Case, folder: Path) -> None:
    """Train with and without a resume, or write the reason if the optimizer is refused."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        half = save(train(accelerator, case, 0, 5, None), folder / "half", 5)
    except ValueError as error:
        (folder / "refused").write_text(str(error))
        return
    save(train(accelerator, case, 5, 10, half), folder / "resumed", 10)
    save(train(accelerator, case, 0, 10, None), folder / "straight", 10)


def main() -> None:
    folder = Path(sys.argv.pop(1))
    recipe = parse(Optimizers)
    accelerator, _ = start(replace(recipe, mixed_precision="no"))
    for name in recipe.only or CASES:
        compare(accelerator, CASES[name], folder / name)
        accelerator.print(f"done {name}", flush=True)
        accelerator.free_memory()
        gc.collect()


if __name__ == "__main__":
    run_process(main)
