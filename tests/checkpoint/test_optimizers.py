"""Tests that each strategy either saves and restores an optimizer's state or refuses the optimizer."""

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm.optim
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from onecurve.checkpoint.optimizer_trial import run_optimizer_trial
from onecurve.distributed.layout import ParameterLayout
from onecurve.distributed.zero_layout import ZeroLayout
from tests.conftest import STRATEGIES, Job, latest, mutate, python, rows_of, run, tensors
from tests.support.optimizers import CASES
from train_vit import Vit, build_model, build_optimizer, learning_rate

WHOLE = "depends on the whole parameter"
NOT_FLAT = dict.fromkeys(("lamb", "adafactor", "adafactor_unfactored", "muon_mixed"), WHOLE)
NOT_FLAT |= {"muon": "Param gradient must be a 2D matrix", "lookahead": "one parameter group at a time"}
REFUSED = {
    "single": {},
    "ddp": {"adamw_first_without_gradient": "a gradient for every trained parameter .* first received none"},
    "fsdp": {"adafactor": "placement"} | dict.fromkeys(("muon", "muon_mixed"), WHOLE),
    "zero2": NOT_FLAT,
    "zero3": NOT_FLAT | {"schedule_free": r"ZeRO-3 calls step\(\) several times"},
}


def check_resumes(strategy: str, folder: Path, cases: list[str]) -> None:
    """Train with each optimizer, and check that the run is refused as expected or resumes bitwise
    identically.
    """
    words = [*STRATEGIES[strategy], "-m", "tests.support.optimizers", folder, "--only", ",".join(cases)]
    run(words, env={"PYTHONWARNINGS": "ignore"})
    for case in cases:
        if case in REFUSED[strategy]:
            assert re.search(REFUSED[strategy][case], (folder / case / "refused").read_text()), case
            continue
        straight, resumed = (latest_of(folder / case / part) for part in ("straight", "resumed"))
        assert_equal(tensors(straight), tensors(resumed), case)
        assert state(straight) == state(resumed), case
        half = tensors(latest_of(folder / case / "half"))
        change = max((t - half[n]).abs().max() for n, t in tensors(straight).items() if n[:6] == "model:")
        assert change > 1e-4, case  # The steps after the resume change the weights


def latest_of(folder: Path) -> Path:
    return sorted(folder.glob("step_*"))[-1]


def state(checkpoint: Path) -> dict:
    return json.loads((checkpoint / "state.json").read_text())["optimizer"]


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor], case: str) -> None:
    assert actual.keys() == expected.keys(), case
    for name, tensor in actual.items():
        assert torch.equal(tensor, expected[name]), (case, name)


