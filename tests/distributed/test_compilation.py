"""Tests of torch.compile for whole models and blocks: graph counts, results and refusals."""

import copy
import os

import pytest
import timm
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from onecurve.distributed import blocks
from onecurve.distributed.accelerator import prepare
from onecurve.distributed.blocks import Compilation, chosen_compilation, compile_blocks
from onecurve.distributed.ema import EMA
from onecurve.distributed.job_accelerator import JobAccelerator
from onecurve.models.timm_models import DropPath, speed_up
from tests.conftest import full, rows_of
from train_cnn_b import ResNet18


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    torch._dynamo.reset()
    counters.clear()


def vit(depth: int = 12) -> nn.Module:
    torch.manual_seed(0)
    options = dict(img_size=32, patch_size=8, num_classes=10, depth=depth, embed_dim=48, num_heads=3)
    model = timm.create_model("vit_tiny_patch16_224", drop_path_rate=0.1, drop_rate=0.1, **options)
    speed_up(model)
    model._no_split_modules = ["Block"]
    return model


@pytest.mark.parametrize("checkpointed", [False, True])
def test_twelve_blocks_with_twelve_rates_share_two_graphs(checkpointed):
    """Count the graphs with a backend that runs eager operators in seconds. Inductor would take minutes."""
    eager, model = vit(), vit()
    assert len({block.drop_path1.keep.item() for block in model.blocks[1:]}) == 11
    names = list(model.state_dict())
    counter = CompileCounterWithBackend("eager")
    compile_blocks(model, Compilation(counter))
    if checkpointed:
        blocks.checkpoint_activations(model)
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    for step in range(2):
        losses = []
        for network in (eager, model):
            torch.manual_seed(step)
            losses.append(network.train()(images).square().mean())
            losses[-1].backward()
        assert losses[0] == losses[1]
    assert counter.frame_count == 2
    for compiled, reference in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(compiled.grad, reference.grad)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(images), eager.eval()(images))
    assert counter.frame_count == 4
    assert "recompile_limit" not in str(counters)
    assert list(model.state_dict()) == names


def test_drop_path_drops_whole_samples_at_its_rate_in_bf16():
    drop = nn.Sequential(DropPath(0.3)).bfloat16().train()
    dropped = drop(torch.ones(10_000, 3, dtype=torch.bfloat16)).float()
    assert dropped.unique().tolist() == [0, torch.tensor(1 / 0.7).bfloat16().item()]
    assert torch.equal(dropped[:, :1].expand(-1, 3), dropped)
    assert abs((dropped[:, 0] == 0).float().mean() - 0.3) < 0.02  # The tolerance is four standard deviations
    assert drop.eval()(dropped) is dropped


def test_blocks_are_the_outermost_modules_of_the_named_classes():
    inner = nn.Sequential(nn.Linear(1, 1))
    model = nn.ModuleDict({"a": nn.Sequential(inner), "b": nn.ModuleList([nn.Linear(1, 1)])})
    model._no_split_modules = ("Sequential", "Linear")
    assert list(blocks.blocks_of(model)) == [model["a"], model["b"][0]]
    counter = CompileCounterWithBackend("eager")
    compile_blocks(inner, Compilation(counter))
    for _ in range(3):
        inner(torch.zeros(2, 1))
    assert counter.frame_count == 1
    assert list(inner.state_dict()) == ["0.weight", "0.bias"]


@pytest.mark.needs("g++")
@pytest.mark.parametrize(("flag", "answers", "expected"), rows_of("compile"))
def test_the_flag_overrides_the_launchers_answer(flag, answers, expected, monkeypatch):
    for name, value in answers.items():
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", value)
    assert str(chosen_compilation(flag)) == expected


def test_a_backend_that_this_host_lacks_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "TENSORRT")
    with pytest.raises(
        ValueError, match=r"dynamo_backend tensorrt is not available on this host\. .*inductor"
    ):
        chosen_compilation(None)
    with (
        torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")}),
        pytest.raises(ValueError, match=r"--compile default .* needs a C\+\+ compiler.*Install g\+\+"),
    ):
        chosen_compilation("default")


def train_both(
    eager: nn.Module, model: nn.Module, compilation: Compilation, is_checkpointed: bool = False
) -> AcceleratedOptimizer:
    """Train both models for three steps, compare them, and return the compiled model's optimizer.

    The steps use prepare() and therefore run the hooks that preserve BatchNorm's statistics. Losses,
    gradients, weights and statistics must agree within the tolerance of their data type.
    """
    accelerator, optimizers = JobAccelerator(cpu=True), []
    for network, accelerator.compilation in ((eager, Compilation()), (model, compilation)):
        accelerator.grad_checkpointing = is_checkpointed and network is model
        optimizers.append(prepare(accelerator, network, torch.optim.SGD(network.parameters(), lr=0.1))[1])
    dtype = next(model.parameters()).dtype
    for step in range(3):
        images = torch.randn(8, 3, 32, 32, dtype=dtype, generator=torch.Generator().manual_seed(step))
        losses = []
        for network, optimizer in zip((eager, model), optimizers, strict=True):
            with accelerator.accumulate(network):
                optimizer.zero_grad()
                losses.append(network(images).square().mean())
                accelerator.backward(losses[-1])
                optimizer.step()
        torch.testing.assert_close(*losses)
        for compiled, reference in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(compiled.grad, reference.grad)
    assert eager.stages[0][0].bn1.num_batches_tracked == 3
    torch.testing.assert_close(model.state_dict(), eager.state_dict())
    return optimizers[1]


