"""What a training will need on a cluster, without a GPU: memory, batch, traffic and time by strategy.

    python plan.py train_vit.py --gpus 4 --gpu "NVIDIA A100-SXM4-40GB"
    python plan.py --hosts 2 --gpus 4 --gpu "NVIDIA H200" train_vit.py --batch_size 1024

Runs the script's model and optimizer under each strategy as rank 0 of the cluster: Accelerate, DDP, FSDP2
and DeepSpeed themselves, on tensors without contents. Memory is the largest sum of live tensors, by torch's
MemTracker; the bytes sent are those of the collectives that were called. Both are counted, not estimated.

Time is an estimate from data sheets (onecurve/telemetry/devices.yaml) and from what one H200 reached, by the
formulas of tools/plan/cost.py; docs/performance.md has planned beside measured times. It leaves out what
--compile takes at the start, offload's work on the CPU, and decoding and reading of images.
"""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from onecurve.system.cli import check_positive, command_parser, run_command, split_at_script
from onecurve.system.files import write_json
from onecurve.system.threads import run_with_heartbeat


def main() -> int:
    flags = parse_flags(sys.argv[1:])
    from onecurve.system.progress import Display
    from tools.plan.planning import HEAD, ROW, Line, Planning, cluster_of  # imports torch

    cluster = cluster_of(flags.hosts, flags.gpus, flags.gpu, flags.network_gb_s)
    plan = Planning(flags.script, cluster)
    print(plan.about, plan.links, ROW.format(*HEAD), sep="\n", flush=True)
    lines, doing = list[Line](), [""]
    found = plan.candidates(doing.append)
    out = None if sys.stdout.isatty() else sys.stdout  # a bar replaces sys.stdout
    display = Display(len(plan.strategies), "", out and sys.stderr)

    def tell() -> None:
        if display.is_due():
            display.show(f"{doing[-1]}, {len(lines)} of {len(plan.strategies)} are done", len(lines))

    try:
        while candidate := run_with_heartbeat(lambda: next(found, None), tell):
            lines.append(plan.line(*candidate))
            display.print(str(lines[-1]), out)
    finally:
        display.stop()
    print(plan.recommendation(lines))
    if flags.output:
        write_json(flags.output, plan.facts | {"lines": [asdict(line) for line in lines]})
        print(flags.output)
    return 0


def parse_flags(argv: list[str]) -> argparse.Namespace:
    parser = command_parser(__doc__, "%(prog)s [flags] SCRIPT [its flags]")
    add = parser.add_argument
    add("--hosts", type=int, default=1, help="default: 1")
    add("--gpus", type=int, default=1, help="of each host (default: 1)")
    add("--gpu", required=True, help="a device of onecurve/telemetry/devices.yaml, as H100")
    add("--network_gb_s", type=float, help="10^9 bytes a second of a host (default: the device's, or 12.5)")
    add("--output", type=Path, help="also write the plan here, as JSON")
    mine, script = split_at_script(argv)
    flags = parser.parse_args(mine)
    flags.script = script
    if not script:
        parser.error("name the script, as train_vit.py, behind these flags")
    check_positive(parser, flags, "hosts", "gpus", "network_gb_s")
    return flags


if __name__ == "__main__":
    sys.exit(run_command(main))