@pytest.fixture(scope="module")
def single(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("optimizers") / "single"
    check_resumes("single", folder, CASES)
    return folder


@pytest.mark.parametrize(
    ("strategy", "cases"),
    [
        pytest.param("fsdp", ["lamb", "muon", "muon_mixed"], id="fsdp-three"),
        *(
            pytest.param(strategy, CASES, id=f"{strategy}-all", marks=pytest.mark.full)
            for strategy in ("ddp", "fsdp", "zero2", "zero3")
        ),
    ],
)
def test_an_optimizer_resumes_and_matches_one_process_or_is_refused(strategy, cases, single, tmp_path):
    check_resumes(strategy, tmp_path, cases)
    for case in set(cases) - REFUSED[strategy].keys():
        actual, expected = (tensors(latest_of(folder / case / "straight")) for folder in (tmp_path, single))
        assert actual.keys() >= expected.keys()  # ZeRO stores zeros for a parameter without gradients
        for name, tensor in expected.items():
            # timm's Muon orthogonalizes gradients in bf16, which has a precision of 2^-8.
            atol = 1e-4 if case == "muon_mixed" else 1e-5
            torch.testing.assert_close(actual[name], tensor, atol=atol, rtol=0, msg=f"{case} {name}")


def test_the_files_contain_all_state(single):
    def stored_state(case: str) -> tuple[set[str], dict, list]:
        checkpoint = latest_of(single / case / "straight")
        names = {name.rpartition("/")[2] for name in load_file(checkpoint / "optimizer.safetensors")}
        return names, state(checkpoint)["scalars"]["head.weight"], state(checkpoint)["groups"]

    step = {"dtype": "F32", "value": 10.0}
    assert stored_state("adamw") == ({"exp_avg", "exp_avg_sq"}, {"step": step}, [{}, {}])
    assert stored_state("lamb") == ({"exp_avg", "exp_avg_sq"}, {}, [{"step": step}, {"step": step}])
    assert stored_state("adafactor") == ({"row_var", "col_var", "variance"}, {"step": step}, [{}, {}])
    assert stored_state("nadam")[1].keys() == {"step", "mu_product"}
    assert stored_state("lookahead")[0] == {"exp_avg", "exp_avg_sq", "lookahead_slow_buff"}
    assert stored_state("schedule_free")[2][0].keys() == {"k", "weight_sum"}
    no_gradient = latest_of(single / "adamw_first_without_gradient" / "straight")
    assert "first" not in {n.partition("/")[0] for n in load_file(no_gradient / "optimizer.safetensors")}
    manifest = json.loads((no_gradient / "manifest.json").read_text())
    assert manifest["optimizer"]["state"] == ["exp_avg", "exp_avg_sq", "step"]
    assert manifest["optimizer"]["class"].endswith("AdamW")


def test_another_optimizer_is_refused_or_its_state_is_reset(tmp_path, project_copy):
    flags = ["--checkpoint_every", "10", "--trackers", "none", "--telemetry_s", "0", "--max_steps"]
    words = [*python(), "train_hello.py", "--output_dir", tmp_path, *flags]
    run([*words, "10"])
    mutate(project_copy, "train_hello.py", "torch.optim.AdamW(", "torch.optim.SGD(")
    status, output = Job([*words, "20"], cwd=project_copy).wait()
    assert status == 1
    assert "contains the state of torch.optim.adamw.AdamW (exp_avg, exp_avg_sq, step)" in output
    assert "--allow_changed optimizer to reset the state" in output
    assert "Traceback" not in output
    output = run([*words, "20", "--allow_changed", "optimizer"], cwd=project_copy)
    assert "the optimizer's state is reset" in output
    assert "continuing at step 10" in output
    assert not load_file(latest(tmp_path) / "optimizer.safetensors")  # SGD without momentum has no state


@pytest.mark.full
@pytest.mark.parametrize(
    ("strategy", "old", "new", "flags", "message"),
    rows_of("refused optimizers"),
    ids=["fsdp", "fsdp-lamb", "fsdp-madgrad", "ddp"],
)
def test_a_refusal_is_one_line(strategy, old, new, flags, message, project_copy, tmp_path):
    mutate(project_copy, "train_hello.py", old, new)
    words = [*STRATEGIES[strategy], "train_hello.py", "--trackers", "none", "--log_every", "1", *flags]
    words += ["--output_dir", tmp_path / "run"]
    status, output = Job(words, cwd=project_copy).wait()
    assert status == 1
    assert output.count(message) == 1, output
    assert not list(tmp_path.glob("run/checkpoints/*"))
    log = tmp_path / "run" / "metrics.jsonl"
    assert not log.exists() or "train/loss" not in log.read_text(), "a step was taken before"


# --- Checks without launches


@pytest.mark.parametrize("layer_decay", [1.0, 0.5])
@pytest.mark.parametrize("name", ["sgd", "lion", "muon", "lookahead_adamw", "Rprop", "adafactor"])
def test_vit_accepts_optimizers_of_timm_and_torch_by_name(name, layer_decay):
    recipe = Vit(model="test_vit", image_size=32, optimizer=name, lr=0.25, layer_decay=layer_decay)
    optimizer = build_optimizer(model := build_model(recipe, 10), recipe)
    assert type(optimizer).__name__.lower() == name.lower().partition("_")[0]
    groups = [group for group in optimizer.param_groups if group["params"]]
    assert {group["lr"] for group in groups} == {0.25}
    assert {group.get("weight_decay") for group in groups} >= {0.0, 0.05}
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adanw2", "is neither in timm nor in torch: did you mean adanw?"),
        ("nothing", r"is neither in timm nor in torch: timm.optim.list_optimizers\(\) lists the names"),
        ("lbfgs", "can't be created: LBFGS doesn't support per-parameter options"),
        ("fusedadam", "can't be created: "),
    ],
)
def test_an_unknown_name_is_one_line(name, message):
    recipe = Vit(model="test_vit", image_size=32, optimizer=name)
    with pytest.raises(ValueError, match=f"^--optimizer {name} {message}"):
        build_optimizer(build_model(recipe, 10), recipe)


def test_vits_schedules():
    names = ("cosine", "linear", "constant", "step")
    rates = {n: [learning_rate(Vit(lr=1, warmup=0, schedule=n), s, 12) for s in (0, 3, 6, 9)] for n in names}
    assert rates["cosine"] == pytest.approx([1, 0.5 + 0.125**0.5, 0.5, 0.5 - 0.125**0.5])
    assert rates["linear"] == [1, 0.75, 0.5, 0.25]
    assert rates["constant"] == [1] * 4
    assert rates["step"] == pytest.approx([1, 1, 0.1, 0.01])
    # The schedule `step` uses the same warm-up
    assert learning_rate(Vit(lr=1, warmup=0.5, schedule="step"), 2, 12) == 0.5


