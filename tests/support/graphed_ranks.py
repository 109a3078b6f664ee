"""Train a small network with and without a recorded graph, in one launch, for many cases and mutants.

    torchrun --nproc_per_node=2 -m tests.support.graphed_ranks CASES

CASES is a file with a JSON list of case names. Each output line is a JSON object that names a case, reports
whether the losses, evaluations and weights of all ranks are bitwise identical with and without the graph, and
lists the ranks that kept the graph.
"""

import dataclasses
import hashlib
import json
import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from onecurve.distributed import accelerator as accelerators
from onecurve.distributed import exact_sum, step_graph
from onecurve.distributed.accelerator import start, wrap
from onecurve.distributed.layout import to_local
from onecurve.distributed.process import run_process
from onecurve.flags.recipe import Job
from onecurve.numerics.order import reseed
from tests.support.recorded_graph import aten, record

SIZES, IMAGES, CLASSES = (8, 6), 4, 5


@dataclass(frozen=True)
class Case:
    """Training run to compare with and without a graph, possibly with mutated code.

    Attributes:
        accumulations: Number of micro-batches per step on each rank.
        deterministic: Whether --deterministic is set.
        is_recorded: Whether the step is recorded. If False, Python executes every step, as in a rehearsal.
        fails_at: Operation at which the last rank's capture fails.
        mutant: Texts to replace in step_graph.py, and their replacements.
        of_sum: Texts to replace in exact_sum.py, and their replacements.
    """

    accumulations: int = 1
    deterministic: bool = False
    is_recorded: bool = True
    fails_at: Any = None
    mutant: tuple[tuple[str, str], ...] = ()
    of_sum: tuple[tuple[str, str], ...] = ()


COPY = "        self.shape_graphs.inputs.copy_(inputs)\n"
LABELS = "self.shape_graphs.labels.copy_"
RATE = "device_rate.fill_(group"
DROP = "graphs.append(micro_batch_graph)"  # Statement that runs between captures
DROPPED = f"""{DROP}
                    [setattr(p, "grad", None) for group in self.parameter_groups for p in group["params"]]
                    strategy(self.accelerator) == "fsdp" and torch_.reset_fsdp_state(self.model)"""
REPLAY = "            self._replay(micro_batch_graph)\n"
OLD_ON_RANK_1 = """            self.old = getattr(self, "old", micro_batch_graph)
            self._replay(self.old if torch.distributed.get_rank() else micro_batch_graph)
"""
MAGNITUDES = "self.max_magnitudes, torch.stack(self.micro_batch_magnitudes)"
BACKWARD, STEP = aten.convolution_backward.default, aten._fused_adamw_.tensor_lr
CASES = {
    "called": Case(is_recorded=False),
    "called, 2 micro-batches, deterministic": Case(2, True, is_recorded=False),
    "1 micro-batch": Case(),
    "2 micro-batches": Case(2),
    "4 micro-batches": Case(4),
    "deterministic": Case(deterministic=True),
    "3 micro-batches, deterministic": Case(3, deterministic=True),
    "fails in forward": Case(2, fails_at=aten.native_batch_norm.default),
    "fails in backward": Case(2, fails_at=BACKWARD),
    "fails in the optimizer": Case(fails_at=STEP),
    "fails in backward, deterministic": Case(2, deterministic=True, fails_at=BACKWARD),
}
MUTANTS = {
    "a frozen rate": Case(mutant=((RATE, f"self.shape_graphs.graphs or {RATE}"),)),
    "frozen inputs": Case(mutant=((COPY, f"        if not self.shape_graphs.graphs:\n    {COPY}"),)),
    "frozen labels": Case(mutant=((LABELS, f"self.shape_graphs.graphs or {LABELS}"),)),
    "gradients dropped between captures": Case(2, mutant=((DROP, DROPPED),)),
    "one graph for all micro-batches": Case(2, mutant=(("[-1 if is_last", "[0 if is_last"),)),
    "the middle as the first": Case(3, mutant=(("else min(micro_batch_index, 1)]", "else 0]"),)),
    "a rank that replays the graph of the last size": Case(mutant=((REPLAY, OLD_ON_RANK_1),)),
    "a step that is not counted": Case(2, mutant=(("self.accelerator.step = accelerator_step + 1", "pass"),)),
    "a largest gradient that is replaced": Case(
        4, deterministic=True,
        of_sum=((f"torch.maximum({MAGNITUDES}, out=self.max_magnitudes)",
                 f"self.max_magnitudes = torch.maximum({MAGNITUDES})"),),
    ),
    "a failure that is replaced": Case(
        2, deterministic=True,
        of_sum=((", failed_steps, out=self.first_failed_steps)",
                 ", failed_steps); self.first_failed_steps = self.first_failed_steps.clone()"),),
    ),
}  # fmt: skip
OF_FSDP = {
    "gathered parameters in a replay": Case(mutant=(("if self.has_gathered_parameters:", "if False:"),))
}


# References to all StepGraphs, because a script's training loop also keeps its graph until the end
GRAPHS: list[Any] = []


class Block(nn.Sequential):
    pass


