"""--step_graph as far as a CPU goes: all but the capture itself. Not yet run on a GPU."""

from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType

from common.distributed import step_graph
from common.distributed.blocks import Compilation
from common.distributed.step_graph import WARM_UP_STEPS, StepGraph
from tests.conftest import CNN, RESNET, full, latest, metrics, python, run, tensors

FLAGS = ["--data", "digits", "--batch_size", 256, "--max_steps", 10, "--log_every", 1, "--clip_norm", 1.0]
FLAGS += ["--warmup", 0.3, "--trackers", "none", "--telemetry_s", 0, "--max_val_images", 64]
SIZES = ["--train_sizes", "16,24", "--epochs", 2]
USUAL = dict(
    distributed_type=DistributedType.NO,
    gradient_accumulation_steps=1,
    compilation=Compilation(),
    grad_checkpointing=False,
    precision=SimpleNamespace(mixed_precision="bf16"),
    device=torch.device("cpu"),
)


def train(words: list, folder):
    run([*python(), *words, "--output_dir", folder])
    return metrics(folder), tensors(latest(folder))


@pytest.mark.parametrize("script", [[*RESNET, *SIZES], full(CNN)], ids=["cnn_b, two sizes", "cnn_a"])
def test_it_trains_the_same(script, tmp_path, cache):
    words = [*script, *FLAGS, *cache]
    plain, weights = train(words, tmp_path / "plain")
    graphed, others = train([*words, "--step_graph"], tmp_path / "graphed")
    numbers = [
        [(line["step"], line.get("train/loss"), line.get("train/lr"), line.get("val/loss")) for line in lines]
        for lines in (plain, graphed)
    ]
    assert numbers[0] == numbers[1]
    assert len({line["train/lr"] for line in plain if "train/lr" in line}) > WARM_UP_STEPS
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def losses(source: str | None = None) -> list[float]:
    """Of eight steps of a line's fit by AdamW; with source, by that module's StepGraph."""
    a = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.AdamW([a])

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (a * inputs - labels).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    if source:
        module = ModuleType("mutant")
        exec(source, vars(module))
        step = module.StepGraph(SimpleNamespace(**USUAL), optimizer, step)
    found = []
    for number in range(2 * WARM_UP_STEPS + 2):
        optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
        found.append(step(torch.full((4,), number + 1.0), torch.full((4,), number - 2.0)).item())
    return found


def test_a_buffer_that_is_not_filled_is_seen():
    source = Path(step_graph.__file__).read_text()
    assert losses(source) == losses()
    for filled in ("rate.fill_(group", "buffers.inputs.copy_(inputs)", "buffers.labels.copy_(labels)"):
        assert source.count(filled) == 1
        assert losses(source.replace(filled, f"buffers.steps or {filled}")) != losses()


@pytest.mark.parametrize(
    "other",
    [
        {"distributed_type": DistributedType.MULTI_GPU},
        {"gradient_accumulation_steps": 2},
        {"compilation": Compilation("inductor")},
        {"grad_checkpointing": True},
        {"precision": SimpleNamespace(mixed_precision="fp16")},
    ],
)
def test_where_it_is_refused(other):
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.1}])
    step = StepGraph(SimpleNamespace(**USUAL), optimizer, lambda inputs, labels: inputs.sum())
    assert step(torch.ones(2), torch.ones(2)) == 2
    with pytest.raises(ValueError, match="--step_graph is for one process"):
        StepGraph(SimpleNamespace(**USUAL | other), optimizer, step)