class Flat(ParameterLayout):
    """Layout in which the optimizer updates flat partitions, as with ZeRO."""

    partition_name, has_flat_partitions, arrangements = "flat partitions", True, ZeroLayout.arrangements


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (torch.optim.AdamW, None),
        (torch.optim.NAdam, None),
        (torch.optim.RAdam, None),
        (torch.optim.RMSprop, None),
        (timm.optim.Lion, None),
        (timm.optim.Lamb, "depends on the whole parameter"),
        (partial(timm.optim.Lars, always_adapt=True), "depends on the whole parameter"),
        (torch.optim.Adafactor, "depends on the whole parameter"),
        (timm.optim.Muon, "depends on the whole parameter"),
        (torch.optim.Adagrad, "creates state for whole parameters before its first step"),
    ],
)
def test_flat_partitions_need_an_elementwise_optimizer(make, reason):
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Linear(7, 11))
    layout = Flat(model, SimpleNamespace(optimizer=make(model.parameters(), lr=0.01)))
    if reason is None:
        assert run_optimizer_trial(layout).state_names()
    else:
        with pytest.raises(ValueError, match=f"on flat partitions: .*{reason}"):
            run_optimizer_trial(layout)


class Rows(ParameterLayout):
    """Layout in which the optimizer receives each parameter as two tensors, each with half of the rows."""

    partition_name = "shards"

    def arrangements(self):
        return [lambda tensors: [half for tensor in tensors for half in tensor.chunk(2)]]


ELEMENTWISE = [torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop]
ELEMENTWISE += [partial(torch.optim.SGD, momentum=0.9), torch.optim.Adamax, timm.optim.Lion, timm.optim.Adan]
WITH_TAILS = [timm.optim.MADGRAD, partial(torch.optim.AdamW, fused=True)]


@pytest.mark.parametrize("make", [*ELEMENTWISE, *WITH_TAILS])
def test_with_same_bits_shards_match_whole_parameters_or_are_refused(make):
    """Check optimizers that update a tensor's last elements with different code on the CPU.

    On the CPU, powers and all fused-optimizer operations round differently in a tensor's last elements.
    """
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Linear(64, 64))
    layout = Rows(model, SimpleNamespace(optimizer=make(model.parameters(), lr=0.01)))
    run_optimizer_trial(layout)
    if make in ELEMENTWISE:
        assert run_optimizer_trial(layout, needs_bitwise=True).state_names() is not None
    else:
        with pytest.raises(
            ValueError, match="can't be used on shards: updates of shards are not bitwise identical"
        ):
            run_optimizer_trial(layout, needs_bitwise=True)


class Listing(torch.optim.SGD):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("history", []).append(p.grad)


class Counting(torch.optim.SGD):
    calls = 0

    def step(self, closure=None):
        super().step(closure)
        self.calls += 1


class WithMoreState(torch.optim.SGD):
    def state_dict(self):
        return super().state_dict() | {"generator": 0}


@pytest.mark.parametrize(
    ("optimizer_class", "reason"),
    [
        (torch.optim.LBFGS, "a trial step raised TypeError"),
        (Listing, "the optimizer state history is a list"),
        (Counting, "the optimizer stores calls outside its state_dict()"),
        (WithMoreState, "its state_dict() contains keys other than"),
    ],
)
def test_state_that_a_checkpoint_cannot_store_is_refused_before_the_first_step(optimizer_class, reason):
    model = nn.Linear(3, 2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=re.escape(reason)) as refusal:
        run_optimizer_trial(
            ParameterLayout(model, SimpleNamespace(optimizer=optimizer_class(model.parameters(), lr=0.1)))
        )
    assert optimizer_class.__name__ in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert_equal(model.state_dict(), before, "the trial changed the model")


def test_a_trial_changes_nothing_and_lists_the_optimizers_state():
    model = nn.Sequential(nn.Linear(300, 200), nn.LayerNorm(200))
    model.scale = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    layout = ParameterLayout(model, SimpleNamespace(optimizer=optimizer))
    trial = run_optimizer_trial(layout)
    assert trial.state_names() == ["step", "sum"]
    assert trial.shaped_dtypes["0.weight"] == {"sum": torch.float32}
    assert all((state["sum"] == 0.5).all() for state in optimizer.state.values())
    assert layout.changed_groups() == [{}]
    assert all(p.grad is None for p in model.parameters())
