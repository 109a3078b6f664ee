"""Tests of --step_graph on a CPU, where tests/support/recorded_graph.py replaces the CUDA graph."""

import json
import os
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from accelerate.utils import DistributedType
from timm.optim import Lamb, Lookahead, Muon
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from onecurve.distributed import accelerator as accelerators
from onecurve.distributed import step_graph
from onecurve.distributed.blocks import Compilation
from onecurve.distributed.step_graph import WARM_UP_STEPS, StepGraph, chosen_step_graph, make_capturable
from onecurve.flags.recipe import parse
from onecurve.numerics.order import reseed
from tests.conftest import (
    CNN,
    RESNET,
    STRATEGIES,
    VIT_WITH_ALL,
    full,
    latest,
    metrics,
    result,
    run,
    tensors,
    torchrun,
)
from tests.distributed.test_exact_sum import mutant
from tests.support import graphed_ranks
from tests.support.recorded_graph import aten, record
from train_cnn_a import CnnA

FLAGS = ["--data", "digits", "--batch_size", 256, "--log_every", 1, "--warmup", 0.3, "--clip_norm", 1.0]
FLAGS += ["--trackers", "none", "--telemetry_s", 0, "--max_val_images", 64]
# AdamW is selected because the default SGD is fused only on GPUs.
SIZES = ["--train_sizes", "16,24", "--epochs", 2, "--optimizer", "adamw"]
DEFAULTS = dict(
    distributed_type=DistributedType.NO,
    gradient_accumulation_steps=1,
    num_processes=1,
    step=0,
    ddp_handler=None,
    parallelism_config=None,
    exact_sum=None,
    prepared_model=None,
    step_stream=None,
    scaler=None,
    sync_gradients=True,
    compilation=Compilation(),
    grad_checkpointing=False,
    precision=SimpleNamespace(mixed_precision="bf16"),
    device=torch.device("cpu"),
    step_graph=True,
    print=print,
)
WARM_UP = WARM_UP_STEPS["single"]
STEPS = 2 * WARM_UP + 2


def fsdp(offload: bool) -> SimpleNamespace:
    cpu_offload = CPUOffloadPolicy() if offload else None
    return SimpleNamespace(fsdp_plugin=SimpleNamespace(reshard_after_forward=True, cpu_offload=cpu_offload))


FSDP = {"distributed_type": DistributedType.FSDP, "state": fsdp(offload=False)}
HYBRID = SimpleNamespace(dp_replicate_size=2)
ZERO2 = {"zero_optimization": {"stage": 2}}
ZERO = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=2, deepspeed_config=ZERO2))


def train(
    strategy: str, words: list, folder: Path, *stops: int, **environment: str
) -> tuple[list, dict, dict, str]:
    """Train a model, and interrupt and resume the run at each step in `stops`.

    Returns:
        The log, the tensors of the last checkpoint, result.json, and the output.
    """
    for steps in (*stops, 16 if strategy == "ddp" else 10):
        flags = [*words, "--max_steps", steps, "--output_dir", folder]
        output = run([*STRATEGIES[strategy], *flags], env=os.environ | environment)
    log = [[line.get(k) for k in ("step", "train/loss", "train/lr", "val/loss")] for line in metrics(folder)]
    assert len({line[2] for line in log} - {None}) > WARM_UP
    return log, tensors(latest(folder)), result(folder), output


ACCUMULATED = ["--per_device_batch_size", 32]
SCRIPTS = {
    "cnn_b, two sizes": ("single", [*RESNET, *SIZES], (), ""),
    "vit, resumed": full("single", VIT_WITH_ALL, (5,), ""),
    "cnn_a": full("single", CNN, (), ""),
    "cnn_a, compiled": full("single", [*CNN, "--compile", "default"], (), ""),
    "vit, a capture that fails": full("single", VIT_WITH_ALL, (), "1"),
    "vit under DDP, accumulated, resumed": full("ddp", [*VIT_WITH_ALL, *ACCUMULATED], (14,), ""),
    "cnn_b under DDP, two sizes": full("ddp", [*RESNET, *SIZES, *ACCUMULATED], (), ""),
    "vit under FSDP2": full("fsdp", VIT_WITH_ALL, (), ""),
    "cnn_b under FSDP2, accumulated": full("fsdp", [*RESNET, *SIZES, *ACCUMULATED], (5,), ""),
    "vit under FSDP2, a capture that fails": full("fsdp", VIT_WITH_ALL, (), "1"),
}


