"""Tests of plan.py: measurements in a trace, results computed from a trace, and the table."""

import json
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import plan as plan_script
from benchmarks.plan_memory import BOUND_PCT, FLAGS
from onecurve.models.script import load_script
from onecurve.telemetry.flops import find_device
from tests.conftest import ROOT, accelerate, run
from tests.support import forks
from tests.support.commands import call
from tools.plan import cost
from tools.plan.cost import Cluster, Execution, Trace, estimate_largest_size, sent_bytes, step_time
from tools.plan.planning import Planning, cluster_of

H200, EAGER = find_device("NVIDIA H200"), Execution.of("no", False)
ALONE = Cluster(1, 1, H200, 1)
SMALL = ["train_cnn_a.py", "--widths=8,16,32", "--batch_size=64", "--data=digits"]


def new_trace(**values) -> Trace:
    defaults = {"strategy": "ddp", "mixed_precision": "no", "parameter_bytes": 0, "optimizer_bytes": 0}
    return Trace(**defaults | {"peak_bytes": {}, "operations": [], "collectives": []} | values)


def traced(
    config: str, processes: int, hosts=1, script=SMALL, sizes=(16, 32), mixed="no", device="cpu"
) -> Trace:
    words = ["-m", "tools.plan.trace", f"accelerate_configs/{config}.yaml", processes, hosts]
    words += [",".join(map(str, sizes)), device, *script, f"--mixed_precision={mixed}"]
    output = run([sys.executable, *words])
    return Trace.from_json(next(line for line in output.splitlines() if line.startswith('{"strategy"')))


def parameter_bytes() -> int:
    script = load_script(ROOT / SMALL[0])
    model = script.build_model(script.CnnA(widths=(8, 16, 32)), 10)
    return sum(4 * p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("config", "share", "sent"),
    [
        ("ddp_4gpu", 1, {"all_reduce": 1}),
        ("fsdp_4gpu", 4, {"all_gather": 1, "reduce_scatter": 1}),
        ("zero2_4gpu", 1, {"all_gather": 1, "all_reduce": 1}),
    ],
)
def test_a_trace_matches_the_engine(config, share, sent):
    """Compare a device's memory and the exchanged bytes with the size of the parameters in bytes."""
    whole, trace = parameter_bytes(), traced(config, 4, hosts=2)
    assert trace.parameter_bytes == pytest.approx(whole / share, rel=0.05)
    # DeepSpeed's bucket contains its gradients, and DeepSpeed also keeps master weights.
    if config != "zero2_4gpu":
        assert trace.gradient_bytes == trace.parameter_bytes
        moments = 2 if "AdamW" in (ROOT / SMALL[0]).read_text() else 1
        assert trace.optimizer_bytes == pytest.approx(moments * whole / share, rel=0.05)
    for operation, count in sent.items():
        moved_bytes = sum(size for name, size, ranks in trace.collectives if name == operation and ranks == 4)
        assert count * whole * 0.95 < moved_bytes < 2 * count * whole * 1.05, (operation, moved_bytes, whole)
    assert (
        trace.peak_bytes[32]["Total"]
        > trace.peak_bytes[16]["Total"]
        > trace.parameter_bytes + trace.optimizer_bytes
    )


def test_a_plan_counts_the_bytes_of_the_attention_kernel():
    """Check the number of bytes that the attention kernel reads and writes.

    The forward pass reads qkv and writes the outputs. The backward pass reads qkv, the outputs and their
    gradient, and writes qkv's gradient.
    """
    script = ["train_vit.py", "--model=test_vit", "--image_size=32", "--patch_size=8", "--depth=1"]
    traces = {
        name: traced("single_gpu", 1, script=script, sizes=(4, 8), mixed="bf16", device=name)
        for name in ("cpu", "NVIDIA H200", "Tesla T4")
    }
    part = 2 * 4 * 17 * 64  # Bytes per element x images x tokens x elements per token
    kernels = [("bfloat16", 4 * 4 * 17**2 * 64, 4 * part), ("bfloat16", 10 * 4 * 17**2 * 64, 8 * part)]
    added = Counter(map(tuple, traces["NVIDIA H200"].operations)) - Counter(
        map(tuple, traces["cpu"].operations)
    )
    assert [*added] == kernels
    # The trace must end without an error.
    traced("ddp_2gpu", 2, script=script, sizes=(4, 8), mixed="bf16", device="NVIDIA H200")
    assert traces["Tesla T4"].operations == traces["cpu"].operations
    moved_bytes = {name: sum(bytes for *_, bytes in trace.operations) for name, trace in traces.items()}
    assert moved_bytes["NVIDIA H200"] < moved_bytes["cpu"]


