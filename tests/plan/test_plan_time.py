"""Predicted step times: the exchange, accumulation, what is measured."""

import subprocess
from dataclasses import replace

import pytest

from tests.plan.test_plan import H200, SMALL, made, plan
from tests.support import forks
from tools.plan import cost, planning
from tools.plan.cost import Cluster, Measured, exchanged, measured_step_time, step_time, traffic
from tools.plan.planning import Candidate, Planning, compressed, possible, this_device

HOSTS = Cluster(2, 1, H200, 0.1)  # 10^8 bytes a second
STEP = Measured(1.0, 2.0, 0.5)
GATHER, SCATTER = ("all_gather", 10**8, 2), ("reduce_scatter", 10**8, 2)


@pytest.mark.parametrize(
    ("strategy", "collectives", "accumulations", "seconds"),
    [
        ("ddp", [("all_reduce", 3 * 10**8, 2)], 1, 3.5 + 1),  # 3 s, behind 2 s of backward
        ("ddp", [("all_reduce", 3 * 10**8, 2)], 2, 6.5 + 1),  # behind the last backward alone
        ("fsdp", [GATHER] * 5, 1, 3 + 0.5 / 2 + 0.5),  # 0.5 s each; two ranks share the optimizer's state
        ("fsdp", [GATHER] * 5, 2, 6 + 0.5 / 2 + 1),  # again for each micro-batch
    ],
)
def test_an_exchange_hides_behind_the_measured_backward_pass(strategy, collectives, accumulations, seconds):
    trace, shards = made(strategy=strategy, collectives=collectives), 1 if strategy == "ddp" else 2
    found = measured_step_time(trace, HOSTS, STEP, shards, accumulations)
    assert found.seconds == pytest.approx(seconds)
    assert found.limit == cost.NETWORK
    fast = measured_step_time(trace, replace(HOSTS, network_gb_s=1e3), STEP, shards, accumulations)
    assert (fast.seconds, fast.limit) == (3 * accumulations + 0.5 / shards, cost.COMPUTE)


@pytest.mark.parametrize(
    ("strategy", "counts"), [("ddp", (1, 1)), ("zero1", (1, 1)), ("zero2", (1, 3)), ("fsdp", (3, 1))]
)
def test_what_is_exchanged_once_however_often_is_accumulated(strategy, counts):
    kinds = [kind for kind, *_ in exchanged(made(strategy=strategy, collectives=[GATHER, SCATTER]), 3)]
    assert (kinds.count("all_gather"), kinds.count("reduce_scatter")) == counts
    once = made(strategy="ddp", operations=[("float32", 0, 10**12)])
    assert step_time(once, HOSTS, accumulations=3).seconds == 3 * step_time(once, HOSTS).seconds


def test_hybrid_sharding_gathers_inside_of_a_host_also_on_as_many_hosts():
    collectives = [("all_gather", 800, 2), ("reduce_scatter", 800, 2), ("all_reduce", 400, 2)]
    link, network = traffic(made(strategy="fsdp", collectives=collectives), Cluster(2, 2, H200, 1))
    assert (link, network) == (800, 800)


def test_compressed_gradients_are_half_of_the_bytes():
    whole = [("all_reduce", 800, 2)]
    assert compressed(made(strategy="ddp", collectives=whole), "bf16").collectives == [("all_reduce", 400, 2)]
    assert compressed(made(strategy="ddp", collectives=whole), "no").collectives == whole
    assert possible(2, 1, "bf16") == ["single", "ddp"]  # the others refuse it


def test_a_step_is_measured_under_the_engine(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", forks.Popen)
    found = planning.measured("zero2", 8, [*SMALL, "--mixed_precision=no"])
    assert found.backward_s > 0
    assert 0 < found.forward_s < 60
    assert found.optimizer_s > 0


def test_a_measurement_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", forks.Popen)
    with pytest.raises(ValueError, match=r"--measure: ddp: .*--widths"):
        planning.measured("ddp", 8, [*SMALL, "--widths=0"])


def test_the_parts_of_the_memory_and_what_limits():
    peaks = {32: {"Total": 16, "Activation": 3, "Buffer": 2, "Gradient": 0}}
    work = {"operations": [("float32", 0, 10**10)], "collectives": [("all_reduce", 10**8, 2)]}
    trace = made(peaks=peaks, parameters=4, gradients=4, **work)
    line = Planning(SMALL, HOSTS).line(Candidate("ddp", trace, 32, 1000))
    assert line.limit == cost.NETWORK
    parts = ("parameters", "activations", "buffers", "gradients", "buckets_temporaries")
    assert [line.memory[name] for name in parts] == [4, 3, 2, 4, 3]


@pytest.mark.parametrize("native", [True, False])
def test_a_cpu_plans_the_precision_in_which_it_trains(native, monkeypatch):
    monkeypatch.setattr("tools.plan.planning.has_native_bf16", lambda: native)
    plan = Planning(SMALL, Cluster(1, 1, this_device(), 1), measure=True)
    assert plan.precision == ("bf16" if native else "no")


@pytest.mark.full
def test_a_measured_plan():
    status, output = plan("--measure", "--hosts", 2, *SMALL)
    assert status == 0, output
    assert "link: loopback" in output
    table = output.splitlines()
    ddp, offload = (next(line for line in table if line.startswith(name)) for name in ("ddp", "offload"))
    assert "nan" not in output
    assert ddp.endswith(("compute", "network"))
    assert offload.endswith("the CPU's optimizer")
