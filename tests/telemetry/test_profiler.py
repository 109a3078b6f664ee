"""--profile: the parts of a step, by traces with known times and by real runs."""

import gzip
import json

import pytest
import torch
from safetensors.torch import load_file

from common.report.page import page
from common.report.record import RunRecord
from common.telemetry.profiler import write_snapshot
from common.telemetry.trace import FOLDER, PART, PARTS, STEP, step_time
from tests.conftest import CNN, STRATEGIES, VIT, Job, full, latest, lines, python, run

DIGITS = [
    "--data",
    "digits",
    "--batch_size",
    "96",
    "--per_device_batch_size",
    "48",
    "--mixed_precision",
    "no",
]
DIGITS += ["--max_steps", "12", "--trackers", "none", "--telemetry_s", "0", "--log_every", "1"]
PROFILE = ["--profile", "8"]
TOTAL = sorted((*PARTS, "communication", "host"))


def event(name: str, start: float, end: float, category: str = "user_annotation", **args) -> dict:
    """An event of a Chrome trace; times in milliseconds."""
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": 1e3 * start,
        "dur": 1e3 * (end - start),
        "args": args,
    }


def parts(*spans: tuple[str, float, float]) -> list[dict]:
    return [event(PART + name, start, end) for name, start, end in spans]


def milliseconds(found: dict[str, float]) -> dict[str, float]:
    return {name: round(1e3 * seconds, 6) for name, seconds in found.items()}


def test_the_parts_of_a_step_on_a_cpu():
    """From 30 to 50 a collective runs beside the backward pass, which computes until 40 and then waits."""
    spans = parts(("data", 0, 5), ("forward", 5, 20), ("backward", 20, 50), ("optimizer", 50, 58))
    computing = [event("aten::mm", 6, 19, "cpu_op"), event("aten::mm", 21, 40, "cpu_op")]
    waiting = event("autograd::engine::evaluate_function: Hook", 20, 50, "cpu_op")
    found = step_time(
        [event(STEP + "8", 0, 60), *spans, *computing, waiting, event("gloo:all_reduce", 30, 50)]
    )
    assert milliseconds(found.parts_s) == {
        **{"data": 5, "forward": 15, "backward": 20, "optimizer": 8},
        **{"communication": 10, "host": 2},
    }
    assert (found.step_s, found.hidden_s) == pytest.approx((0.06, 0.01))


def test_what_lies_between_two_steps_is_left_out():
    steps = [event(STEP + "1", 0, 10), event(STEP + "2", 50, 60)]
    found = step_time([*steps, *parts(("forward", 0, 8), ("forward", 20, 40), ("forward", 50, 58))])
    assert milliseconds(found.parts_s) == dict.fromkeys(TOTAL, 0) | {"forward": 8, "host": 2}
    with pytest.raises(ValueError, match="no profiled step"):
        step_time(parts(("forward", 0, 8)))


def test_on_a_gpu_a_kernel_belongs_to_the_part_that_launched_it():
    """The device is behind the host: it computes until 100, and the host's step ends at 30."""
    spans = parts(("data", 0, 10), ("forward", 10, 15), ("backward", 15, 25), ("optimizer", 25, 28))
    launches = [
        event("cudaLaunchKernel", at, at + 0.1, "cuda_runtime", correlation=k)
        for k, at in enumerate((11, 16, 17, 26, 29))
    ]
    kernels = [
        event("gemm", 20, 40, "kernel", correlation=0),
        event("gemm", 40, 70, "kernel", correlation=1),
        event("ncclDevKernel_AllReduce", 60, 85, "kernel", correlation=2),
        event("adam", 85, 98, "kernel", correlation=3),
        event("fill", 98, 100, "kernel", correlation=4),
    ]
    found = step_time([event(STEP + "8", 0, 30), *spans, *launches, *kernels])
    assert milliseconds(found.parts_s) == {
        **{"data": 10, "forward": 20, "backward": 30, "optimizer": 13},
        **{"communication": 15, "host": 12},
    }
    assert (found.step_s, found.hidden_s) == pytest.approx((0.1, 0.01))


