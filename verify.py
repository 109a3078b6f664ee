"""Replay steps of a finished run. Compare the recipe, the data, the log, the result and the checkpoints.

    python verify.py runs/train_cnn_a/single_128_10_1_1
    python verify.py runs/train_cnn_b/fsdp_128_15_1_4 --config_file accelerate_configs/ddp_2gpu.yaml
    python verify.py runs/train_cnn_b/fsdp_128_15_1_4 --sample 5 --steps 100

A replay starts at the beginning of the run or at a kept checkpoint. A replay ends at the first log line after
at least --steps steps. Train with --keep_every to keep more checkpoints. The replay trains with the run's
recipe in a temporary folder on this machine, under any strategy and with any number of processes. --sample
replays only a random selection of the intervals. The last and the best checkpoint are always evaluated again.
If a resumed start changed the recipe, each part of the run is replayed with its own recipe, and the change is
listed.

A run with --deterministic is verified bitwise under DDP, under FSDP or with one process. The replay may use
any number of processes, but must use the same device, packages and compilation as the run. The run and the
replay must log identical values for the replayed steps, and save identical tensors in these steps'
checkpoints.

In all other cases, rounding differs between the run and the replay, and training amplifies the difference.
The command then evaluates the kept weights in the run's precision. The accuracy must match the reported
accuracy, with a tolerance of a few images, because repeated evaluations can differ. The differences in the
replayed steps are printed without a verdict.

The command prints how much of the run was replayed, how the run was verified, and what was not verified, for
example other steps, devices, times and throughput. The outcome is appended to `verified.json` in the run
folder. The run's page shows the outcome. The exit status is 1 if anything differs.
"""

import argparse
import signal
import sys
from pathlib import Path

from onecurve.system.cli import check_positive, command_parser, config_file, run_command
from tools.verify import replay
from tools.verify.verification import Verification


def main() -> int:
    run = Verification(parse_flags(sys.argv[1:]))
    contradictions = replay.contradictions(run.record, run.checkpoint_steps)
    for finding in contradictions:
        print(finding, flush=True)
    outcomes = []
    for interval in run.intervals:
        print(f"replaying {interval} of {run.last_step:,}", flush=True)
        outcomes.append(run.replay(interval))
        print(run.describe_outcome(outcomes[-1]), flush=True)
    return run.print_verdict(contradictions, outcomes)


def parse_flags(argv: list[str]) -> argparse.Namespace:
    parser = command_parser(__doc__, "verify.py RUN [flags]")
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="Folder of a finished run.")
    script_help = "Script that trained the run. --script is required only for a script outside this project."
    add("--script", type=Path, metavar="FILE", help=script_help)
    config_help = "Accelerate config file for the replay, for example ddp_2gpu.yaml. Default: one process."
    add("--config_file", type=config_file, metavar="FILE", help=config_help)
    add("--steps", type=int, default=20, metavar="N", help="Minimum number of steps per replay. Default: 20.")
    add(
        "--sample",
        type=int,
        metavar="N",
        help="Number of intervals to replay, chosen at random. Default: all intervals.",
    )
    add(
        "--seed",
        type=int,
        metavar="N",
        help="Seed for the random choice of --sample. Default: a new seed, which is printed.",
    )
    add("--data", metavar="PATH", help="Path of the run's data. Default: the path that the run recorded.")
    size_help = "Number of images per forward pass on one device. Default: the run's setting."
    add("--per_device_batch_size", type=int, metavar="N", help=size_help)
    cache_help = "Folder for the cache of decoded images. Default: the train script's default."
    add("--cache_dir", metavar="FOLDER", help=cache_help)
    flags = parser.parse_args(argv)
    check_positive(parser, flags, "steps", "sample", "per_device_batch_size")
    return flags


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(run_command(main))
