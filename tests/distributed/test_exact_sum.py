"""Tests that --deterministic is bitwise reproducible regardless of the process count and of interruptions."""

import copy
import functools
import hashlib
import itertools
import math
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from torch import nn

from onecurve.distributed import exact_sum
from onecurve.flags.recipe import ImageRecipe
from tests.conftest import (
    CNN,
    RESNET,
    STRATEGIES,
    VIT_WITH_ALL,
    Job,
    accelerate,
    full,
    latest,
    metrics,
    mutate,
    python,
    run,
    torchrun,
)
from tests.models.test_timm_models import Operators

STEPS = 16  # Number of steps in a run, two more than in an epoch
FLAGS = ["--batch_size", "96", "--per_device_batch_size", "8", "--max_steps", str(STEPS), "--log_every", "5"]
FLAGS += ["--mixed_precision", "no", "--trackers", "none", "--telemetry_s", "0", "--deterministic"]
SCRIPTS = {
    "hello": ["train_hello.py", "--data_size", "1437", "--hidden_size", "50", *FLAGS],
    "cnn_a": [*CNN, "--data", "digits", *FLAGS],  # CNN-A uses fused AdamW
    # CNN-B uses BatchNorm, and 1x1 convolutions on one-pixel inputs.
    "cnn_b": [*RESNET, "--image_size", "8", "--data", "digits", *FLAGS, "--clip_norm", "0.5"],
    "vit": [*VIT_WITH_ALL, *FLAGS],
}
LAUNCHERS = {
    "ddp 2": STRATEGIES["ddp"],
    "ddp 3": torchrun(3),
    "ddp 4": torchrun(4),
    "fsdp 2": STRATEGIES["fsdp"],
    "fsdp 4": accelerate("fsdp_4gpu"),
}
# Script and launcher that `make test` runs in this file. A test in this file trains `hello` with 4, 3 and 1
# processes, and scripts/test_any_model.py trains CNN-B under FSDP2.
QUICK = ("cnn_a", "ddp 2")
TIMES = {"wall_s", "train/images_per_s", "train/mfu_pct"}


def words(script: str, cache: list) -> list:
    return SCRIPTS[script] if script == "hello" else [*SCRIPTS[script], *cache]


def bits(folder: Path) -> dict:
    """Return the hashes of the last checkpoint's tensor files, and the log without its times."""
    assert latest(folder).name == f"step_{STEPS:08d}"
    files = sorted(latest(folder).glob("*.safetensors"))
    hashes = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    log = [{key: line[key] for key in line.keys() - TIMES} for line in metrics(folder)]
    return hashes | {"log": log}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, cache):
    """Return a function that returns the hashes and log of a one-process run without thread settings."""

    @functools.cache
    def bits_of(script: str) -> dict:
        folder = tmp_path_factory.mktemp(script) / "run"
        run([*python(), *words(script, cache), "--output_dir", folder])
        return bits(folder)

    return bits_of


PAIRS = [pair if pair == QUICK else full(*pair) for pair in itertools.product(SCRIPTS, LAUNCHERS)]
SCRIPTS["vit, 4 micro-batches"] = [*SCRIPTS["vit"], "--per_device_batch_size", "24"]
SCRIPTS["cnn_b compiled"] = [*SCRIPTS["cnn_b"], "--compile", "default"]
PAIRS.append(("vit, 4 micro-batches", "fsdp 2"))
SCRIPTS["vit, 1 micro-batch"] = [*SCRIPTS["vit"], "--per_device_batch_size", "96"]
LAUNCHERS["fsdp 1"] = [*STRATEGIES["fsdp"], "--num_processes", "1"]
PAIRS.append(full("vit, 1 micro-batch", "fsdp 1"))
PAIRS.append(pytest.param("cnn_b compiled", "fsdp 2", marks=[pytest.mark.full, pytest.mark.needs("g++")]))


@pytest.mark.parametrize(("script", "launcher"), PAIRS)
def test_bits_equal_those_of_one_process(script, launcher, one_process, tmp_path, cache):
    output = run([*LAUNCHERS[launcher], *words(script, cache), "--output_dir", tmp_path / "run"])
    assert ", deterministic" in output
    assert ("gradients in float64" in output) == (launcher != "fsdp 1"), "a single gradient needs no sum"
    assert bits(tmp_path / "run") == one_process(script)


