"""Predicted step times: the schedule of the exchange, what is measured, limits of the input, charts."""

from dataclasses import replace

import pytest
from torch import nn

from benchmarks.plan_time import is_order_right
from common.planning import calibrate, charts, cost
from common.planning.cost import TCP_SHARE, Cluster, exchanged, measured_step_time, step_time, traffic
from common.planning.inputs import DECODING, S3, Input, input_of
from common.planning.planning import Found, Planning, Prices
from common.planning.result import Costs, Measured
from common.planning.sizes import accelerates_estimate
from common.planning.strategies import compressed, config_file, possible
from tests.data.test_shards import write_shards
from tests.planning.test_plan import H200, SMALL, made, parameter_bytes, plan

HOSTS = Cluster(2, 1, H200, 0.1)  # 10^8 bytes a second
STEP = Measured(1.0, 2.0, 0.5, [(1.5, 10**8), (2.0, 10**8)])
GLOO = dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter"), Costs(0, 0))  # the hosts' work is free
GATHER, SCATTER = ("all_gather", 10**8, 2), ("reduce_scatter", 10**8, 2)


def test_ddp_exchanges_each_bucket_when_it_is_ready():
    ddp = made(strategy="ddp", collectives=[("all_reduce", 2 * 10**8, 2)])
    found = measured_step_time(ddp, HOSTS, STEP, GLOO)
    assert found.seconds == pytest.approx(
        1.5 + 2 / TCP_SHARE + 0.5
    )  # one after the other, then the optimizer
    assert found.limit == cost.NETWORK
    fast = replace(HOSTS, network_gb_s=1e3)
    assert measured_step_time(ddp, fast, STEP, GLOO).seconds == pytest.approx(3.5)
    assert measured_step_time(ddp, fast, STEP, GLOO).limit == cost.COMPUTE


def test_over_gloo_fsdp_waits_for_each_collective():
    fsdp = made(strategy="fsdp", collectives=[GATHER, SCATTER])
    found = measured_step_time(fsdp, HOSTS, STEP, GLOO, shards=2)
    # An all-gather sends half of its bytes, the network idles for half of that; a reduce-scatter sends all.
    assert found.seconds == pytest.approx(3 + 0.5 / 2 + (1.5 * 0.5 + 1) / TCP_SHARE)
    assert found.network_bytes == pytest.approx(1.5e8)


def test_over_nccl_an_exchange_hides_behind_the_backward_pass():
    fsdp = made(strategy="fsdp", collectives=[GATHER] * 5)  # 0.5 s each
    assert measured_step_time(fsdp, HOSTS, STEP, None).seconds == pytest.approx(3.5 + 0.5)


def test_the_hosts_work_counts_where_the_network_is_faster():
    slow = GLOO | {"all_gather": Costs(0, 1e-7)}
    found = measured_step_time(made(strategy="zero2", collectives=[GATHER]), HOSTS, STEP, slow)
    assert (found.seconds, found.limit) == (pytest.approx(3.5 + 10), cost.HOSTS)


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


def test_of_steps_at_once_the_slowest_counts():
    def run(*forward_s: float) -> list:
        return [{"forward_s": s, "backward_s": 0, "optimizer_s": 0, "buckets": [[s, 1]]} for s in forward_s]

    found = calibrate.slowest([run(1, 2, 9), run(3, 1, 1)])
    assert (found.forward_s, found.buckets) == (3, [(3, 1)])


def test_a_step_is_measured_under_the_engine():
    """In bf16 half of the gradients' bytes are exchanged, all of them before the backward pass has ended."""
    found = calibrate.measured_step(config_file("ddp"), 8, [*SMALL, "--mixed_precision=no"], "bf16", 2)
    assert sum(moved for _, moved in found.buckets) == pytest.approx(parameter_bytes() / 2, rel=0.01)
    assert found.forward_s < max(ready_s for ready_s, _ in found.buckets)
    assert max(ready_s for ready_s, _ in found.buckets) < 1.5 * (found.forward_s + found.backward_s)
    assert found.optimizer_s > 0


def test_a_measurement_that_fails_says_why():
    process = calibrate._Process(["common.planning.nothing"], {0})
    with pytest.raises(ValueError, match=r"--measure: .*No module named common\.planning\.nothing"):
        process.await_line("ready")
    process.end()


def test_gloos_collectives_are_measured():
    found = calibrate.measured_collectives()
    assert set(found) == set(GLOO)
    for costs in found.values():
        assert 1e-5 < costs.latency_s < 1
        assert 1e-11 < costs.s_per_byte < 1e-7  # 10 MB/s to 100 GB/s