class Net(nn.Module):
    """Network that maps images [B, 3, S, S] to logits [B, CLASSES]."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        first = Block(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.blocks = nn.Sequential(first, Block(nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(), nn.Dropout(0.2)))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).mean((2, 3)))


def main() -> None:
    job = Job(batch_size=2 * IMAGES, per_device_batch_size=IMAGES, mixed_precision="no", deterministic=True)
    accelerator, _ = start(job)
    policy = getattr(getattr(accelerator.state, "fsdp_plugin", None), "mixed_precision_policy", None)
    cases = CASES | MUTANTS | OF_FSDP
    dist.destroy_process_group = report_graphs(accelerator, dist.destroy_process_group)
    for name in json.loads(Path(sys.argv[1]).read_text()):
        case = cases[name]
        accelerator.deterministic = case.deterministic
        if policy:
            accelerator.state.fsdp_plugin.mixed_precision_policy = policy if case.deterministic else None
        accelerator.gradient_accumulation_steps = case.accumulations
        plain, _ = train(accelerator, dataclasses.replace(case, of_sum=()), None)
        try:
            graphed, is_kept = train(accelerator, case, mutated(step_graph, case.mutant))
        except RuntimeError as error:
            graphed, is_kept = str(error), []
        accelerator.print(json.dumps([name, plain == graphed, is_kept]))


def report_graphs(accelerator: Accelerator, destroy: Callable[[], None]) -> Callable[[], None]:
    """Report whether a graph, with its NCCL collectives, still exists when the process group is destroyed."""

    def ended() -> None:
        accelerator.print(
            json.dumps(["graphs at the end", sum(graph.shape_graphs is not None for graph in GRAPHS)])
        )
        destroy()

    return ended


def mutated(module: ModuleType, pairs: tuple[tuple[str, str], ...]) -> ModuleType:
    """Return a copy of the module in which these pieces of code are replaced."""
    if not pairs:
        return module
    text = Path(str(module.__file__)).read_text()
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new, 1)
    changed = ModuleType("mutant")
    exec(compile(text, "mutant", "exec"), vars(changed))
    return changed


def train(accelerator: Accelerator, case: Case, module: ModuleType | None) -> tuple[Any, list[bool]]:
    """Train at both image sizes, and return the training results and whether each rank ended with a graph.

    Args:
        accelerator: Accelerator of this rank.
        case: Case to train.
        module: Module that defines StepGraph, or None to train without a StepGraph.
    """
    rank, ranks = accelerator.process_index, accelerator.num_processes
    accelerator.step, accelerator.exact_sum, accelerator.step_graph = 0, None, module is not None
    del accelerator._models[:], accelerator._optimizers[:]
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with ExitStack() as stack:
        # foreach does not support a learning rate stored in a tensor.
        stack.enter_context(patch.object(accelerators, "use_foreach", lambda _: None))
        if case.of_sum:
            exact = mutated(exact_sum, case.of_sum).ExactSum
            stack.enter_context(patch.object(accelerators, "ExactSum", exact))
        model, optimizer = wrap(accelerator, model, optimizer)

    def step(inputs: Tensor, labels: Tensor) -> Tensor:
        with accelerator.accumulate(model):
            loss = factor * F.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    if module:
        warm_up = module.WARM_UP_STEPS[accelerators.strategy(accelerator)]
        step = graph = module.StepGraph(accelerator, optimizer, step)
        if module is step_graph:
            GRAPHS.append(graph)
        if case.is_recorded:
            fails_at = case.fails_at if rank == ranks - 1 else None
            graph.capture = partial(recorded, graph, fails_at)
    else:
        warm_up = step_graph.WARM_UP_STEPS[accelerators.strategy(accelerator)]
    bits: list[Any] = []
    # Loss scale, 1 or 1e6. A scale of 1e6 makes a gradient too large for an exact sum.
    factor = torch.ones(())
    for step_number in range(2 * (warm_up + 3)):
        size = SIZES[step_number // (warm_up + 3)]
        optimizer.param_groups[0]["lr"] = 0.01 / (step_number + 1)
        for k in range(case.accumulations):
            number = rank * case.accumulations + k
            generator = torch.Generator().manual_seed(step_number * ranks * case.accumulations + number)
            inputs = torch.randn(IMAGES, 3, size, size, generator=generator)
            labels = torch.randint(CLASSES, (IMAGES,), generator=generator)
            reseed(0, step_number, number)
            is_large = (
                case.deterministic and step_number == warm_up + 1 and k == min(1, case.accumulations - 1)
            )
            factor.fill_(1e6 if is_large else 1)
            bits.append(step(inputs, labels).item())
        # Evaluate at steps before a capture and between replays
        if step_number % (warm_up + 3) >= warm_up - 1:
            bits.append(evaluated(model))
    if accelerator.exact_sum:
        failed_steps = accelerator.exact_sum.first_failed_steps
        bits.append([accelerator.exact_sum.steps_since_check.item(), failed_steps.tolist()])
        assert math.isfinite(failed_steps.min()) or case.of_sum
    weights = [to_local(p.detach()).flatten() for p in model.parameters()]
    averages = [b.flatten().float() for b in model.buffers()]
    bits.append(hashlib.sha256(torch.cat([*weights, *averages]).numpy().tobytes()).hexdigest())
    return gather_object([bits]), gather_object([accelerator.step_graph])


def recorded(graph: Any, fails_at: Any, run: Callable, pool: Any) -> Callable:
    return record(graph, run, pool, fails_at)


@torch.no_grad()
def evaluated(model: nn.Module) -> float:
    model.eval()
    loss = model(torch.ones(2, 3, 6, 6)).square().mean().item()
    model.train()
    assert math.isfinite(loss)
    return loss


if __name__ == "__main__":
    assert dist.is_available()
    run_process(main)