def test_the_allocators_history_is_json(tmp_path):
    """With the keys of torch.cuda.memory._snapshot(); not yet measured on a GPU."""
    frame = {"name": "forward", "filename": "train_cnn_a.py", "line": 80}
    snapshot = {
        "segments": [{"address": 2**47, "total_size": 2**21, "blocks": [{"size": 512, "frames": [frame]}]}],
        "device_traces": [[{"action": "alloc", "addr": 2**47, "size": 512, "stream": 0, "frames": [frame]}]],
        "allocator_settings": {"expandable_segments": False, "PYTORCH_CUDA_ALLOC_CONF": ""},
        "external_annotations": [],
    }
    write_snapshot(tmp_path / "memory.json.gz", snapshot)
    assert json.loads(gzip.decompress((tmp_path / "memory.json.gz").read_bytes())) == snapshot


@pytest.fixture(scope="module")
def profiled(tmp_path_factory, cache):
    folder = tmp_path_factory.mktemp("profiled") / "run"
    output = run([*python(), *CNN, *DIGITS, *PROFILE, *cache, "--output_dir", folder])
    assert f"profile of steps 8 to 10: {folder}/profile/trace.json.gz" in output
    return folder


def summary_of(folder) -> dict:
    """The summary, after a look at its trace, and at the sum of its parts."""
    trace = json.loads(gzip.decompress((folder / FOLDER / "trace.json.gz").read_bytes()))["traceEvents"]
    found = json.loads((folder / FOLDER / "summary.json").read_text())
    steps = [e["name"] for e in trace if e["name"].startswith(STEP) and e["cat"] == "user_annotation"]
    assert sorted(steps) == sorted(f"{STEP}{n}" for n in (8, 9, 10))
    assert sorted(found["parts_s"]) == TOTAL
    assert sum(found["parts_s"].values()) == pytest.approx(found["step_s"])
    assert all(found["parts_s"][name] > 0 for name in ("data", "forward", "backward", "optimizer"))
    assert len(found["operators"]) == 10
    return found


def test_a_profile_changes_no_number(profiled, cache, tmp_path):
    run([*python(), *CNN, *DIGITS, *cache, "--output_dir", tmp_path / "run"])
    ours, theirs = (
        load_file(latest(folder) / "model.safetensors") for folder in (profiled, tmp_path / "run")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    losses = [
        [line.get("train/loss") for line in lines(f / "metrics.jsonl")] for f in (profiled, tmp_path / "run")
    ]
    assert losses[0] == losses[1]
    assert summary_of(profiled)["parts_s"]["communication"] == 0


def test_the_page_shows_the_profile(profiled):
    text = page(RunRecord(profiled), "x", [])
    assert "### Where a step's time goes: steps 8 to 10 of process 0" in text
    assert "| communication that nothing hides | 0.00 ms | 0.0% |" in text
    assert "| `aten::convolution_backward` | 12 |" in text  # two layers, two accumulations, three steps


@pytest.mark.parametrize(
    ("script", "strategy"),
    [(CNN, "ddp"), *(full(VIT, s) for s in STRATEGIES if s != "single")],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_one_process_of_two_is_profiled(script, strategy, cache, tmp_path):
    flags = [] if script is CNN else ["--clip_norm", "1"]
    run([*STRATEGIES[strategy], *script, *DIGITS, *flags, *PROFILE, *cache, "--output_dir", tmp_path / "run"])
    found = summary_of(tmp_path / "run")
    assert found["parts_s"]["communication"] + found["hidden_s"] > 0


def test_a_step_that_does_not_come_is_refused_or_said(profiled, cache, tmp_path):
    words = [*python(), *CNN, *DIGITS, *cache, "--output_dir"]
    status, output = Job([*words, tmp_path / "run", "--profile", "11"]).wait()
    assert status == 1
    assert "--profile 11: 3 steps from step 11 on, and the run ends at step 12: choose at most 10" in output
    output = run([*words, profiled, *PROFILE, "--max_steps", "14"])
    assert "no new profile: the run goes on behind step 8" in output
