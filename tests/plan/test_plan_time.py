"""Predicted step times: the exchange, accumulation, memory."""

import pytest

from tests.conftest import full
from tests.plan.test_plan import ALONE, EAGER, H200, SMALL, made, traced
from tools.plan import cost
from tools.plan.cost import Cluster, Execution, Trace, exchanged, step_time, traffic
from tools.plan.planning import Candidate, Planning, compressed, possible

HOSTS = Cluster(2, 1, H200, 0.1)  # 10^8 bytes a second
GATHER, SCATTER = ("all_gather", 10**8, 2), ("reduce_scatter", 10**8, 2)


@pytest.mark.parametrize(
    ("strategy", "counts"), [("ddp", (1, 1)), ("zero1", (1, 1)), ("zero2", (1, 3)), ("fsdp", (3, 1))]
)
def test_what_is_exchanged_once_however_often_is_accumulated(strategy, counts):
    kinds = [kind for kind, *_ in exchanged(made(strategy=strategy, collectives=[GATHER, SCATTER]), 3)]
    assert (kinds.count("all_gather"), kinds.count("reduce_scatter")) == counts
    once = made(strategy="ddp", operations=[("float32", 0, 10**12)])
    alone = step_time(once, HOSTS, EAGER).seconds
    assert step_time(once, HOSTS, EAGER, accumulations=3).seconds == pytest.approx(3 * alone)


MODELS = {"vit": ["train_vit.py"], "resnet": ["train_cnn_b.py"], "cnn_a": ["train_cnn_a.py"]}


@pytest.fixture(scope="module")
def large(request) -> Trace:
    """The trace of a batch of 512 images on one device, in bf16."""
    return traced("single_gpu", 1, script=MODELS[request.param], sizes=(512,), mixed="bf16")


@pytest.mark.parametrize(
    ("large", "compilation", "is_graph", "images_per_s"),
    [
        full("vit", "no", False, 8_530),
        full("vit", "default", False, 11_170),
        full("resnet", "no", False, 57_834),
        full("resnet", "no", True, 62_582),
        full("resnet", "default", False, 49_382),  # compiled block by block
        ("cnn_a", "no", False, 161_047),
        ("cnn_a", "no", True, 451_097),
    ],
    indirect=["large"],
)
def test_planned_times_are_those_of_an_h200(large, compilation, is_graph, images_per_s):
    """Measured there on 2026-11-26: docs/performance.md."""
    planned = step_time(large, ALONE, Execution.of(compilation, is_graph))
    assert planned.seconds == pytest.approx(512 / images_per_s, rel=0.2)


@pytest.mark.parametrize(
    ("flags", "processes", "accumulations", "expected"),
    [
        (["--no_step_graph"], 1, 1, Execution.of("no", False)),
        (["--step_graph"], 1, 1, Execution.of("no", True)),
        (["--step_graph", "--compile=default"], 1, 1, Execution.of("default", True)),
        (["--step_graph", "--compile=max-autotune"], 1, 1, Execution.of("max-autotune", False)),
        (["--step_graph", "--mixed_precision=fp16"], 1, 1, EAGER),
        (["--step_graph"], 2, 1, EAGER),
        (["--step_graph"], 1, 2, EAGER),
    ],
)
def test_a_graph_is_planned_where_a_step_can_be_one(flags, processes, accumulations, expected):
    assert Planning([*SMALL, *flags], HOSTS).execution(processes, accumulations) == expected


def test_hybrid_sharding_gathers_inside_of_a_host_also_on_as_many_hosts():
    collectives = [("all_gather", 800, 2), ("reduce_scatter", 800, 2), ("all_reduce", 400, 2)]
    link, network = traffic(made(strategy="fsdp", collectives=collectives), Cluster(2, 2, H200, 1))
    assert (link, network) == (800, 800)


def test_compressed_gradients_are_half_of_the_bytes():
    whole = [("all_reduce", 800, 2)]
    assert compressed(made(strategy="ddp", collectives=whole), "bf16").collectives == [("all_reduce", 400, 2)]
    assert compressed(made(strategy="ddp", collectives=whole), "no").collectives == whole
    assert possible(2, 1, "bf16") == ["single", "ddp"]  # the others refuse it


def test_the_parts_of_the_memory_and_what_limits():
    peaks = {32: {"Total": 16, "Activation": 3, "Buffer": 2, "Gradient": 0}}
    work = {"operations": [("float32", 0, 10**10)], "collectives": [("all_reduce", 10**8, 2)]}
    trace = made(peaks=peaks, parameters=4, gradients=4, **work)
    line = Planning(SMALL, HOSTS).line(Candidate("ddp", trace, 32, 1000))
    assert line.limit == cost.NETWORK
    parts = ("parameters", "activations", "buffers", "gradients", "buckets_temporaries")
    assert [line.memory[name] for name in parts] == [4, 3, 2, 4, 3]
