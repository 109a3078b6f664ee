"""Plan the throughput of three models under DDP on 1 to 8 GPUs, with and without CUDA graphs.

    python -m benchmarks.plan_scaling
    python -m benchmarks.plan_scaling --scripts train_cnn_a.py --gpu "NVIDIA A100-SXM4-40GB"

All throughputs are estimates by plan.py, not measurements. The batch size is 512 images in total, or 512
images per GPU. docs/performance.md contains the results.
"""

import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace

from onecurve.system.cli import command_parser
from tools.plan.planning import Candidate, Planning, cluster_of

BATCH = 512
SCRIPTS = ("train_cnn_a.py", "train_cnn_b.py", "train_vit.py")
ON_ONE_HOST = (1, 2, 4, 8)
NETWORKS_GB_S = {"25 Gb/s": 3.125, "100 Gb/s": 12.5}
HEAD = ["script", "batch size", "CUDA graph", *map(str, ON_ONE_HOST)]
HEAD += [f"2 hosts x 4 GPUs, {name}" for name in NETWORKS_GB_S]


def main() -> int:
    parser = command_parser(__doc__, "python -m benchmarks.plan_scaling [flags]")
    add, scripts = parser.add_argument, ",".join(SCRIPTS)
    add("--scripts", default=scripts, metavar="PATH,...", help="train scripts to plan (default: %(default)s)")
    add("--gpu", default="NVIDIA H200", metavar="NAME", help="GPU in devices.yaml (default: %(default)s)")
    flags = parser.parse_args()
    print(line(HEAD), line(["---"] * len(HEAD)), sep="\n", flush=True)
    for script, is_total in itertools.product(flags.scripts.split(","), (True, False)):
        speeds_of = list(speeds(script, is_total, flags.gpu))
        for name, by_gpus in zip(("no", "yes"), zip(*speeds_of, strict=True), strict=True):
            batch = f"{BATCH} {'in total' if is_total else 'per GPU'}"
            print(line([f"`{script}`", batch, name, *(f"{speed:,.0f}" for speed in by_gpus)]), flush=True)
    return 0


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def speeds(script: str, is_total: bool, gpu: str) -> Iterator[tuple[float, float]]:
    """Yield images/s without and with a CUDA graph, for each number of GPUs in HEAD."""
    for gpus in ON_ONE_HOST:
        plan = planning(script, BATCH if is_total else BATCH * gpus, 1, gpus, gpu)
        candidate = plan.trace_strategy("ddp" if gpus > 1 else "single")
        yield speed(plan, candidate)
    hosts = cluster_of(2, 4, gpu, None)  # a trace of 8 GPUs on one host is also valid here
    for gb_s in NETWORKS_GB_S.values():
        plan.cluster = replace(hosts, network_gb_s=gb_s)
        yield speed(plan, candidate)


def planning(script: str, batch_size: int, hosts: int, gpus: int, gpu: str) -> Planning:
    words = [script, f"--batch_size={batch_size}"]
    return Planning(words, cluster_of(hosts, gpus, gpu, None))


def speed(plan: Planning, candidate: Candidate) -> tuple[float, float]:
    """Return images/s without and with a CUDA graph."""
    speeds = []
    for graph in (False, None):
        plan.recipe = replace(plan.recipe, step_graph=graph)
        speeds.append(plan.plan_line(*candidate).images_per_s or 0.0)
    return speeds[0], speeds[1]


if __name__ == "__main__":
    sys.exit(main())