@pytest.mark.parametrize(("strategy", "script", "stops", "fails"), SCRIPTS.values(), ids=SCRIPTS)
def test_a_graph_trains_the_same(strategy, script, stops, fails, tmp_path, cache):
    words = [*script, *FLAGS, *cache]
    plain, weights, plain_result, _ = train(strategy, words, tmp_path / "plain", *stops)
    graphed = ["-m", "tests.support.recorded_graph", *words, "--step_graph"]
    folder = tmp_path / "graphed"
    log, graphed_weights, graphed_result, output = train(
        strategy, graphed, folder, *stops, CAPTURE_FAILS=fails
    )
    assert log == plain
    assert weights.keys() == graphed_weights.keys()
    assert all(torch.equal(weights[name], graphed_weights[name]) for name in weights)
    assert (plain_result["step_graph"], graphed_result["step_graph"]) == (False, not fails)
    assert ", a CUDA graph for each step" in output
    warning = re.search(
        r"the step can't be captured as a CUDA graph( on rank 0)? \(operation not permitted", output
    )
    assert bool(warning) == bool(fails)


@pytest.mark.parametrize("strategy", [full("single"), "ddp", full("fsdp")])
def test_ranks_train_the_same_and_mutants_are_detected(strategy, tmp_path):
    """Check that losses, evaluations and weights are bitwise identical with and without a recorded step."""
    mutants = graphed_ranks.MUTANTS | (graphed_ranks.OF_FSDP if strategy == "fsdp" else {})
    if strategy == "single":
        mutants.pop("a rank that replays the graph of the last size")
    cases = graphed_ranks.CASES
    (tmp_path / "cases").write_text(json.dumps([*cases, *mutants]))
    launcher = torchrun(2) if strategy == "ddp" else STRATEGIES[strategy]
    output = run([*launcher, "-m", "tests.support.graphed_ranks", tmp_path / "cases"])
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
    ranks = 1 if strategy == "single" else 2
    if ranks == 2:
        assert rows.pop() == ["graphs at the end", 0]
    expected = {name: [not case.fails_at] * ranks for name, case in cases.items()}
    assert rows[: len(expected)] == [[name, True, expected[name]] for name in expected]
    mutant_rows = rows[len(expected) :]
    assert [(name, is_same) for name, is_same, _ in mutant_rows] == [(name, False) for name in mutants]
    line = "the step can't be captured as a CUDA graph{} (operation not permitted when stream is capturing)"
    failures = sum(not all(captured) for captured in expected.values())
    assert output.count(line.format(" on rank 1" * (ranks - 1))) == failures


def test_the_model_is_wrapped_on_the_capture_stream(monkeypatch):
    """Check the stream on which the model is wrapped, because DDP keeps it. Strings replace the streams."""
    streams, used = ["default"], {}

    @contextmanager
    def stream(name: Any) -> Iterator[None]:
        streams.append(str(name))
        yield
        streams.pop()

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_stream=lambda _: None))
    monkeypatch.setattr(
        accelerators, "_wrap_in_stages", lambda *_: used.setdefault("DDP", streams[-1]) and (None, None)
    )
    side = Mock(__str__=lambda _: "side")
    accelerator = SimpleNamespace(**DEFAULTS | {"step_stream": side})
    accelerators.wrap(accelerator, nn.Linear(1, 1), None)

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        used.setdefault("step", streams[-1])
        return inputs.sum()

    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    graph = StepGraph(accelerator, optimizer, step)
    for accelerator.step_graph in (True, False):
        graph(torch.ones(1), torch.ones(1))
        assert used.pop("step") == "side"
    assert used == {"DDP": "side"}
    assert streams == ["default"]