def test_hybrid_sharding_sends_a_share_between_the_hosts():
    whole, trace = parameter_bytes(), traced("fsdp_2x4gpu", 8, 2)
    between = sum(size for name, size, ranks in trace.collectives if (name, ranks) == ("all_reduce", 2))
    assert between == pytest.approx(whole / 4, rel=0.05)
    _, network = sent_bytes(trace, Cluster(2, 4, H200, 10))
    # A host has four devices, and 2 (n-1)/n is 1 for two hosts.
    assert network == pytest.approx(4 * between)


def test_a_sharded_optimizer_holds_only_its_shards():
    """Check that the full-shape fake tensors that DTensor creates before an operator are not counted."""
    trace = traced("fsdp_4gpu", 4, script=["train_cnn_a.py", "--batch_size=4"], sizes=(1,))
    assert trace.peak_bytes[1]["Optstate"] == pytest.approx(trace.optimizer_bytes, rel=0.01)


def test_the_memory_matches_a_training(tmp_path):
    file, script = tmp_path / "found.json", ["train_cnn_a.py", "--batch_size=128", *FLAGS]
    words = ["-m", "benchmarks.plan_memory", "--of", file, *script, "--output_dir", tmp_path / "run"]
    run([*accelerate("ddp_2gpu"), *words], env={"PYTHONPATH": str(ROOT)})
    peak = traced("ddp_2gpu", 2, script=script, sizes=(64,)).peak_bytes[64]["Total"]
    assert peak == pytest.approx(json.loads(file.read_text())["live"], rel=BOUND_PCT / 100)


RELEASES_ELSEWHERE = """
import queue, threading, time
import torch
from torch.profiler import ProfilerActivity, profile
from benchmarks.plan_memory import count_all_threads, least_peaks

def release():
    tensors.get()
    released.set()

count_all_threads()
tensors, released = queue.Queue(), threading.Event()
threading.Thread(target=release).start()
with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
    marks_ns = [time.time_ns()]
    tensors.put(torch.ones(1000))
    released.wait()
    torch.ones(2000)
    marks_ns.append(time.time_ns())
print("live", least_peaks(recorded.profiler.kineto_results.experimental_event_tree(), marks_ns)["live"])
"""


def test_a_tensor_that_another_thread_released_is_not_measured(tmp_path):
    file = tmp_path / "releases.py"
    file.write_text(RELEASES_ELSEWHERE)
    assert "live 8000\n" in run([sys.executable, file], env={"PYTHONPATH": str(ROOT)})


def test_the_largest_size_is_extrapolated_linearly():
    peaks = {8: {"Total": 18 * 2**30}, 16: {"Total": 26 * 2**30}}  # Memory of 10 GiB, plus 1 GiB per image
    assert estimate_largest_size(peaks, 60 * 2**30 + cost.CONTEXT_BYTES) == 48
    assert estimate_largest_size(peaks, 12 * 2**30) == 0


@pytest.mark.parametrize(
    ("trace", "cluster", "limit", "seconds"),
    [
        (new_trace(operations=[("bfloat16", 10**15, 1)]), ALONE, cost.COMPUTE, 1 / 0.9895 / 0.66 / 0.65),
        (new_trace(operations=[("float32", 0, 10**12)]), ALONE, cost.MEMORY, 1 / 4.8 / 0.9 / 0.65),
        (new_trace(operations=[("float32", 1, 1)] * 10), ALONE, cost.LAUNCHES, 2e-3 + 160e-6),
        # The exchange runs in parallel with two thirds of the host's 2 ms.
        (
            new_trace(collectives=[("all_reduce", 10**9, 2)]),
            Cluster(2, 1, H200, 2),
            cost.NETWORK,
            0.5 + 2e-3 / 3,
        ),
        (
            new_trace(collectives=[("all_gather", 9 * 10**11, 2)]),
            Cluster(1, 2, H200, 2),
            cost.LINK,
            1 + 2e-3 / 3,
        ),
    ],
)
def test_the_limit_of_a_step(trace, cluster, limit, seconds):
    assert step_time(trace, cluster, EAGER) == (pytest.approx(seconds), limit)


def test_an_exchange_hides_behind_the_backward_pass():
    computing = [("float32", 0, 10**12)] * 10
    alone = step_time(new_trace(operations=computing), Cluster(2, 1, H200, 1), EAGER)
    hidden = new_trace(operations=computing, collectives=[("all_reduce", 10**9, 2)])
    assert step_time(hidden, Cluster(2, 1, H200, 1), EAGER) == alone