@pytest.mark.parametrize(
    ("launcher", "user_env"),
    [
        (accelerate("cpu"), {}),
        full(torchrun(2), {}),  # torchrun sets OMP_NUM_THREADS to 1
        full(accelerate("cpu"), {"OMP_NUM_THREADS": "2"}),
        (torchrun(2), {"OMP_NUM_THREADS": "2"}),
    ],
)
def test_a_process_has_one_thread_or_the_users_number(launcher, user_env, monkeypatch, tmp_path):
    """Check that a process uses one thread unless the user sets a different number.

    With cpu.yaml, accelerate launch sets OMP_NUM_THREADS to the number of cores.
    """
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    words = [*SCRIPTS["hello"], "--max_steps", "1", "--output_dir", tmp_path / "run"]
    assert f", threads {user_env.get('OMP_NUM_THREADS', 1)}\n" in run([*launcher, *words], env=user_env)


def test_a_run_killed_on_four_and_three_processes_finishes_on_one(one_process, project_copy, tmp_path, cache):
    """Kill the run between log lines, so that a logged mean loss includes steps before and after a kill."""
    call = "            run.checkpoint(step)\n"
    kill = "            if str(step) == __import__('os').environ.get('KILL_AT'):\n"
    kill += "                run.session.saver.wait() if run.session.main_record else None\n"
    kill += "                __import__('os').kill(__import__('os').getpid(), 9)\n"
    mutate(project_copy, "train_hello.py", call, call + kill)
    rest = [*words("hello", cache), "--checkpoint_every", "1", "--output_dir", tmp_path / "run"]
    for processes, step in ((4, 7), (3, 12)):
        job = Job([*torchrun(processes), *rest], cwd=project_copy, env={"KILL_AT": str(step)})
        assert "SIGKILL" in job.wait()[1]
        assert latest(tmp_path / "run").name >= f"step_{step - 1:08d}"
    assert "continuing at step" in run([*python(), *rest], cwd=project_copy)
    assert bits(tmp_path / "run") == one_process("hello")


@pytest.mark.full
def test_a_block_that_each_micro_batch_may_skip(project_copy, tmp_path):
    """Train a block that, in some steps, has no gradient in any of one process's micro-batches."""
    drop = "x = self.blocks[0](x)\n        is_left_out = self.training and torch.rand(()) < 0.5\n"
    drop += "        return self.head(x if is_left_out else x + self.blocks[1](x))"
    mutate(project_copy, "train_hello.py", "return self.head(self.blocks(x))", drop)
    for name, launcher in (("one", python()), ("four", LAUNCHERS["ddp 4"])):
        run([*launcher, *SCRIPTS["hello"], "--output_dir", tmp_path / name], cwd=project_copy)
    assert bits(tmp_path / "one") == bits(tmp_path / "four")


# --- Changes that break exact sums

BACKWARD = "accelerator.backward(loss)"


def test_fused_steps_of_shards_are_refused(project_copy, tmp_path, cache):
    mutate(project_copy, "onecurve/distributed/exact_sum.py", '{"fused": False, "foreach": True}', "{}")
    command = [*STRATEGIES["fsdp"], *words("cnn_a", cache), "--output_dir", tmp_path / "run"]
    status, output = Job(command, cwd=project_copy).wait()
    assert status != 0
    assert "AdamW can't be used on FSDP2's shards: updates of shards are not bitwise identical" in output


THREADS = "int(outer_threads)"
HEAD = """self.head = nn.Linear(hidden_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head("""
HEADS = HEAD.replace("= nn.L", "= nn.ModuleList(nn.L").replace(", 1)", ", 1) for _ in range(2))")
HEADS = HEADS.replace(".head(", ".head[torch.distributed.get_rank()](")
MISTAKES = {  # Launcher, file, code, replacement and expected message of each mistake
    "one thread more": (
        *(torchrun(2), "onecurve/distributed/devices.py", THREADS, f'{THREADS} + int(os.environ["RANK"])'),
        "the processes do not agree: threads is ",
    ),
    "a head of each shard's process": (
        *(STRATEGIES["fsdp"], "train_hello.py", HEAD, HEADS),
        "at step 5 or earlier, a parameter received a gradient only on some processes",
    ),
    "infinite": (
        *(torchrun(2), "train_hello.py", BACKWARD),
        "accelerator.backward(loss * (float('inf') if step == 3 and rank == 1 else 1))",
        "the gradient of blocks.0.0.weight at step 4 is not finite or exceeds 341.333",
    ),
}


