"""Replay steps of a finished run and compare its log, result, recipe, data and checkpoints with the replay.

    python verify.py runs/train_cnn_a/single_128_10_1_1
    python verify.py runs/train_cnn_b/fsdp_128_15_1_4 --config_file accelerate_configs/ddp_2gpu.yaml
    python verify.py runs/train_cnn_b/fsdp_128_15_1_4 --sample 5 --steps 100

A replay starts at the beginning of the run or at a kept checkpoint, and ends at the first log line after
--steps steps. Training with --keep_every keeps more checkpoints. The replay trains with the run's recipe in a
temporary folder on this machine, under any strategy and number of processes. --sample replays only some
intervals, chosen at random. The last and the best checkpoint are always evaluated again. If a resumed start
changed the recipe, each part of the run is replayed with the recipe that this part used, and the change is
listed.

A run with --deterministic under DDP, FSDP or on one process is verified bit for bit, on any number of
processes, if the replay uses the same device, packages and compilation as the run. All values logged for the
replayed steps, and all tensors of the checkpoints in these steps, must equal the run's.

Otherwise rounding differs, and training amplifies the difference. In this case the kept weights are evaluated
in the run's precision and must reach the reported accuracy, with a tolerance of a few images because repeated
evaluations can differ. The differences of the replayed steps are printed without a verdict.

The command prints how much of the run was replayed, how it was verified, and what was not verified, for
example other steps, devices, times and throughput. The outcome is appended to `verified.json` in the run's
folder and shown on the run's page. The exit status is 1 if anything differs.
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
    contradictions = replay.contradictions(run.record, run.kept)
    for finding in contradictions:
        print(finding, flush=True)
    outcomes = []
    for interval in run.intervals:
        print(f"{interval} of {run.last:,}: replaying", flush=True)
        outcomes.append(run.replay(interval))
        print(run.describe(outcomes[-1]), flush=True)
    return run.conclude(contradictions, outcomes)


def parse_flags(argv: list[str]) -> argparse.Namespace:
    parser = command_parser(__doc__, "verify.py RUN [flags]")
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="Folder of a finished run.")
    script_help = "Script that trained the run, if the script is not in this project."
    add("--script", type=Path, metavar="FILE", help=script_help)
    config_help = "Accelerate config of the replay, for example ddp_2gpu.yaml. Default: one process."
    add("--config_file", type=config_file, metavar="FILE", help=config_help)
    add("--steps", type=int, default=20, metavar="N", help="Minimum number of steps per replay. Default: 20.")
    add("--sample", type=int, metavar="N", help="Replay N intervals, chosen at random. Default: all.")
    add("--seed", type=int, metavar="N", help="Seed for --sample. Default: a new seed, which is printed.")
    add("--data", metavar="PATH", help="Current location of the run's data. Default: the recorded path.")
    size_help = "Images per forward pass on one device. Default: the run's value."
    add("--per_device_batch_size", type=int, metavar="N", help=size_help)
    cache_help = "Folder for decoded images. Default: the train scripts' default."
    add("--cache_dir", metavar="FOLDER", help=cache_help)
    flags = parser.parse_args(argv)
    check_positive(parser, flags, "steps", "sample", "per_device_batch_size")
    return flags


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(run_command(main))