def planned(batch_size: int, file: Path, monkeypatch) -> tuple[list[dict], str]:
    """Return a plan's lines and plan.py's output."""
    words = ["--gpus", 1, "--gpu", "Tesla T4", "--output", file, "train_cnn_a.py"]
    words += ["--data=digits", f"--batch_size={batch_size}"]
    monkeypatch.setattr(subprocess, "Popen", forks.Popen)  # forks.Popen supports only one thread
    monkeypatch.setattr("tools.plan.planning.MAX_PARALLEL_TRACES", 1)
    status, output = call(plan_script.main, *words)
    assert status == 0, output
    return json.loads(file.read_text())["lines"], output


def test_a_plan(tmp_path, monkeypatch):
    (single, offload), output = planned(2, tmp_path / "plan.json", monkeypatch)
    assert (single["strategy"], single["images"], single["efficiency"]) == ("single", 2, 1.0)
    assert single["hours"] == pytest.approx(1437 // 2 * 10 * single["step_s"] / 3600)
    assert offload["step_s"] is None  # No step time is estimated for offloading
    assert "accelerate launch --config_file accelerate_configs/single_gpu.yaml" in output
    assert "--mixed_precision fp16" in output  # A T4 does not support bf16


def test_a_plan_respects_max_steps_and_warns_about_freeze(capsys):
    plan = Planning(["train_vit.py", "--data=digits", "--pretrained", "--freeze", "--max_steps=5"], ALONE)
    line = plan.plan_line("single", new_trace(peak_bytes={16: {"Total": 0}}), 16, 16)
    assert line.hours == pytest.approx(5 * line.step_s / 3600)
    assert "--freeze is ignored. The plan assumes that all layers are trained" in capsys.readouterr().out


@pytest.mark.full
def test_the_largest_size_does_not_depend_on_the_recipes_batch(tmp_path, monkeypatch):
    """Check memory peaks in the optimizer step, at 2 images, and in activations, at thousands of images."""
    plans = [planned(size, tmp_path / f"{size}.json", monkeypatch)[0] for size in (2, 4096)]
    small, large = ([line["largest"] for line in lines] for lines in plans)
    assert small == large


NAMES = {"RTX 4090": ("NVIDIA GeForce RTX 4090", 12.5), "H100": ("NVIDIA H100 80GB HBM3", 12.5)}
NAMES |= {"l4": ("NVIDIA L4", 5), "Tesla T4": ("Tesla T4", 6.25)}


@pytest.mark.parametrize("name", NAMES)
def test_part_of_a_name_is_enough_and_a_device_has_its_network(name, capsys):
    cluster = cluster_of(2, 1, name, None)
    assert (cluster.device.name, cluster.network_gb_s) == NAMES[name]
    assert ("NVIDIA H100 PCIe" in capsys.readouterr().out) == (name == "H100")
    assert cluster_of(2, 1, name, 1.5).network_gb_s == 1.5


def test_a_plan_reports_its_progress(monkeypatch):
    def trace(*_) -> Trace:
        time.sleep(2)  # A heartbeat is sent after half a second
        return new_trace(peak_bytes={size: {"Total": size} for size in (64, 128)})

    monkeypatch.setattr(Planning, "_trace", trace)
    monkeypatch.setattr("onecurve.system.progress.LINE_INTERVAL_S", 0)
    status, output = call(plan_script.main, "--gpu", "T4", *SMALL)
    assert status == 0, output
    assert re.search(r"^tracing (single|offload), 0 of 2 done$", output, re.M), output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "Abacus", *SMALL], "--gpu Abacus is not in the table of devices. Choose one of Tesla T4"),
        (["--gpu", "Tesla T4", "nothing.py"], "the script nothing.py does not exist"),
        (["--gpu", "Tesla T4", "--gpus", "3", *SMALL], "64 is not divisible by the number of processes (3)"),
        (
            ["--gpu", "Tesla T4", "--gpus", "2", *SMALL, "--per_device_batch_size", "64"],
            "--batch_size 64 is not a multiple of --per_device_batch_size 64 x 2 processes",
        ),
        (["--gpu", "Tesla T4", "--hosts", "0", *SMALL], "--hosts 0: the value must be more than 0"),
        (
            ["--gpu", "Tesla T4", "--network_gb_s", "nan", *SMALL],
            "--network_gb_s nan: the value must be more than 0",
        ),
        (["--gpu", "Tesla T4"], "the train script is missing"),
        (SMALL, "the following arguments are required: --gpu"),
    ],
)
def test_mistakes(words, message):
    status, output = call(plan_script.main, *words)
    assert status != 0
    assert message in output
    assert "Traceback" not in output
