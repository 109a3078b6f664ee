"""Step time as plan.py predicts it, and as two virtual hosts with a slow network train.

    python -m benchmarks.plan_time
    python -m benchmarks.plan_time --arms ddp,fsdp --rates 1gbit --rounds 1
    python -m benchmarks.plan_time --collectives

Two hosts with one process and one core each train ResNet-18 (45 MB of gradients) on 2 images. In each round
every arm is calibrated, as plan.py --measure 2 does, before and after it trains at each rate; so both meet
the same noise. Calibration knows nothing of the network: its rate is tc's. The table has the medians of all
steps. The exit status is 1 where a prediction is more than 20 percent off, or two strategies that differ by
more are in the wrong order.

--collectives measures gloo's collectives alone, beside the time that their bytes need on the network: where
the constants of common/planning/cost.py come from. Needs root, and what cluster/virtual_cluster.py needs. The
tables stand in docs/performance.md.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from itertools import combinations, product
from pathlib import Path

from cluster import virtual_cluster as cluster
from common.planning.calibrate import calibrate, measured_step
from common.planning.cost import TCP_SHARE, Cluster, measured_step_time
from common.planning.result import Measured
from common.planning.strategies import compressed, config_file, shards, traced
from common.system.paths import ROOT

ARMS = {"ddp": ("ddp", "no"), "ddp bf16": ("ddp", "bf16"), "fsdp": ("fsdp", "no"), "zero2": ("zero2", "no")}
RATES = {"1gbit": 0.125, "500mbit": 0.0625, "200mbit": 0.025}  # tc's name: 10^9 bytes a second
BOUND_PCT = 20
SHARE = 2  # images of a process
SCRIPT = ["train_cnn_b.py", f"--batch_size={2 * SHARE}", "--mixed_precision=no", "--data=digits"]
TRAINING = ["--log_every=1", "--max_val_images=4", "--trackers=none", "--telemetry_s=0"]
WARM_UP, SPARE = 3, 3  # steps that do not count, at each rate and at the end
LATE_S = 0.05  # how much later one of two ranks comes to a collective


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--rates", default=",".join(RATES))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5, help="of each arm at each rate in a round")
    parser.add_argument("--collectives", action="store_true", help="only these, at the rates")
    flags = parser.parse_args()
    arms, rates = flags.arms.split(","), flags.rates.split(",")
    cluster.up(2, 1)
    try:
        if flags.collectives:
            return measure_collectives(rates)
        return compare(arms, rates, flags.rounds, flags.steps)
    finally:
        cluster.down()


def compare(arms: list[str], rates: list[str], rounds: int, steps: int) -> int:
    traces = {
        strategy: traced(strategy, 2, 1, [SHARE], 0, SCRIPT) for strategy in {ARMS[arm][0] for arm in arms}
    }
    predicted: dict[tuple[str, str], list[float]] = defaultdict(list)
    measured: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(rounds):
        calibration = calibrate(2)
        assert calibration.collectives
        for arm in arms:
            strategy, compression = ARMS[arm]
            before = measured_step(config_file(strategy), SHARE, SCRIPT, compression, 2)
            trained = train(strategy, compression, rates, steps)
            after = measured_step(config_file(strategy), SHARE, SCRIPT, compression, 2)
            print(f"# {arm}: {_words(before)}; {_words(after)}", flush=True)
            trace, among = compressed(traces[strategy], compression), shards(strategy, 2, 1)
            for rate, found in product(rates, (before, after)):
                hosts = Cluster(2, 1, calibration.device, RATES[rate])
                step = measured_step_time(trace, hosts, found, calibration.collectives, among)
                predicted[arm, rate].append(step.seconds)
            for rate, seconds in trained.items():
                measured[arm, rate] += seconds
    print("| network | strategy | predicted | measured | difference |\n|---|---|---|---|---|")
    worst, right = 0.0, True
    for rate in rates:
        medians = [statistics.median(found[arm, rate]) for found in (predicted, measured) for arm in arms]
        lines = list(zip(arms, medians[: len(arms)], medians[len(arms) :], strict=True))
        for arm, expected, seen in lines:
            difference = 100 * (expected / seen - 1)
            worst = max(worst, abs(difference))
            print(f"| {rate} | {arm} | {expected:.3f} s | {seen:.3f} s | {difference:+.1f} % |", flush=True)
        right &= is_order_right(lines)
    print(f"\nat most {worst:.1f} percent off; the order is {'right' if right else 'WRONG'}")
    return int(worst > BOUND_PCT or not right)


def is_order_right(lines: list[tuple[str, float, float]]) -> bool:
    """False where two strategies that measurably differ are predicted the other way round."""
    for (_, expected, seen), (_, others, others_seen) in combinations(lines, 2):
        differs = abs(seen / others_seen - 1) > BOUND_PCT / 100
        if differs and (expected < others) != (seen < others_seen):
            return False
    return True


def _words(found: Measured) -> str:
    times = [f"{getattr(found, name + '_s') * 1e3:.0f}" for name in ("forward", "backward", "optimizer")]
    return f"forward {times[0]}, backward {times[1]}, optimizer {times[2]} ms"


def train(strategy: str, compression: str, rates: list[str], steps: int) -> dict[str, list[float]]:
    """Seconds of the steps of one training, whose network changes from rate to rate."""
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        at_each = WARM_UP + steps
        words = [sys.executable, "launch.py", "--hostfile", "/etc/hostfile", "--config_file"]
        words += [config_file(strategy), *SCRIPT, *TRAINING, f"--grad_compression={compression}"]
        words += [f"--max_steps={len(rates) * at_each + SPARE}", f"--output_dir={folder}"]
        command = cluster.inside("node1", words, ROOT)
        with tempfile.TemporaryFile("w+") as output:
            training = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True)
            try:
                for rate in rates:
                    begin = len(_steps(folder))
                    for host in cluster.names():
                        cluster.shape(host, rate)
                    while len(_steps(folder)) < begin + at_each:
                        if training.poll() is not None:
                            output.seek(0)
                            raise RuntimeError(f"{strategy}: {output.read()[-3000:]}")
                        time.sleep(0.02)
                    found[rate] = _steps(folder)[begin + WARM_UP : begin + at_each]
            finally:
                for host in cluster.names():
                    cluster.shape(host)
                training.wait()
    return found


def _steps(folder: Path) -> list[float]:
    """Seconds of each step so far."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    return [2 * SHARE / line["train/images_per_s"] for line in whole if "train/loss" in line]


