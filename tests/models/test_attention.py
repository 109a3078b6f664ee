"""Tests of the attention kernel for few tokens: results, layers, compilation and records."""

import hashlib
import itertools
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import timm.layers
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend

from onecurve.distributed.strategy import versions
from onecurve.models.attention import (
    Attention,
    has_kernel,
    kernel_failure,
    kernel_version,
    prefer_cudnn,
    use_kernel,
)
from onecurve.models.timm_models import speed_up
from onecurve.run.run_setup import changed_packages
from tests.conftest import ROOT, STRATEGIES, VIT, Job, latest, python
from tests.models.test_timm_models import Operators
from tools.verify.replay import why_not_exact
from train_vit import Vit, build_model

# --- Results, under Triton's interpreter


def interpreted(cases: list[dict[str, Any]]) -> list[list[str]]:
    """Return the list of problems that the interpreter finds in each case."""
    defaults = {"size": 32, "dtype": "bfloat16", "largest": 3, "order": "packed", "heads": 2}
    process = subprocess.run(
        [sys.executable, "-m", "tests.support.interpreted_attention"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        input="".join(json.dumps(defaults | case) + "\n" for case in cases),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]


CASES = [{"tokens": n} for n in (1, 16, 50, 64, 65)]
CASES += [{"tokens": n, "dtype": "float16", "size": size} for n, size in ((5, 64), (50, 24), (97, 64))]
CASES += [{"tokens": n, "largest": 100} for n in (17, 130)]
CASES += [{"tokens": n, "order": "parts first"} for n in (3, 66)]
WRONG_MASK = {"[None, :] < TOKENS, scores": "[None, :] < TOKENS + 1, scores"}
NO_SCALE = {"tl.dot(q, tl.trans(k)) * (SCALE * LOG2_E)": "tl.dot(q, tl.trans(k)) * LOG2_E"}
SWAPPED = {  # Mutant that swaps the gradients of keys and values
    "qkv_gradient + key_offsets + 2 * CHANNELS, dv": "qkv_gradient + key_offsets + CHANNELS, dv",
    "qkv_gradient + key_offsets + CHANNELS, tl": "qkv_gradient + key_offsets + 2 * CHANNELS, tl",
}
# Mutant that computes half of the rows twice, with the same results
RACE = {"% BLOCKS * QUERIES\n": "% BLOCKS * (QUERIES // 2)\n"}
RACE_BACK = {".to(tl.int64), tl.program_id(0) % HEADS": ".to(tl.int64), 0"}
UNWRITTEN = {"(token[:, None] < TOKENS) &": "(token[:, None] < TOKENS - 1) &"}
NO_MEAN = {"(dp - mean_dp[:, None])": "dp"}
GRADIENTS = ["gradients", "packed gradients"]
ALL = ["outputs", *GRADIENTS]
MUTANTS = [
    ("wrong mask", 50, WRONG_MASK, ALL),
    ("wrong mask, tiles", 65, WRONG_MASK, ALL),
    ("no scale", 50, NO_SCALE, ALL),
    ("no scale, tiles", 65, NO_SCALE, ALL),
    ("swapped gradients", 50, SWAPPED, GRADIENTS),
    ("swapped gradients, tiles", 65, SWAPPED, GRADIENTS),
    ("race", 65, RACE, ["forward writes twice"]),
    ("race in backward", 50, RACE_BACK, ["backward writes twice", "backward writes elsewhere", *GRADIENTS]),
    ("unwritten row", 50, UNWRITTEN, ["forward writes elsewhere", "backward writes elsewhere", *ALL]),
    ("no mean", 50, NO_MEAN, GRADIENTS),
    ("no mean, tiles", 65, NO_MEAN, GRADIENTS),
]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str]]:
    """Return the problems of all cases and mutants, computed in one process."""
    names = [*map(str, CASES), *(name for name, *_ in MUTANTS)]
    small = {"dtype": "float16", "largest": 1}
    mutants = [{"tokens": n, "replacements": changed, **small} for _, n, changed, _ in MUTANTS]
    return dict(zip(names, interpreted([*CASES, *mutants]), strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_matches_the_plain_computation(case, outcomes):
    assert outcomes[str(case)] == []


@pytest.mark.parametrize(("name", "expected"), [(name, expected) for name, *_, expected in MUTANTS])
def test_a_mutant_is_detected(name, expected, outcomes):
    assert sorted(outcomes[name]) == sorted(expected)


@pytest.mark.full
@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("first", [1, 2])
def test_every_number_of_tokens(size, first):
    cases = [
        {"tokens": n, "size": size, "dtype": ("bfloat16", "float16")[n // 2 % 2]}
        for n in range(first, 257, 2)
    ]
    cases = [case | {"heads": 1, "largest": 100 if case["tokens"] % 3 == 0 else 3} for case in cases]
    problems = interpreted(cases)
    assert [case | {"problems": wrong} for case, wrong in zip(cases, problems, strict=True) if wrong] == []


# --- Layers that use the kernel


def layer(tokens: int = 50, **options: Any) -> Any:
    """Return timm's attention with two heads of size 32, as wrap() modifies it on a supported GPU."""
    options = {"dim": 64, "num_heads": 2, "norm_layer": nn.LayerNorm} | options
    model = nn.Sequential(timm.layers.Attention(**options))
    speed_up(model)
    model[0].tokens = tokens
    use_kernel(model)
    return model[0]


@pytest.mark.parametrize(
    ("options", "fits"),
    [
        ({}, True),
        ({"tokens": 256}, True),
        ({"dim": 128}, True),
        ({"attn_head_dim": 24}, True),
        ({"qkv_bias": True, "proj_drop": 0.1}, True),
        ({"tokens": 0}, False),
        ({"tokens": 257}, False),
        ({"dim": 256}, False),
        ({"attn_head_dim": 20}, False),
        ({"qk_norm": True}, False),
        ({"attn_drop": 0.1}, False),
    ],
    ids=str,
)
def test_which_layers_use_the_kernel(options, fits):
    assert (layer(**options).kernel_tokens > 0) == fits


def operators(module: nn.Module, tokens: int = 50, dtype: Any = torch.bfloat16, **more: Any) -> set[str]:
    """Return the operators called by a forward and a backward pass on fake tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True), Operators() as called:
        inputs = torch.empty(2, tokens, 64, requires_grad=True)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            module(inputs, **more).float().sum().backward()
    return {func.__name__.split(".")[0] for func in called.called}


KERNELS = {"short_attention", "short_attention_backward"}


@pytest.mark.parametrize(
    ("more", "takes"),
    [
        ({}, True),
        ({"dtype": torch.float16}, True),
        ({"tokens": 256}, True),
        ({"tokens": 257}, False),
        ({"dtype": torch.float32}, False),
        ({"attn_mask": torch.zeros(50, 50)}, False),
        ({"is_causal": True}, False),
    ],
    ids=["bf16", "fp16", "256", "257", "fp32", "mask", "causal"],
)
def test_which_forwards_use_the_kernel(more, takes):
    called = operators(layer(), **more)
    assert (KERNELS & called) == (KERNELS if takes else set())
    assert any("scaled_dot_product" in name for name in called) != takes
    assert not (takes and "stack" in called)  # The kernel writes the packed gradient without stacking


def test_evaluations_and_other_devices_keep_torchs_attention(monkeypatch):
    module = layer().eval()
    assert not KERNELS & operators(module)
    for capability, precision, expected in (
        ((8, 0), "bf16", True),
        ((12, 0), "fp16", True),
        ((7, 5), "fp16", False),
        ((9, 0), "no", False),
    ):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda _, value=capability: value)
        assert has_kernel(torch.device("cuda"), precision) == expected
    assert not has_kernel(torch.device("cpu"), "bf16")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not has_kernel(torch.device("cuda"), "bf16")


def test_a_kernel_that_fails_is_not_used():
    """Run the kernel on a CPU without the interpreter, where Triton finds no driver."""
    assert kernel_failure(layer(), torch.device("cpu"), torch.float16) != ""
    assert kernel_failure(nn.Linear(2, 2), torch.device("cpu"), torch.float16) is None


def test_a_vits_layers_know_their_tokens():
    model = build_model(Vit(model="test_vit", image_size=32, patch_size=8), 10)
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    assert {module.tokens for module in layers} == {17}
    assert model.training
    # wrap(), which decides whether a layer uses the kernel, has not run yet.
    assert not any(module.kernel_tokens for module in layers)
    assert use_kernel(model)
    assert not use_kernel(nn.Linear(2, 2))


def test_cudnn_comes_first_for_many_tokens_in_training(monkeypatch):
    """Record which of torch's attention kernels has priority while the attention is called."""
    firsts, module = [], layer(tokens=0)
    call = torch.nn.functional.scaled_dot_product_attention

    def recording(*arguments: Any, **more: Any) -> Any:
        firsts.append(torch._C._get_sdp_priority_order()[0])
        return call(*arguments, **more)

    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (8, 9))
    prefer_cudnn(module, torch.device("cuda"))
    prefer_cudnn(module, torch.device("cpu"))
    assert not module.prefers_cudnn
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    prefer_cudnn(module, torch.device("cuda"))
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert compiled(torch.randn(1, 129, 64)).shape == (1, 129, 64)
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", recording)
    default, cudnn = torch._C._get_sdp_priority_order()[0], int(SDPBackend.CUDNN_ATTENTION)
    for tokens in (128, 129):
        module(torch.randn(1, tokens, 64))
    module.eval()(torch.randn(1, 129, 64))
    assert firsts == [default, cudnn, default]
    assert torch._C._get_sdp_priority_order()[0] == default


# --- Compilation


class H200:
    """Triton driver for a machine with an H200, reduced to the functions that kernel analysis needs."""

    @staticmethod
    def get_current_target() -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@pytest.mark.parametrize(("tokens", "warps"), [(50, (4, 4)), (197, (4, 8))])
def test_a_compiled_layer_launches_the_same_kernels(tokens, warps):
    """Check that Dynamo's graph contains the operator, and Inductor's graphs contain the kernels with their
    warps.

    The kernels must receive the same tensors as without compilation. No input is copied, and no argument is a
    Python number.
    """
    import triton
    from torch._dynamo.backends.common import aot_autograd
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
    from torch._inductor.decomposition import select_decomp_table

    graphs: list[torch.fx.GraphModule] = []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        outputs = [node and node.meta["val"] for node in graph.graph.output_node().args[0]]
        results = [value if value is None else torch.zeros_like(value, device="cpu") for value in outputs]
        return lambda *_: results

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_autograd(fw_compiler=compiler, decompositions=select_decomp_table())(graph, inputs)

    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(H200())
    try:
        with torch.autocast("cpu", torch.bfloat16), FakeTensorMode(allow_non_fake_inputs=True):
            compiled = torch.compile(layer(tokens), backend=backend, fullgraph=True, dynamic=False)
            compiled(torch.empty(2, tokens, 64, requires_grad=True)).float().sum().backward()
    finally:
        triton.runtime.driver.set_active(before)
    operator = torch.ops.onecurve.short_attention
    assert [node.target for node in graphs[0].graph.nodes].count(operator) == 1
    launches = [
        node for graph in graphs[1:] for node in graph.graph.nodes if "triton_kernel" in str(node.target)
    ]
    assert len(launches) == 2
    for node, count in zip(launches, warps, strict=True):
        kernel, kwargs = kernel_side_table.get_kernel(node.kwargs["kernel_idx"]), node.kwargs["kwargs"]
        assert [config.num_warps for config in kernel.configs] == [count]
        assert set(node.kwargs["tensors_to_clone"]) <= {"out", "logs", "qkv_gradient"}
        constants = kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])
        constant_names = {p.name for p in kernel.fn.params if p.is_constexpr}
        numbers = {name for name, value in (kwargs | constants).items() if isinstance(value, (int, float))}
        assert numbers == constant_names
        assert (kwargs | constants)["TOKENS"] == tokens


@pytest.mark.full
@pytest.mark.parametrize("capability", [80, 86, 90, 100, 120])
def test_the_kernels_fit_every_gpu(capability):
    """Compile the kernels without a GPU. Kernels must fit into CUDA's documented shared memory and avoid
    fp64.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from onecurve.models import attention_kernels as kernels

    shared_bytes = {80: 163, 86: 99, 90: 227, 100: 227, 120: 99}[capability] * 1024
    for tokens, function in itertools.product((50, 65, 197), (kernels._forward, kernels._backward)):
        tiles = kernels.FORWARD_TILES if function is kernels._forward else kernels.BACKWARD_TILES
        _, settings = kernels._launch_settings(torch.empty(2, tokens, 3, 12, 64, device="meta"), tiles)
        options = {"num_warps": settings.pop("num_warps")}
        types = {
            p.name: "*fp32" if p.name == "logs" else "*bf16" for p in function.params if not p.is_constexpr
        }
        aligned = {(number,): [["tt.divisibility", 16]] for number in range(len(types))}
        signature = types | dict.fromkeys(settings, "constexpr")
        source = ASTSource(function, signature, settings, aligned)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert compiled.metadata.shared <= shared_bytes, (tokens, function.__name__)
        assert ".f64" not in compiled.asm["ptx"]


# --- Records, and bitwise identical results under every strategy


def test_a_script_imports_no_triton_and_its_model_no_kernels():
    """Check the records on a CPU. Only timm imports Triton, and only when it builds a model."""
    code = "import sys, train_vit\n"
    code += "print('triton' in sys.modules)\n"
    code += "train_vit.build_model(train_vit.Vit(model='test_vit', image_size=32, patch_size=8), 10)\n"
    code += "print('onecurve.models.attention_kernels' in sys.modules)"
    words = [sys.executable, "-c", code]
    process = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert process.stdout.split() == ["False", "False"], process.stderr


def test_a_run_records_the_kernel_as_a_package():
    with_kernel, without = (SimpleNamespace(uses_short_attention_kernel=used) for used in (True, False))
    current = versions(with_kernel)
    assert current.items() - versions(without).items() == {("short_attention", kernel_version())}
    assert versions() == versions(without)
    message = f"short_attention {kernel_version()} (previously none)"
    assert changed_packages(versions(without), current) == message
    assert changed_packages(current, current) == changed_packages(None, current) == ""
    result = {"deterministic": True, "strategy": "ddp"}
    run, replay = (
        SimpleNamespace(result_values=result, recipe_file={"versions": v})
        for v in (current, versions(without))
    )
    assert why_not_exact(run, run) == []
    assert "versions" in why_not_exact(run, replay)[0]


LAUNCHERS = {"single": python(), "ddp": STRATEGIES["ddp"], "fsdp": STRATEGIES["fsdp"]}


@pytest.mark.full
def test_one_process_ddp_and_fsdp2_use_the_kernel_with_the_same_bits(tmp_path, cache):
    """Train in fp16, because Triton's interpreter does not multiply bf16 numbers."""
    flags = ["--data", "digits", "--batch_size", "8", "--per_device_batch_size", "4", "--max_steps", "2"]
    flags += ["--trackers", "none", "--mixed_precision", "fp16", "--deterministic", "--max_val_images", "8"]
    hashes, folders = set(), [*LAUNCHERS, "without"]
    for name in folders:
        env = {"TRITON_INTERPRET": "0" if name == "without" else "1"}
        words = [*LAUNCHERS.get(name, python()), *VIT, *flags, *cache, "--output_dir", tmp_path / name]
        status, output = Job(words, env=env).wait(600)
        assert status == 0, output
        record = json.loads((tmp_path / name / "recipe.json").read_text())
        used = None if name == "without" else kernel_version()
        assert record["versions"].get("short_attention") == used
        manifest = json.loads((latest(tmp_path / name) / "manifest.json").read_text())
        assert manifest["written_by"]["versions"] == record["versions"]
        weights = (latest(tmp_path / name) / "model.safetensors").read_bytes()
        hashes.add((used, hashlib.sha256(weights).hexdigest()))
    assert len(hashes) == 2
