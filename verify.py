"""Replays steps of a finished run, and checks its log, result, recipe, data and checkpoints against them.

    python verify.py runs/train_cnn_a/single_128_10_1_1
    python verify.py runs/train_cnn_b/fsdp_128_15_1_4 --config_file accelerate_configs/ddp_2gpu.yaml
    python verify.py runs/train_cnn_b/fsdp_128_15_1_4 --sample 5 --steps 100

A replay begins where the run began, or at a checkpoint that it has kept (--keep_every keeps more), and ends
with the first line of the log after --steps steps. It is a training with the run's recipe in a temporary
folder on this machine, under any strategy and number of processes. --sample replays only some intervals,
chosen at random. The last and the best checkpoint are always evaluated again. If a later start changed the
recipe, each part of the run is replayed with its own recipe, and the change is listed.

A run with --deterministic under DDP, FSDP or on one process is verified bit for bit, on any number of
processes, where device, packages and compilation are the run's: all values in the log's lines of the replayed
steps, and all tensors of the checkpoints kept in them, must equal the run's.

Elsewhere rounding differs, and training amplifies it. There the headline must be what the kept weights give
in an evaluation in the run's own precision, up to the few images that a repeated evaluation changes. The
differences of the replayed steps are printed, without a verdict.

It prints how much of the run was replayed, which of the two it was, and what is not verified: other steps,
devices, times, speeds. The outcome is added to `verified.json` in the run's folder, which the run's page
shows. Exit status 1 if anything differs.
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
    found = replay.contradictions(run.record, run.kept)
    for finding in found:
        print(finding, flush=True)
    outcomes = []
    for interval in run.intervals:
        print(f"{interval} of {run.last:,}: replaying", flush=True)
        outcomes.append(run.replay(interval))
        print(run.said(outcomes[-1]), flush=True)
    return run.conclude(found, outcomes)


def parse_flags(argv: list[str]) -> argparse.Namespace:
    parser = command_parser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a finished run")
    parser.add_argument("--script", type=Path, help="the run's train script, if it is not the project's")
    parser.add_argument(
        "--config_file", type=config_file, help="one of accelerate_configs/; unset: one process"
    )
    parser.add_argument("--steps", type=int, default=20, help="minimum length of a replay (default: 20)")
    parser.add_argument("--sample", type=int, help="replay this many intervals, at random; unset: all")
    parser.add_argument("--seed", type=int, help="seed of that choice; unset: a new one, which is printed")
    parser.add_argument("--data", help="where the run's data is now; unset: where it was")
    parser.add_argument("--per_device_batch_size", type=int, help="unset: the run's")
    parser.add_argument("--cache_dir", help="as the train scripts'")
    flags = parser.parse_args(argv)
    check_positive(parser, flags, "steps", "sample", "per_device_batch_size")
    return flags


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(run_command(main))
