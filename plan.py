"""What a training will need on a cluster, without a GPU: memory, batch, traffic, time and price by strategy.

    python plan.py train_vit.py --gpus 4 --gpu "NVIDIA A100-SXM4-40GB"
    python plan.py --hosts 2 --gpus 4 --gpu "NVIDIA H200" --price_per_hour 60 train_vit.py --batch_size 1024
    python plan.py --measure --hosts 2 --network_gb_s 0.125 --charts plan.png train_cnn_b.py

Runs the script's model and optimizer under each strategy as rank 0 of the cluster: Accelerate, DDP, FSDP2
and DeepSpeed themselves, on tensors without contents. Memory is the largest sum of live tensors, by torch's
MemTracker; the bytes sent are those of the collectives that were called. Both are counted, not estimated;
docs/performance.md compares the memory with real trainings on CPU processes.

Time and price are estimates from data sheets (common/telemetry/devices.yaml) by the formulas of
common/planning/cost.py; with --measure from a few steps under each engine on the device at hand, which is
then what the cluster is made of. They leave out compilation, and offload's work on the CPU, and are not yet
measured on a GPU; docs/performance.md compares them with trainings on virtual hosts.
"""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from common.system.cli import check_positive, command_parser, run_command, split_at_script
from common.system.files import write_json

if TYPE_CHECKING:
    from common.planning.planning import Found, Planning


def main() -> int:
    flags = parse(sys.argv[1:])
    plan = planning(flags)
    from common.planning.lines import Line, title

    print(plan.about, plan.links, sep="\n", flush=True)
    print(title(), flush=True)
    found: list[Found] = []
    lines: list[Line] = []
    for one in plan.found():
        found.append(one)
        lines.append(plan.line(one))
        print(lines[-1], flush=True)
    print(plan.accelerates_estimate())
    print(plan.recommendation(lines))
    if flags.output:
        write_json(flags.output, plan.facts | {"lines": [asdict(line) for line in lines]})
        print(flags.output)
    if flags.charts:
        draw(flags.charts, plan, found)
        print(flags.charts)
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command_parser(__doc__, "%(prog)s [flags] SCRIPT [its flags]")
    add = parser.add_argument
    add("--hosts", type=int, default=1, help="default: 1")
    add("--gpus", type=int, default=1, help="of each host (default: 1)")
    add("--gpu", help="a device of common/telemetry/devices.yaml")
    add(
        "--measure",
        nargs="?",
        const=1,
        type=int,
        metavar="PROCESSES",
        help="measure the device at hand instead; on a CPU with so many processes at once, which share its"
        " cores (default: 1)",
    )
    add("--network_gb_s", type=float, default=12.5, help="10^9 bytes a second of a host (default: 12.5)")
    add("--s3_gb_s", type=float, help="10^9 bytes a second of a host, for data in S3 (default: no limit)")
    add("--image_kb", type=float, help="10^3 bytes of an encoded image (default: of the shards, else 104)")
    add("--price_per_hour", type=float, help="of all hosts together, in any currency")
    add("--output", type=Path, help="also write the plan here, as JSON")
    add(
        "--charts", type=Path, metavar="FILE.png", help="draw cost against time, and scaling to 1,024 devices"
    )
    mine, script = split_at_script(argv)
    flags = parser.parse_args(mine)
    flags.script = script
    if not script:
        parser.error("name the script, as train_vit.py, behind these flags")
    if bool(flags.gpu) == (flags.measure is not None):
        parser.error("give --gpu NAME for a plan by data sheets, or --measure for one of the device at hand")
    numbers = ("hosts", "gpus", "measure", "network_gb_s", "s3_gb_s", "image_kb", "price_per_hour")
    check_positive(parser, flags, *numbers)
    return flags


def planning(flags: argparse.Namespace) -> "Planning":
    """The plan that the flags ask for. ValueError for a device that is not in the table."""
    from common.planning.calibrate import calibrate
    from common.planning.cost import Cluster
    from common.planning.planning import Planning, Prices
    from common.telemetry.flops import find_device, known_devices

    calibration = calibrate(flags.measure) if flags.measure else None
    device = calibration.device if calibration else find_device(flags.gpu)
    if not device:
        names = ", ".join(device.name for device in known_devices())
        raise ValueError(f"--gpu {flags.gpu} is not in the table: choose one of {names}")
    cluster = Cluster(flags.hosts, flags.gpus, device, flags.network_gb_s)
    prices = Prices(flags.price_per_hour, flags.s3_gb_s, flags.image_kb)
    return Planning(flags.script, cluster, prices, calibration)


def draw(path: Path, plan: "Planning", found: "list[Found]") -> None:
    """The charts: cost against time, where the number of images is known, and scaling to more devices."""
    from common.planning import charts
    from common.report.plots import Panel, panels

    points, pareto, unit = charts.costs(plan, found)
    strategy, curves = charts.scaling(plan, found)
    costs = Panel("hours to the end", unit, {"Pareto": pareto}, points, is_log=True, is_log_x=True)
    scaling = Panel(f"devices under {strategy}", "efficiency", curves, from_zero=True, is_log_x=True)
    panels(path, [[costs, scaling] if points else [scaling]], plan.about)


if __name__ == "__main__":
    sys.exit(run_command(main))
