"""--step_graph as far as a CPU goes: tests/support/recorded_graph.py stands for the graph."""

import os
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from timm.optim import Lamb, Lookahead
from torch import nn

from common.distributed import step_graph
from common.distributed.blocks import Compilation
from common.distributed.step_graph import WARM_UP_STEPS, StepGraph, chosen_step_graph, make_capturable
from common.order import reseed
from common.recipe import parse
from tests.conftest import CNN, RESNET, VIT_WITH_ALL, full, latest, metrics, python, result, run, tensors
from tests.distributed.test_exact_sum import mutant
from tests.support.recorded_graph import aten, record
from train_cnn_a import CnnA

FLAGS = ["--data", "digits", "--batch_size", 256, "--log_every", 1, "--warmup", 0.3, "--clip_norm", 1.0]
FLAGS += ["--trackers", "none", "--telemetry_s", 0, "--max_val_images", 64]
SIZES = ["--train_sizes", "16,24", "--epochs", 2, "--optimizer", "adamw"]  # its SGD is fused on GPUs alone
USUAL = dict(
    distributed_type=DistributedType.NO,
    gradient_accumulation_steps=1,
    num_processes=1,
    scaler=None,
    sync_gradients=True,
    compilation=Compilation(),
    grad_checkpointing=False,
    precision=SimpleNamespace(mixed_precision="bf16"),
    device=torch.device("cpu"),
    step_graph=True,
    print=print,
)
STEPS = 2 * WARM_UP_STEPS + 2


def train(words: list, folder: Path, *stops: int, **environment: str) -> tuple[list, dict, dict, str]:
    """What the log, the last checkpoint and result.json hold, and the output. stops: it is resumed there."""
    for steps in (*stops, 10):
        there = [*words, "--max_steps", steps, "--output_dir", folder]
        output = run([*python(), *there], env=os.environ | environment)
    log = [[line.get(k) for k in ("step", "train/loss", "train/lr", "val/loss")] for line in metrics(folder)]
    assert len({line[2] for line in log} - {None}) > WARM_UP_STEPS
    return log, tensors(latest(folder)), result(folder), output


@pytest.mark.parametrize(
    ("script", "stops", "fails"),
    [
        ([*RESNET, *SIZES], (), ""),
        full(VIT_WITH_ALL, (5,), ""),
        full(CNN, (), ""),
        full([*CNN, "--compile", "default"], (), ""),
        full(VIT_WITH_ALL, (), "1"),
    ],
    ids=["cnn_b, two sizes", "vit, resumed", "cnn_a", "cnn_a, compiled", "vit, a capture that fails"],
)
def test_it_trains_the_same(script, stops, fails, tmp_path, cache):
    words = [*script, *FLAGS, *cache]
    plain, weights, about, _ = train(words, tmp_path / "plain", *stops)
    graphed = ["-m", "tests.support.recorded_graph", *words, "--step_graph"]
    lines, others, outcome, output = train(graphed, tmp_path / "graphed", *stops, CAPTURE_FAILS=fails)
    assert lines == plain
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert (about["step_graph"], outcome["step_graph"]) == (False, not fails)
    assert ", a CUDA graph for each step" in output
    assert ("the step can't be one CUDA graph (operation not permitted" in output) == bool(fails)