@pytest.mark.parametrize("mistake", [full(name) if name == "infinite" else name for name in MISTAKES])
def test_sums_that_cannot_be_exact_end_all_processes(mistake, project_copy, tmp_path):
    launcher, *code, message = MISTAKES[mistake]
    mutate(project_copy, *code)
    command = [*launcher, *SCRIPTS["hello"], "--output_dir", tmp_path / "run"]
    status, output = Job(command, cwd=project_copy).wait()
    assert status != 0
    assert message in output


def test_gradients_in_bf16_are_refused():
    with pytest.raises(ValueError, match="--grad_compression bf16 rounds gradient sums"):
        ImageRecipe(deterministic=True, grad_compression="bf16")


# --- Exact sums of simulated processes


def fake(accumulations=1, processes=1, sync_gradients=False) -> SimpleNamespace:
    """Return a fake accelerator with the attributes that ExactSum reads."""
    return SimpleNamespace(
        device=torch.device("cpu"), num_processes=processes, scaler=None, sync_gradients=sync_gradients,
        gradient_accumulation_steps=accumulations, distributed_type=DistributedType.NO,
        unscale_gradients=lambda: None,
    )  # fmt: skip


def added(module: ModuleType, gradients: torch.Tensor, processes: int = 1) -> torch.Tensor:
    """Return the sum [n] that the last process computes for gradients of shape [micro-batches, n].

    The micro-batches are divided among the processes, which compute one after another. Each process adds its
    contribution to the earlier processes' sum.
    """
    sent, sums = torch.zeros((), dtype=torch.float64), dist.ReduceOp.SUM

    def all_reduce(tensor, operation=sums, async_op=False):
        nonlocal sent
        if operation == sums:
            sent = tensor.add_(sent).clone()
        return SimpleNamespace(wait=lambda: None)

    for part in gradients.chunk(processes):
        accelerator, model = fake(len(part), processes), nn.ParameterList([torch.zeros(gradients.shape[1])])
        summed = module.ExactSum(accelerator, model)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_reduce", all_reduce)
            for number, gradient in enumerate(part, 1):
                accelerator.sync_gradients = number == len(part)
                summed.backward((model[0] * gradient).sum())
            summed.check(step=1)
    return model[0].grad


def mutant(module: ModuleType, old: str, new: str) -> ModuleType:
    """Return the module with one piece of its code replaced."""
    text = Path(module.__file__).read_text()
    assert text.count(old) == 1
    changed = ModuleType("mutant")
    exec(compile(text.replace(old, new), "mutant", "exec"), vars(changed))
    return changed


