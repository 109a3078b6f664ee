"""--step_graph as far as a CPU goes: all but the capture itself. Not yet run on a GPU."""

from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType

from common.distributed.blocks import Compilation
from common.distributed.step_graph import WARM_UP_STEPS, StepGraph
from tests.conftest import CNN, RESNET, latest, metrics, mutate, python, run, tensors

FLAGS = ["--data", "digits", "--batch_size", 64, "--max_steps", 8, "--log_every", 1, "--clip_norm", 1.0]
FLAGS += ["--warmup", 0.3, "--trackers", "none", "--telemetry_s", 0, "--max_val_images", 64]
SIZES = ["--train_sizes", "16,24", "--epochs", 2, "--max_steps", 10, "--batch_size", 256]


def train(words: list, folder, **where):
    run([*python(), *words, "--output_dir", folder], **where)
    return metrics(folder), tensors(latest(folder))


@pytest.fixture(scope="module")
def plain(tmp_path_factory, cache) -> list[dict]:
    """The log of CNN-A without graphs."""
    return train([*CNN, *FLAGS, *cache], tmp_path_factory.mktemp("plain") / "run")[0]


@pytest.mark.parametrize("words", [CNN, [*RESNET, *SIZES]], ids=["cnn_a", "cnn_b, two sizes"])
def test_it_trains_the_same(words, tmp_path, cache):
    words = [words[0], *FLAGS, *words[1:], *cache]
    plain, weights = train(words, tmp_path / "plain")
    graphed, others = train([*words, "--step_graph"], tmp_path / "graphed")
    numbers = [
        [(line["step"], line.get("train/loss"), line.get("train/lr"), line.get("val/loss")) for line in lines]
        for lines in (plain, graphed)
    ]
    assert numbers[0] == numbers[1]
    assert len({line["train/lr"] for line in plain if "train/lr" in line}) > WARM_UP_STEPS
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize(
    "old", ["rate.fill_(group", "buffers.inputs.copy_(inputs)", "buffers.labels.copy_(labels)"]
)
def test_a_buffer_that_is_not_filled_is_seen(old, plain, project_copy, tmp_path, cache):
    mutate(project_copy, "common/distributed/step_graph.py", old, f"buffers.steps or {old}")
    words = [*CNN, *FLAGS, *cache, "--step_graph"]
    graphed, _ = train(words, tmp_path / "graphed", cwd=project_copy)
    losses = [[line["train/loss"] for line in log[:6]] for log in (plain, graphed)]
    assert losses[0] != losses[1]


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
    usual = dict(
        distributed_type=DistributedType.NO,
        gradient_accumulation_steps=1,
        compilation=Compilation(),
        grad_checkpointing=False,
        precision=SimpleNamespace(mixed_precision="bf16"),
        device=torch.device("cpu"),
    )
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.1}])
    step = StepGraph(SimpleNamespace(**usual), optimizer, lambda inputs, labels: inputs.sum())
    assert step(torch.ones(2), torch.ones(2)) == 2
    with pytest.raises(ValueError, match="--step_graph is for one process"):
        StepGraph(SimpleNamespace(**usual | other), optimizer, step)