def losses(graph: type | None = None, inside: str = "", capture: Callable = record) -> list[float]:
    """Of STEPS steps of a small network with dropout and BatchNorm. graph: StepGraph, or a mutant of it.

    inside: the "seed", or a "factor" of the inputs that the host draws, is set in the step, not before it.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Tanh(), nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))
    optimizer, at = torch.optim.AdamW(model.parameters(), fused=True), 0

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if inside == "seed":
            reseed(0, at, 0)
        loss = (model(inputs * (at + 1 if inside == "factor" else 1)) - labels).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    if graph:
        step = graph(SimpleNamespace(**USUAL), optimizer, step)
        step.capture = partial(capture, step)
    found = []
    images = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    for at in range(STEPS):  # the step reads it
        optimizer.param_groups[0]["lr"] = 0.1 / (at + 1)
        if inside != "seed":
            reseed(0, at, 0)
        factor = 1 if inside == "factor" else at + 1
        found.append(step(images * factor, torch.full((16, 1), at - 2.0)).item())
    return found


def test_what_is_frozen_into_the_graph_is_seen():
    plain = losses()
    assert losses(StepGraph) == plain
    filled = ("rate.fill_(group", "buffers.inputs.copy_(inputs)", "buffers.labels.copy_(labels)")
    frozen = [mutant(step_graph, each, f"buffers.steps > WARM_UP_STEPS or {each}") for each in filled]
    frozen.append(mutant(step_graph, 'group["lr"] = rate\n', "pass\n"))
    for each in frozen:
        seen = losses(each.StepGraph)
        assert seen[: WARM_UP_STEPS + 1] == plain[: WARM_UP_STEPS + 1]
        assert seen != plain
    for inside in ("seed", "factor"):
        assert losses(None, inside) == plain
        assert losses(StepGraph, inside) != plain


@pytest.mark.parametrize("fails_at", [aten.native_batch_norm.default, aten._fused_adamw_.tensor_lr])
def test_a_capture_that_fails_leaves_the_plain_step(fails_at, capsys):
    """In the forward pass, and when there are gradients already, which nothing has computed."""
    assert losses(StepGraph, capture=partial(record, fails_at=fails_at)) == losses()
    line = "the step can't be one CUDA graph (operation not permitted when stream is capturing)"
    assert capsys.readouterr().out.count(line) == 1
    kept = mutant(step_graph, "parameter.grad = None", "pass").StepGraph
    assert (losses(kept, capture=partial(record, fails_at=fails_at)) == losses()) == ("norm" in str(fails_at))


def test_the_plain_step_begins_without_the_memory_of_the_capture_that_failed():
    graphs = []

    def capture(run: Callable[[], None]) -> Callable[[], None]:
        graph = nn.Linear(1, 1)  # a local variable, which the error's traceback holds
        graphs.append(weakref.ref(graph))
        raise MemoryError

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        assert not graphs or graphs[0]() is None
        return inputs.sum()

    graph = StepGraph(SimpleNamespace(**USUAL), torch.optim.SGD(nn.Linear(1, 1).parameters()), step)
    graph.capture = capture
    for _ in range(WARM_UP_STEPS + 2):
        graph(torch.ones(1), torch.ones(1))
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("other", "fits"),
    [
        ({}, True),
        ({"compilation": Compilation("inductor")}, True),
        ({"compilation": Compilation("inductor", "reduce-overhead")}, False),
        ({"distributed_type": DistributedType.MULTI_GPU}, False),
        ({"gradient_accumulation_steps": 2}, False),
        ({"grad_checkpointing": True}, False),
        ({"precision": SimpleNamespace(mixed_precision="fp16")}, False),
    ],
)
def test_where_it_is_on_by_itself_and_where_it_is_refused(other, fits):
    def chosen(*flags: str, **more: Any) -> bool:
        recipe = parse(CnnA, [*flags])
        return chosen_step_graph(SimpleNamespace(**USUAL | other | more), recipe.step_graph)

    assert chosen(device=torch.device("cuda")) == fits
    assert not chosen("--no_step_graph", device=torch.device("cuda"))
    assert not chosen()  # on a CPU it is a rehearsal
    if fits:
        assert chosen("--step_graph")
    else:
        with pytest.raises(ValueError, match="--step_graph is for one process"):
            chosen("--step_graph")


def test_an_optimizer_that_reads_numbers_on_the_host_is_in_no_graph():
    """Lamb, SGD that is not fused, and Lookahead: a graph would never take its slow steps."""
    weights, said = [torch.zeros(2, requires_grad=True)], []
    inner, line = torch.optim.AdamW(weights), "the step is no CUDA graph: {} may read its numbers on the host"
    fused, plain = (torch.optim.SGD(weights, momentum=0.9, fused=is_fused) for is_fused in (True, False))
    for optimizer in (inner, fused, Lamb(weights), plain, Lookahead(inner)):
        accelerator = SimpleNamespace(step_graph=True, print=said.append, device=torch.device("cuda"))
        step_graph.step_graph(accelerator, SimpleNamespace(optimizer=optimizer))
        assert accelerator.step_graph == (optimizer in (inner, fused))
    assert said == [line.format(name) for name in ("Lamb", "SGD", "Lookahead")]


@pytest.mark.parametrize("shape", [(2,), ()])
def test_a_restored_count_of_steps_moves_to_the_device(shape):
    """`meta` stands for a GPU: the checkpoint of NAdam had its step on the CPU."""
    parameter = torch.zeros(shape, device="meta", requires_grad=True)
    optimizer = torch.optim.NAdam([parameter])
    moments = {name: torch.zeros(shape, device="meta") for name in ("exp_avg", "exp_avg_sq")}
    optimizer.state[parameter] = moments | {"step": torch.tensor(3.0), "mu_product": torch.tensor(0.9)}
    make_capturable(optimizer)
    assert optimizer.param_groups[0]["capturable"]
    assert {value.device.type for value in optimizer.state[parameter].values()} == {"meta"}