@pytest.mark.parametrize("mode", ["default", full("reduce-overhead")])
def test_a_cnn_has_one_training_graph_and_one_evaluation_graph(mode, monkeypatch):
    """Count the graphs with a backend that runs eager operators.

    A new image size adds a graph, but averaged weights do not.
    """
    torch.manual_seed(0)
    eager = ResNet18(width=4, stem="cifar", classes=10)
    eager.stages, eager.head = eager.stages[:2], nn.Linear(8, 10)
    model = copy.deepcopy(eager)
    counter, compiled = CompileCounterWithBackend("eager"), torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled(function, backend=counter))
    optimizer = train_both(eager, model, Compilation("inductor", mode))
    assert counter.frame_count == 1
    ema, images, graphs = EMA(model, optimizer, 0.9), torch.randn(8, 3, 48, 48), []
    for size in (32, 48):
        with torch.no_grad():
            torch.testing.assert_close(*(net.eval()(images[..., :size, :size]) for net in (model, eager)))
            with ema.in_place():
                model(images[..., :size, :size])
        graphs.append(counter.frame_count)
    assert graphs == [2, 3]


@pytest.mark.full
@pytest.mark.needs("g++")
@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["one graph", "block by block"])
def test_a_compiled_resnet_has_the_same_gradients_and_statistics(is_checkpointed):
    """Compare in fp64. In fp32, a different summation order can move activations across ReLU's threshold."""
    torch.manual_seed(0)
    eager = ResNet18(width=8, stem="cifar", classes=10).double()
    train_both(eager, copy.deepcopy(eager), Compilation("inductor"), is_checkpointed)


GRAPHS = ("reduce-overhead", "max-autotune", "cudagraphs")  # Two modes and one backend that use CUDA graphs
NO_GRAPHS = "max-autotune-no-cudagraphs"


class FakeGraphs:
    """Substitute for torch.compile on a CPU.

    As with CUDA graphs, a call without gradients overwrites the previous call's output.
    """

    def __init__(self):
        self.modes, self.last = [], torch.zeros(0)

    def compile(self, function, *, backend, mode, **_):
        self.modes.append(mode or backend)

        def run(*arguments):
            if not torch.is_grad_enabled():
                self.last.fill_(torch.nan)
            self.last = function(*arguments)
            return self.last

        return run if self.modes[-1] in GRAPHS else function


@pytest.mark.parametrize(
    ("model", "mode", "flag", "accumulations", "expected"),
    [
        ("resnet", "default", None, 1, ["default"]),
        ("resnet", "default", None, 2, ["default"]),
        ("resnet", "default", "grad_checkpointing", 1, ["default"] * 8),
        ("resnet", "default", "deterministic", 1, ["default"] * 8),
        ("vit", "default", None, 1, ["default"] * 3),
        ("resnet", "reduce-overhead", None, 1, ["reduce-overhead"]),
        ("resnet", "max-autotune", None, 1, ["max-autotune"]),
        ("resnet", "max-autotune", "grad_checkpointing", 1, [NO_GRAPHS] * 8),
        ("resnet", "max-autotune", None, 2, [NO_GRAPHS]),
        ("vit", "max-autotune", None, 1, [NO_GRAPHS] * 3),
        ("resnet", "reduce-overhead", "grad_checkpointing", 1, None),
        ("resnet", "reduce-overhead", None, 2, None),
        ("resnet", "reduce-overhead", "deterministic", 1, None),
        ("vit", "reduce-overhead", None, 1, None),
        ("resnet", "cudagraphs", None, 1, ["cudagraphs"]),
        ("vit", "cudagraphs", None, 1, None),
    ],
)
def test_which_graphs_are_compiled(model, mode, flag, accumulations, expected, monkeypatch):
    torch.manual_seed(0)
    eager = vit(3) if model == "vit" else ResNet18(width=4, stem="cifar", classes=10)
    accelerator, fake = JobAccelerator(cpu=True, gradient_accumulation_steps=accumulations), FakeGraphs()
    accelerator.grad_checkpointing = flag == "grad_checkpointing"
    accelerator.deterministic = flag == "deterministic"
    accelerator.compilation = Compilation(mode) if mode == "cudagraphs" else Compilation("inductor", mode)
    compiled, images = copy.deepcopy(eager), torch.randn(2, 4, 3, 32, 32)
    monkeypatch.setattr(torch, "compile", fake.compile)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    if expected is None:
        with pytest.raises(ValueError, match=rf"^--compile {mode} \(or dynamo_backend [^)]*\) .*Use [^\n]*$"):
            prepare(accelerator, compiled, optimizer)
        return
    prepared, _ = prepare(accelerator, compiled, optimizer)
    with torch.no_grad():
        for batch in images:
            torch.testing.assert_close(prepared.eval()(batch), eager.eval()(batch))
    assert fake.modes == expected