def measure_collectives(rates: list[str]) -> int:
    """Prints gloo's collectives on the hosts, as a multiple of the time that their bytes need."""
    print("| network | collective | MiB | sent, MiB | these alone | measured | times |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for rate in rates:
        for host in cluster.names():
            cluster.shape(host, rate)
        words = [sys.executable, "-m", "benchmarks.plan_time", "--rank"]
        others = subprocess.Popen(cluster.inside("node2", [*words, "1"], ROOT), stderr=subprocess.DEVNULL)
        done = subprocess.run(
            cluster.inside("node1", [*words, "0"], ROOT), capture_output=True, text=True, check=True
        )
        others.wait()
        for kind, size, seconds, sent in json.loads(done.stdout.splitlines()[-1]):
            alone_s = sent / TCP_SHARE / (RATES[rate] * 1e9)
            shown = f"{size / 2**20:.0f} | {sent / 2**20:.2f} | {alone_s:.3f} s | {seconds:.3f} s"
            print(f"| {rate} | {kind} | {shown} | {seconds / alone_s:.2f} |", flush=True)
    return 0


def _sent() -> int:
    """Bytes that this host has sent, without frames' headers but those of long segments."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "eth0:" in line)
    return int(line.split()[9])


def time_collectives(rank: int) -> None:
    """One of two processes: the medians of collectives at which the other one arrives later."""
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    import torch
    import torch.distributed as dist

    from common.planning.collectives import call

    dist.init_process_group("gloo", init_method="tcp://10.77.0.1:29511", rank=rank, world_size=2)
    found = []
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        for size in (2**20, 8 * 2**20, 24 * 2**20):
            exchange = call(kind, size // 4)
            exchange()
            seconds, before = [], _sent()
            for number in range(6):
                dist.barrier()
                if rank == number % 2:
                    time.sleep(LATE_S)
                began = time.perf_counter()
                exchange()
                # Of the later one: the other also waits for it.
                mine = torch.tensor([time.perf_counter() - began - (LATE_S if rank != number % 2 else 0)])
                dist.all_reduce(mine, op=dist.ReduceOp.MAX)
                seconds.append(mine.item())
            found.append((kind, size, statistics.median(seconds), (_sent() - before) / len(seconds)))
    if rank == 0:
        print(json.dumps(found), flush=True)
    os._exit(0)  # gloo's threads sometimes abort in their destructors


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        time_collectives(int(sys.argv[2]))
    sys.exit(main())
