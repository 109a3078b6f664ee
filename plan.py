"""Predict memory, batch size, traffic and time of training under each strategy on a cluster, without a GPU.

    python plan.py --gpu H100 --gpus 4 train_vit.py
    python plan.py --hosts 2 --gpus 4 --gpu "NVIDIA H200" train_vit.py --batch_size 1024

The planner runs the script's model and optimizer under each strategy as rank 0 of the cluster. The planner
calls the real Accelerate, DDP, FSDP2 and DeepSpeed on tensors without contents. The planned memory is the
peak live tensor memory that torch's MemTracker observed. The planned traffic is the number of bytes that
collectives exchanged. Memory and traffic are counted, not estimated.

The planner estimates time with the formulas in tools/plan/cost.py, from data sheets
(onecurve/telemetry/devices.yaml) and from measurements on one H200. docs/performance.md compares planned and
measured times. The estimated time excludes compilation, CPU work for offloading, and reading and decoding
images.
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

    # This import loads torch.
    from tools.plan.planning import TABLE_HEAD, TABLE_ROW, PlanLine, Planning, cluster_of

    cluster = cluster_of(flags.hosts, flags.gpus, flags.gpu, flags.network_gb_s)
    plan = Planning(flags.script, cluster)
    print(plan.summary, plan.link_speeds, TABLE_ROW.format(*TABLE_HEAD), sep="\n", flush=True)
    lines, tasks = list[PlanLine](), [""]
    candidates = plan.candidates(tasks.append)
    out = None if sys.stdout.isatty() else sys.stdout  # because a progress bar replaces sys.stdout
    display = Display(len(plan.strategies), "", out and sys.stderr)

    def show_progress() -> None:
        if display.is_due():
            display.show(f"{tasks[-1]}, {len(lines)} of {len(plan.strategies)} done", len(lines))

    try:
        while candidate := run_with_heartbeat(lambda: next(candidates, None), show_progress):
            lines.append(plan.plan_line(*candidate))
            display.print(str(lines[-1]), out)
    finally:
        display.stop()
    print(plan.recommendation(lines))
    if flags.output:
        write_json(flags.output, plan.json_header | {"lines": [asdict(line) for line in lines]})
        print(flags.output)
    return 0


def parse_flags(argv: list[str]) -> argparse.Namespace:
    """Return the planner's flags, with the script and its flags in the attribute `script`."""
    parser = command_parser(__doc__, "%(prog)s --gpu NAME [flags] SCRIPT [SCRIPT_FLAGS ...]")
    add = parser.add_argument
    add("--hosts", type=int, default=1, metavar="N", help="Number of hosts. Default: 1.")
    add("--gpus", type=int, default=1, metavar="N", help="Number of GPUs per host. Default: 1.")
    gpu_help = "GPU type, for example H100. onecurve/telemetry/devices.yaml lists all types."
    add("--gpu", required=True, metavar="NAME", help=gpu_help)
    network_help = "Network bandwidth per host, in 10^9 bytes/s. Default: the value in devices.yaml, or 12.5."
    add("--network_gb_s", type=float, metavar="RATE", help=network_help)
    add(
        "--output",
        type=Path,
        metavar="FILE",
        help="JSON file for the plan, in addition to the printed table.",
    )
    parser.add_argument_group("script", "SCRIPT is a train script, for example train_vit.py.")
    words, script = split_at_script(argv)
    flags = parser.parse_args(words)
    flags.script = script
    if not script:
        parser.error("the train script is missing. Add a script after the flags, for example train_vit.py.")
    check_positive(parser, flags, "hosts", "gpus", "network_gb_s")
    return flags


if __name__ == "__main__":
    sys.exit(run_command(main))