def gradients_of(seed: int, drawn: list[float]) -> torch.Tensor:
    """Return gradients of shape [35, 501] with the drawn values in the first column and random other columns.

    In each random column, all values except one cancel out, and some values exceed the precision of float64.
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(18, 500, generator=generator)
    values *= 2.0 ** torch.randint(-60, 5, values.shape, generator=generator)
    return torch.cat([torch.tensor(drawn)[:, None], torch.cat([values, -values[:17]])], 1)


FLOATS = st.lists(st.floats(-117, 117, width=32), min_size=35, max_size=35)
SUMS = st.tuples(  # Gradients of 35 micro-batches, their order, and the number of processes
    st.builds(gradients_of, st.integers(0, 2**32), FLOATS),
    st.permutations(range(35)),
    st.sampled_from([1, 5, 7, 35]),  # In fp32, 1/5 of 1/7 is not 1/35
)


def differs(module: ModuleType, case: tuple) -> bool:
    gradients, order, processes = case
    return not torch.equal(added(module, gradients[list(order)], processes), added(module, gradients))


@given(SUMS)
def test_any_order_on_any_number_of_processes_gives_the_same_bits(case):
    assert not differs(exact_sum, case)
    errors = (added(exact_sum, case[0]) - case[0].double().mean(0)).abs()
    assert (errors <= case[0].double().abs().mean(0) * 2**-23 + 35 / exact_sum.UNITS_PER_ONE).all()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("out=out).round_()", "out=out)"),
        ("sum_chunk.add_(gradient_chunk)", "sum_chunk.copy_(sum_chunk.float() + gradient_chunk)"),
        (
            "loss / self.micro_batch_count",
            "loss / self.accelerator.gradient_accumulation_steps / self.accelerator.num_processes",
        ),
    ],
    ids=["not rounded", "in fp32", "divided twice"],
)
def test_a_mutant_of_the_sum_is_detected(old, new):
    find(SUMS, partial(differs, mutant(exact_sum, old, new)), settings=settings(phases=[Phase.generate]))


def test_a_gradient_that_is_too_large_is_refused():
    with pytest.raises(FloatingPointError, match=r"gradient of 0 at step 1 is not finite or exceeds 117\.0"):
        added(exact_sum, gradients_of(0, [0.0] * 35) * 1e6)


def test_a_bucket_without_gradients_adds_nothing_of_the_last_step(monkeypatch):
    def all_reduce(tensor, operation=dist.ReduceOp.SUM, async_op=False):
        tensor += exact_sum.UNITS_PER_ONE  # All of the other process's gradient elements are 1
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(exact_sum, "BUCKET_SIZE", 1)
    model = nn.ParameterList([torch.zeros(3), torch.zeros(3)])
    summed = exact_sum.ExactSum(fake(processes=2, sync_gradients=True), model)
    summed.backward(4 * model[0].sum() + 4 * model[1].sum())
    model.zero_grad()
    summed.backward(4 * model[0].sum())
    assert [p.grad.tolist() for p in model] == [[3.0] * 3, [1.0] * 3]


def test_gradients_equal_torchs_and_are_none_where_torchs_are():
    """Train a channels_last model with two heads: first both heads in a step, then each head in a separate
    step.
    """
    layers = nn.ModuleList([nn.Conv2d(3, 4, 3), nn.Linear(4, 2), nn.Linear(4, 2)])
    model, reference = (copy.deepcopy(layers).to(memory_format=torch.channels_last) for _ in range(2))
    accelerator = fake(accumulations=2)
    summed = exact_sum.ExactSum(accelerator, model)
    generator = torch.Generator().manual_seed(0)
    for turns in ((1, 2), (1, 1), (2, 2)):
        for number, head in enumerate(turns, 1):
            accelerator.sync_gradients = number == 2
            x = torch.randn(5, 3, 6, 6, generator=generator)
            loss, reference_loss = (m[head](m[0](x).mean((2, 3))).square().mean() for m in (model, reference))
            summed.backward(loss)
            (reference_loss / 2).backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), turns
            if q.grad is not None:
                assert torch.allclose(p.grad, q.grad), turns
                assert p.grad.stride() == q.grad.stride()
        model.zero_grad()
        reference.zero_grad()
    summed.check(step=3)


def test_many_tensors_need_as_few_operators_as_one():
    """Check that the number of operators (kernels on a GPU) does not grow with the number of tensors."""
    counts = []
    for tensors in (1, 300):
        model = nn.ParameterList([torch.ones(100) for _ in range(tensors)])
        summed = exact_sum.ExactSum(fake(sync_gradients=True), model)
        loss = torch.cat(list(model)).sum()
        with Operators() as operators:
            summed.backward(loss)
            summed.clip_grad_norm_(model, 0.5)
        # Operators without kernels: memory allocations, and views that are not marked as views in their
        # schema
        skipped = ("empty", "split")
        names = [func.name() for func in operators.called if not func.is_view]
        counts.append(sum(not any(word in name for word in skipped) for name in names))
    assert counts[0] < 50
    assert counts[1] - counts[0] < 300, "more than autograd's copy of each part"


def test_the_norm():
    gradients = gradients_of(0, [0.0] * 35)
    model = nn.ParameterList(list(gradients))
    summed = exact_sum.ExactSum(fake(), model)
    for p, gradient in zip(model, gradients, strict=True):
        p.grad = gradient.clone()
    norm = summed.clip_grad_norm_(model, 0.5)
    assert norm.item() == pytest.approx(gradients.double().norm().item(), rel=1e-12)
    assert torch.stack([p.grad for p in model]).norm().item() == pytest.approx(0.5, rel=1e-5)
    model[0].grad[0] = math.nan
    assert summed.clip_grad_norm_(model, 0.5).isnan()