def losses(graph: type | None = None, inside: str = "", capture: Callable = record) -> list[float]:
    """Return the losses in STEPS training steps of a small network with dropout and BatchNorm.

    Args:
        graph: StepGraph or a mutant of StepGraph. None trains without a graph.
        inside: Value that is set inside the step instead of before the step: the "seed", or a "factor" by
            which the inputs are multiplied on the host.
        capture: Function that captures a step.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Tanh(), nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))
    optimizer, index = torch.optim.AdamW(model.parameters(), fused=True), 0

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if inside == "seed":
            reseed(0, index, 0)
        loss = (model(inputs * (index + 1 if inside == "factor" else 1)) - labels).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    if graph:
        step = graph(SimpleNamespace(**DEFAULTS), optimizer, step)
        step.capture = partial(capture, step)
    values = []
    images = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    for index in range(STEPS):  # The function `step` reads this variable
        optimizer.param_groups[0]["lr"] = 0.1 / (index + 1)
        if inside != "seed":
            reseed(0, index, 0)
        factor = 1 if inside == "factor" else index + 1
        values.append(step(images * factor, torch.full((16, 1), index - 2.0)).item())
    return values


def test_numbers_that_the_graph_freezes_are_detected():
    plain = losses()
    assert losses(StepGraph) == plain
    frozen_rate = losses(mutant(step_graph, 'group["lr"] = device_rate\n', "pass\n").StepGraph)
    assert frozen_rate[: WARM_UP + 1] == plain[: WARM_UP + 1]
    assert frozen_rate != plain
    for inside in ("seed", "factor"):
        assert losses(None, inside) == plain
        assert losses(StepGraph, inside) != plain


@pytest.mark.parametrize("fails_at", [aten.native_batch_norm.default, aten._fused_adamw_.tensor_lr])
def test_a_failed_capture_leaves_the_plain_step(fails_at, capsys):
    """Let the capture fail in the forward pass, or later when the graph has recorded but not computed
    gradients.
    """
    assert losses(StepGraph, capture=partial(record, fails_at=fails_at)) == losses()
    line = "the step can't be captured as a CUDA graph (operation not permitted when stream is capturing)"
    assert capsys.readouterr().out.count(line) == 1
    mutant_graph = mutant(step_graph, "parameter.grad = None", "pass").StepGraph
    is_same = losses(mutant_graph, capture=partial(record, fails_at=fails_at)) == losses()
    assert is_same == ("norm" in str(fails_at))


def test_the_memory_of_a_failed_capture_is_freed_before_the_plain_step():
    graphs = []

    def capture(run: Callable[[], None], pool: None) -> Callable[[], None]:
        graph = nn.Linear(1, 1)  # Local variable that the error's traceback would keep alive
        graphs.append(weakref.ref(graph))
        raise MemoryError

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        assert not graphs or graphs[0]() is None
        return inputs.sum()

    graph = StepGraph(SimpleNamespace(**DEFAULTS), torch.optim.SGD(nn.Linear(1, 1).parameters()), step)
    graph.capture = capture
    for _ in range(WARM_UP + 2):
        graph(torch.ones(1), torch.ones(1))
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, True),
        ({"compilation": Compilation("inductor")}, True),
        ({"compilation": Compilation("inductor", "reduce-overhead")}, False),
        ({"distributed_type": DistributedType.MULTI_GPU}, True),
        ({"distributed_type": DistributedType.MULTI_GPU, "ddp_handler": Mock(comm_hook="bf16")}, False),
        # These processes communicate over gloo.
        ({"distributed_type": DistributedType.MULTI_GPU, "num_processes": 2}, False),
        (FSDP, True),
        (FSDP | {"state": fsdp(offload=True)}, False),
        (FSDP | {"parallelism_config": HYBRID}, False),
        ({"distributed_type": DistributedType.DEEPSPEED, "state": ZERO}, False),
        ({"gradient_accumulation_steps": 2}, True),
        ({"grad_checkpointing": True}, False),
        ({"precision": SimpleNamespace(mixed_precision="fp16")}, False),
    ],
)
def test_where_the_graph_is_the_default_and_where_it_is_refused(changes, fits, capsys):
    def chosen(*flags: str, **more: Any) -> bool:
        recipe = parse(CnnA, [*flags])
        return chosen_step_graph(SimpleNamespace(**DEFAULTS | changes | more), recipe.step_graph)

    assert chosen(device=torch.device("cuda")) == fits
    assert not chosen("--no_step_graph", device=torch.device("cuda"))
    assert not chosen()  # On a CPU, only a rehearsal uses a graph
    if fits:
        assert chosen("--step_graph")
    else:
        assert capsys.readouterr().out.count("steps run without CUDA graphs: ") == 1
        if "num_processes" not in changes:  # On a GPU, gloo refuses the flag that a rehearsal accepts
            with pytest.raises(ValueError, match=r"^--step_graph: .*\. Remove --step_graph\.$"):
                chosen("--step_graph")


MATRIX = torch.zeros(2, 2, requires_grad=True)
ADAMW, FUSED_SGD = torch.optim.AdamW([MATRIX], fused=True), torch.optim.SGD([MATRIX], fused=True)


@pytest.mark.parametrize(
    ("optimizer", "changes", "on_gpu", "on_cpu"),
    [
        (ADAMW, {}, True, True),
        # On a GPU, a `capturable` optimizer rounds differently.
        (torch.optim.Adam([MATRIX]), {}, False, True),
        (FUSED_SGD, {}, True, True),
        (torch.optim.SGD([MATRIX]), {}, False, True),
        (ADAMW, FSDP, True, True),
        (torch.optim.SGD([MATRIX]), FSDP, False, False),
        (Muon([MATRIX]), {}, False, False),  # Muon rounds differently if the learning rate is a tensor
        (torch.optim.NAdam([MATRIX]), {}, False, False),
        (Lamb([MATRIX]), {}, False, False),
        (Lookahead(ADAMW), {}, False, False),  # A graph would never run Lookahead's slow steps
    ],
)
def test_an_optimizer_that_reads_numbers_on_the_host_gets_no_graph(
    optimizer, changes, on_gpu, on_cpu, capsys
):
    for device, fits in (("cuda", on_gpu), ("cpu", on_cpu)):
        accelerator = SimpleNamespace(**DEFAULTS | changes | {"device": torch.device(device)})
        step_graph.step_graph(accelerator, SimpleNamespace(optimizer=optimizer))
        assert accelerator.step_graph == fits
        line = (
            f"steps run without CUDA graphs: {type(optimizer).__name__} may read its settings on the host\n"
        )
        assert capsys.readouterr().out == line * (not fits)


def test_muon_rounds_differently_with_a_rate_on_the_device():
    """Check that Muon's results depend on whether the rate is a tensor, which is why Muon runs without a
    graph.
    """
    final_weights = []
    for rate in (0.1, torch.tensor(0.1, dtype=torch.float64)):
        weights = torch.linspace(-1, 1, 64).view(8, 8).requires_grad_()
        optimizer = Muon([weights], lr=rate)
        for _ in range(3):
            weights.sin().sum().backward()
            optimizer.step()
        final_weights.append(weights.detach())
    assert not torch.equal(*final_weights)


@pytest.mark.parametrize("shape", [(2,), ()])
def test_a_restored_count_of_steps_moves_to_the_device(shape):
    """Check that a step count, which NAdam's checkpoint stores on the CPU, moves to the device.

    The device `meta` replaces a GPU.
    """
    parameter = torch.zeros(shape, device="meta", requires_grad=True)
    optimizer = torch.optim.NAdam([parameter])
    moments = {name: torch.zeros(shape, device="meta") for name in ("exp_avg", "exp_avg_sq")}
    optimizer.state[parameter] = moments | {"step": torch.tensor(3.0), "mu_product": torch.tensor(0.9)}
    make_capturable(optimizer)
    assert optimizer.param_groups[0]["capturable"]
    assert {value.device.type for value in optimizer.state[parameter].values()} == {"meta"}
