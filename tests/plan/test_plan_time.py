"""Tests of predicted step times: exchange, accumulation and memory."""

import pytest

from tests.conftest import full
from tests.plan.test_plan import ALONE, EAGER, H200, SMALL, new_trace, traced
from tools.plan import cost
from tools.plan.cost import Cluster, Execution, collectives_of_step, sent_bytes, step_time
from tools.plan.planning import Planning, compress_traffic, possible_strategies

HOSTS = Cluster(2, 1, H200, 0.1)  # Two hosts whose network transfers 0.1 GB/s
GRAPH = Execution.of("no", True)
GATHER, SCATTER = ("all_gather", 10**8, 2), ("reduce_scatter", 10**8, 2)


@pytest.mark.parametrize(
    ("strategy", "counts"), [("ddp", (1, 1)), ("zero1", (1, 1)), ("zero2", (1, 3)), ("fsdp", (3, 1))]
)
def test_accumulation_repeats_only_some_exchanges(strategy, counts):
    trace = new_trace(strategy=strategy, collectives=[GATHER, SCATTER])
    names = [name for name, *_ in collectives_of_step(trace, 3)]
    assert (names.count("all_gather"), names.count("reduce_scatter")) == counts
    trace = new_trace(strategy="ddp", operations=[("float32", 0, 10**12)])
    alone, _ = step_time(trace, HOSTS, EAGER)
    assert step_time(trace, HOSTS, EAGER, accumulations=3)[0] == pytest.approx(3 * alone)


# Measured images/s on one H200 at batch 512, by --compile and whether a step is one graph
# (docs/performance.md)
MEASURED: dict[str, dict] = {
    "train_vit.py": {("no", False): 8_530, ("default", False): 11_170},
    "train_cnn_b.py": {("no", False): 57_834, ("no", True): 62_582, ("default", False): 49_382},
    "train_cnn_a.py": {("no", False): 161_047, ("no", True): 451_097},
}


@pytest.mark.parametrize("script", [full("train_vit.py"), full("train_cnn_b.py"), "train_cnn_a.py"])
def test_planned_times_are_those_of_an_h200(script):
    trace = traced("single_gpu", 1, script=[script], sizes=(512,), mixed="bf16")
    for execution, images_per_s in MEASURED[script].items():
        planned_s, _ = step_time(trace, ALONE, Execution.of(*execution))
        assert planned_s == pytest.approx(512 / images_per_s, rel=0.2), execution


@pytest.mark.parametrize(
    ("flags", "strategy", "expected"),
    [
        (["--no_step_graph"], "single", EAGER),
        (["--step_graph"], "single", GRAPH),
        (["--compile=default"], "single", Execution.of("default", True)),
        (["--compile=max-autotune"], "single", Execution.of("max-autotune", False)),
        (["--mixed_precision=fp16"], "single", EAGER),
        ([], "ddp", GRAPH),
        (["--optimizer=sgd"], "ddp", GRAPH),
        (["--grad_compression=bf16"], "ddp", EAGER),
        ([], "fsdp", GRAPH),
        (["--optimizer=sgd"], "fsdp", EAGER),
        ([], "hybrid", EAGER),
        ([], "zero2", EAGER),
    ],
)
def test_a_graph_is_planned_where_a_step_supports_it(flags, strategy, expected):
    assert Planning([*SMALL, *flags], HOSTS).execution(strategy) == expected


# Measured images/s with one DDP process on an H200 over NCCL at batch 512, without a graph
# (docs/performance.md)
DDP = {"train_cnn_b.py": 60_131, "train_cnn_a.py": 182_850}


@pytest.mark.parametrize("script", [full("train_cnn_b.py"), "train_cnn_a.py"])
def test_planned_times_are_those_of_ddp_on_an_h200(script):
    trace = traced("ddp_2gpu", 1, script=[script], sizes=(512,), mixed="bf16")
    planned_s, _ = step_time(trace, ALONE, EAGER)
    assert planned_s == pytest.approx(512 / DDP[script], rel=0.25)


def test_hybrid_sharding_gathers_inside_a_host():
    collectives = [("all_gather", 800, 2), ("reduce_scatter", 800, 2), ("all_reduce", 400, 2)]
    link, network = sent_bytes(new_trace(strategy="fsdp", collectives=collectives), Cluster(2, 2, H200, 1))
    assert (link, network) == (800, 800)


def test_compressed_gradients_are_half_of_the_bytes():
    whole = [("all_reduce", 800, 2)]
    assert compress_traffic(new_trace(strategy="ddp", collectives=whole), "bf16").collectives == [
        ("all_reduce", 400, 2)
    ]
    assert compress_traffic(new_trace(strategy="ddp", collectives=whole), "no").collectives == whole
    # Strategies other than DDP refuse compression.
    assert possible_strategies(2, 1, "bf16") == ["single", "ddp"]


def test_a_line_lists_memory_parts_and_the_limit():
    peaks = {32: {"Total": 16, "Activation": 3, "Buffer": 2, "Gradient": 0}}
    work = {"operations": [("float32", 0, 10**10)], "collectives": [("all_reduce", 10**8, 2)]}
    trace = new_trace(peak_bytes=peaks, parameter_bytes=4, gradient_bytes=4, **work)
    line = Planning(SMALL, HOSTS).plan_line("ddp", trace, 32, 1000)
    assert line.limit == cost.NETWORK
    parts = ("parameters", "activations", "buffers", "gradients", "buckets_temporaries")
    assert [line.memory[name] for name in parts] == [4, 3, 2, 4, 3]
