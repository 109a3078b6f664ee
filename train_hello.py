"""Train a small network on a curve, as the smallest complete example and a smoke test for a cluster.

Start here if distributed training is new to you. Comments explain what each process does alone, and what the
processes do together. The other train scripts have the same structure and train on images.

    python train_hello.py
    torchrun --standalone --nproc_per_node=2 train_hello.py
    accelerate launch --config_file accelerate_configs/fsdp_4gpu.yaml train_hello.py --hidden_size 256

Training takes a few seconds. Loss curves and a plot of the learned function are saved to plots/ in the run
folder.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from onecurve.flags.recipe import Batch, Recipe, flag, setting
from onecurve.run.early import check_early

# --- Recipe -----------------------------------------------------------------------------------------------


@check_early  # reports wrong flags before the imports below, which take seconds
@dataclass(frozen=True, kw_only=True)
class Hello(Recipe):
    unit: ClassVar[str] = "points"
    data: str = flag("generated", "Noisy points on a curve, generated from the seed.", choices=("generated",))
    data_size: int = flag(4096, "Number of training points.", minimum=1)
    hidden_size: int = flag(64, "Width of the hidden layers.", minimum=1)
    epochs: int = flag(10, "Number of passes over the training points.", minimum=1)
    batch_size: int = flag(64, "Number of points per optimizer step, over all processes.", minimum=1)
    lr: float = flag(0.01, "Peak learning rate.", minimum=0)
    clip_norm: float = flag(0.0, "Maximum gradient norm. 0 disables clipping.", minimum=0)
    log_every: int = setting(100, "Number of optimizer steps between log lines.", minimum=1)


import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from onecurve.distributed.accelerator import prepare
from onecurve.distributed.exact_sum import exact_sum
from onecurve.distributed.process import entry
from onecurve.numerics.augment import send
from onecurve.numerics.order import Shuffled, Steps, evaluation_plan, reseed
from onecurve.run.run import Run

# --- Model ------------------------------------------------------------------------------------------------


class Block(nn.Sequential):
    def __init__(self, width_in: int, width_out: int):
        super().__init__(nn.Linear(width_in, width_out), nn.GELU())


class Net(nn.Module):
    """Network that maps x [B, 1] to y [B, 1]."""

    # FSDP and ZeRO-3 store a shard of every weight on each process, and gather a block's weights to run it.
    _no_split_modules = ("Block",)

    def __init__(self, hidden_size: int):
        super().__init__()
        self.blocks = nn.Sequential(Block(1, hidden_size), Block(hidden_size, hidden_size))
        self.head = nn.Linear(hidden_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


# --- Data -------------------------------------------------------------------------------------------------


def curve(x: Tensor) -> Tensor:
    return torch.sin(3 * x) * (1 + x)


def points(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return x in [-2, 2] and the noisy curve y (standard deviation 0.1), each [count, 1] on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(count, 1, generator=generator) - 2
    return x, curve(x) + 0.1 * torch.randn(count, 1, generator=generator)


def rows(x: Tensor, ids: np.ndarray) -> Tensor:
    """Return x[ids] asynchronously. Plain indexing would wait until the GPU has finished all queued work."""
    return x.index_select(0, send(torch.from_numpy(ids), x.device))


# --- Evaluate ---------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(
    accelerator: Accelerator, model: nn.Module, x: Tensor, y: Tensor, batch: Batch
) -> dict[str, float]:
    """Return the mean squared error over all points. Each process evaluates its share of the points."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=x.device)  # sum of squared errors, number of points
    shares = evaluation_plan(len(x), batch.per_device, batch.processes, accelerator.process_index)
    for ids, valid in shares:  # the first `valid` points are real, and the remaining points are padding
        errors = (model(rows(x, ids)).float() - rows(y, ids))[:valid]
        squares = exact_sum(errors.square())  # bitwise identical for any number of processes
        sums += torch.stack([squares, torch.full_like(squares, valid)])
    # An "all-reduce" adds the tensors of all processes and returns the sum to every process.
    squared, count = accelerator.reduce(sums, "sum").tolist()
    model.train()
    return {"loss": squared / count, "images": int(count)}


# --- Train ------------------------------------------------------------------------------------------------