def test_decoding_and_s3_limit():
    photographs = Input(in_s3=True, image_kb=100, images=None)
    limits = photographs.images_per_s(processes=8, workers=2, hosts=2, s3_gb_s=1)
    assert limits == {DECODING: pytest.approx(16 / 1.08e-3), S3: pytest.approx(2 * 10_000)}
    assert photographs.images_per_s(8, 0, 2, None) == {DECODING: pytest.approx(8 / 1.08e-3)}


def test_only_what_is_decoded_during_the_training_limits(tmp_path):
    assert input_of("digits", None) is None
    assert input_of("s3://bucket/photographs", None) == Input(True, 104, None)
    folder = write_shards(tmp_path / "tiny", (4, 2), (3,))
    local = input_of(str(folder), None)
    assert (local.in_s3, local.images) == (False, 6)
    assert local.image_kb == pytest.approx(
        sum(file.stat().st_size for file in folder.glob("train-*.tar")) / 6e3
    )


def planned(*flags: str, hosts: int = 2, prices: Prices | None = None) -> Planning:
    return Planning([*SMALL, *flags], Cluster(hosts, 1, H200, 0.1), prices)


def ddp_found(share: int = 32) -> Found:
    trace = made(
        peaks={share: {"Total": 16, "Activation": 3, "Buffer": 2, "Gradient": 0}},
        operations=[("float32", 0, 10**10)],
        collectives=[("all_reduce", 10**8, 2)],
        parameters=4,
        gradients=4,
    )
    return Found("ddp", trace, share, 1000)


def test_a_slow_input_is_the_step():
    found = ddp_found()
    line = planned("--data=s3://bucket/photographs", prices=Prices(s3_gb_s=1e-3)).line(found)
    assert line.limit == S3
    assert line.images_per_s == pytest.approx(2 * 1e3 / 104)
    assert planned().line(found).limit == cost.NETWORK
    parts = ("parameters", "activations", "buffers", "gradients", "buckets_temporaries")
    assert [line.memory[name] for name in parts] == [4, 3, 2, 4, 3]


def test_the_pareto_line_has_what_nothing_beats():
    points = [(1.0, 9.0), (2.0, 5.0), (3.0, 6.0), (4.0, 2.0), (4.0, 3.0)]
    assert charts.pareto_line(points) == [(1.0, 9.0), (2.0, 5.0), (4.0, 2.0)]


def test_charts_evaluate_other_numbers_of_hosts():
    plan = planned(prices=Prices(per_hour=2.0))
    points, pareto, unit = charts.costs(plan, [ddp_found()])
    hours, prices = points["ddp"]
    assert unit == "price"
    assert len(hours) == 7  # a batch of 64 divides among 1, 2, 4, ..., 64 hosts
    alone = next(pair for pair in zip(hours, prices, strict=True) if pair[1] == min(prices))
    assert alone[0] == pytest.approx(alone[1])  # one host for half the price of two
    assert set(zip(*pareto, strict=True)) <= set(zip(hours, prices, strict=True))
    strategy, curves = charts.scaling(plan, [ddp_found()])
    slow, middle, fast = curves.values()
    assert strategy == "ddp"
    assert slow[0] == [2.0**n for n in range(11)]
    assert slow[1][0] == 1
    assert slow[1][-1] < middle[1][-1] < fast[1][-1] <= 1


def test_accelerates_estimate():
    found = accelerates_estimate(nn.Sequential(nn.Linear(9, 10), nn.BatchNorm1d(10)))
    state = 4 * (100 + 20 + 20) + 8  # with BatchNorm's statistics, and its counter
    assert (found.model, found.training) == (state, 4 * state)


def test_the_order_of_what_hardly_differs_does_not_count():
    assert is_order_right([("a", 2.0, 1.0), ("b", 1.0, 1.1)])
    assert not is_order_right([("a", 2.0, 1.0), ("b", 1.0, 1.5)])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (SMALL, "give --gpu NAME for a plan by data sheets, or --measure"),
        (["--gpu", "Tesla T4", "--measure", *SMALL], "give --gpu NAME for a plan by data sheets, or"),
        (["--measure", "999", *SMALL], "--measure 999: this machine has"),
        (["--gpu", "Tesla T4", "--s3_gb_s", "0", *SMALL], "--s3_gb_s 0: must be more than 0"),
    ],
)
def test_mistakes(words, said):
    status, output = plan(*words)
    assert status != 0
    assert said in output
    assert "Traceback" not in output


@pytest.mark.full
def test_a_measured_plan_with_charts(tmp_path):
    charts_file = tmp_path / "charts.png"
    status, output = plan("--measure", "--hosts", 2, "--charts", charts_file, *SMALL)
    assert status == 0, output
    assert "link: loopback" in output
    assert "accelerate estimate-memory" in output
    assert charts_file.stat().st_size > 10_000