def learning_rate(recipe: Hello, step: int, total_steps: int) -> float:
    """Return a step's learning rate.

    The rate rises linearly over 1/20 of the steps, then falls to 0 along a cosine (arXiv 1608.03983).
    """
    warmup_steps = total_steps // 20
    if step < warmup_steps:
        return recipe.lr * ((step + 1) / warmup_steps)
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return recipe.lr * (0.5 * (1 + math.cos(math.pi * progress)))


# A launcher starts this script once per process. Plain `python` starts a single process. The processes
# connect to an address that the launcher passes in environment variables, and form the "process group". Each
# process has a device and a number, its "rank" (accelerator.process_index). Rank 0 is the "main process".
@entry(Hello)
def main(recipe: Hello, accelerator: Accelerator, batch: Batch) -> None:
    with Run(accelerator, recipe, batch) as run:
        # From the same seed, all ranks create the same points and the same initial weights.
        x, y = (t.to(accelerator.device) for t in points(recipe.data_size, recipe.seed))
        val_x, val_y = (t.to(accelerator.device) for t in points(1000, recipe.seed + 1))
        torch.manual_seed(recipe.seed)
        model: nn.Module = Net(recipe.hidden_size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr)
        # prepare() applies the strategy. DDP keeps the whole model on every rank. FSDP and ZeRO shard
        # weights, gradients or the optimizer's moments over the ranks. The loop below is the same for all
        # strategies.
        model, optimizer = prepare(accelerator, model, optimizer)

        samples = Shuffled(recipe.data_size)
        steps = Steps.of(samples, batch, recipe)
        # An interrupted run resumes from its newest checkpoint. Rank 0 reads the checkpoint and sends each
        # rank its part. Without a checkpoint, the first step is 0.
        steps = run.begin(model, optimizer, steps, data=("generated", ()))
        rank = accelerator.process_index
        # "Sharding" divides the data. All ranks shuffle the points in the same order. In each step, a rank
        # trains on batch_size / ranks points that no other rank uses. If these points do not fit on the
        # device at once, the rank processes them in micro-batches of per_device_batch_size points ("gradient
        # accumulation").
        plan = iter(steps.plan(samples, batch, rank, recipe.seed))
        for step in range(steps.first, steps.last + 1):
            if run.should_evaluate(step):
                run.log_evaluation(step, evaluate(accelerator, model, val_x, val_y, batch))
            run.checkpoint(step)
            if run.is_last(step):
                break
            lr = learning_rate(recipe, step, steps.total)
            for group in optimizer.param_groups:  # Accelerate's scheduler would advance once per process
                group["lr"] = lr
            for k in batch.micro_batches(rank):
                _, ids = next(plan)
                reseed(recipe.seed, step, k)
                with accelerator.accumulate(model):
                    loss = F.mse_loss(model(rows(x, ids)).float(), rows(y, ids))
                    # Each rank computes the gradient of its points. During backward, the ranks average the
                    # gradients with an all-reduce. FSDP and ZeRO use a reduce-scatter, which sends each rank
                    # its shard.
                    accelerator.backward(loss)
                    if recipe.clip_norm and accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), recipe.clip_norm)
                    # With DDP, all ranks apply the same update, so the weights stay identical without being
                    # sent. With FSDP and ZeRO, each rank updates its shard.
                    optimizer.step()
                    optimizer.zero_grad()
                run.add(loss, ids)
            run.log_training(step + 1, lr)
        # The plot needs the model's outputs. Under FSDP and ZeRO, all ranks must run the model together.
        grid = torch.linspace(-2, 2, 201, device=accelerator.device)[:, None]
        with torch.no_grad():
            learned = model(grid).float().cpu()
        if accelerator.is_main_process:  # only one rank writes the file
            plot(run.folder / "plots" / "fit.png", x.cpu(), y.cpu(), grid.cpu(), learned)
        run.finish("validation")


def plot(path: Path, x: Tensor, y: Tensor, grid: Tensor, learned: Tensor) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(x[:1000], y[:1000], ".", color="0.8", label="training points")
    axes.plot(grid, curve(grid), "k--", label="true curve")
    axes.plot(grid, learned, color="C1", label="learned curve")
    axes.set(xlabel="x", ylabel="y")
    axes.legend()
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)  # otherwise savefig would follow a symbolic link
    figure.savefig(path, dpi=110)


# --- Entry ------------------------------------------------------------------------------------------------

if __name__ == "__main__":
    main()
