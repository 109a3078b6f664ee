"""Check the project's GPU claims on this machine in ten minutes, and write a table of results.

    python -m benchmarks.gpu_suite --out gpu --data /data/cifar10
    python -m benchmarks.gpu_suite --out gpu --only strategies,throughput
    python -m benchmarks.gpu_suite --out gpu --only thorough --budget_s 1200
    python -m benchmarks.gpu_suite --out gpu --dry_run

The sections in benchmarks/gpu/ run one after another until a deadline, starting with the most informative
section. Each section may use a share of --budget_s in proportion to its weight. Time that one section does
not use is available to later sections. The suite begins with a smoke test and ends if this test fails. All
variants of a case run in one process, and each case uses a separate process. Checks that do not measure time
run in parallel if cores and memory permit. The `thorough` section repeats checks that have passed before, and
runs only with --only.

After each row, the suite rewrites table.md and rows.json in the --out folder. failures.log contains the
complete output of each failed row. A failed row does not end the other rows. --dry_run runs small versions of
all rows on the CPU, except rows that would only repeat another row on a CPU.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.gpu import checks, device, parallel, speed
from benchmarks.gpu.rows import FAIL, SKIPPED, Setting, run_rows
from onecurve.system.cli import command_parser, run_command
from onecurve.system.files import write_text
from onecurve.system.processes import adopt_orphans, kill, running_descendants
from tools.logbook import markdown

# Function that returns a section's rows, and the section's weight in the time budget. The sections are sorted
# by information gained per unit of time. Weights are seconds measured on one H200, except for estimates for
# ceilings, attention, scripts, strategies, determinism, snapshots, memory and inputs.
SECTIONS = {
    "smoke": (checks.smoke, 34),
    "ceilings": (partial(device.rows_of, "ceilings"), 10),
    "attention": (partial(device.rows_of, "attention"), 12),
    "throughput": (speed.rows, 184),
    "recipes": (speed.recipes, 75),
    "scripts": (checks.scripts, 40),
    "strategies": (parallel.strategies, 72),
    "determinism": (lambda: parallel.same_bits() | checks.determinism(), 55),
    "snapshots": (partial(device.rows_of, "snapshots"), 20),
    "memory": (checks.memory, 30),
    "inputs": (speed.inputs, 28),
    "scaling": (parallel.scaling, 20),
    "several": (parallel.several, 60),
    "thorough": (lambda: speed.thorough() | checks.thorough() | device.thorough(), 600),
}
SEVERAL_GPUS = ("scaling", "several")
AT_ONCE = ("scripts", "strategies", "determinism", "several")  # sections that do not measure time
BUDGET_S = 560
COMMAND_S = 150  # timeout of a command in seconds with the default budget
DRY_RUN_S = 900  # timeout of a section in seconds on a CPU
CHECK_CORES, CHECK_GIB = 2, 16  # number of CPU cores and GiB of GPU memory for each parallel check


def main() -> int:
    flags = parse(sys.argv[1:])
    if flags.dry_run:  # with several threads, a single process would round differently from several processes
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    elif not torch.cuda.is_available():
        raise ValueError("torch can't use a GPU on this machine. Pass --dry_run to run rows on the CPU.")
    flags.out.mkdir(parents=True, exist_ok=True)
    (flags.out / "failures.log").unlink(missing_ok=True)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    if flags.scratch:
        flags.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu_suite_", dir=flags.scratch) as scratch:
        suite = Suite(flags, Path(scratch))
        try:
            suite.run()
        except KeyboardInterrupt:
            suite.write("The suite was interrupted.")
            print(f"The suite was interrupted. Completed rows are in {flags.out / 'table.md'}.", flush=True)
            return 130
    print(f"{flags.out / 'table.md'} contains {len(suite.rows)} rows. Failed rows: {suite.failed}.")
    return int(suite.failed > 0)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command_parser(__doc__, "python -m benchmarks.gpu_suite --out FOLDER [flags]")
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FOLDER", help="folder for table.md and rows.json")
    add(
        "--scratch",
        type=Path,
        metavar="FOLDER",
        help="parent of a temporary folder for runs (default: the system's temporary folder)",
    )
    add(
        "--budget_s",
        type=float,
        default=BUDGET_S,
        metavar="SECONDS",
        help="seconds for all sections together (default: 560)",
    )
    add("--only", default="", metavar="NAME,...", help=f"sections to run, chosen from {', '.join(SECTIONS)}")
    add("--gpus", type=int, metavar="N", help="number of GPUs to use (default: all)")
    add(
        "--data",
        default="synthetic",
        metavar="DATA",
        help="data set of 32-pixel images, such as CIFAR-10 (default: synthetic)",
    )
    add("--dry_run", action="store_true", help="run small versions of the rows on the CPU")
    flags = parser.parse_args(argv)
    flags.only = [name for name in flags.only.split(",") if name]
    if unknown := [name for name in flags.only if name not in SECTIONS]:
        raise ValueError(f"--only {unknown[0]}: choose among {', '.join(SECTIONS)}")
    if not flags.dry_run and flags.gpus is None:
        flags.gpus = torch.cuda.device_count()
    return flags


class Suite:
    """Runner that executes the sections and writes the table of all rows."""

    def __init__(self, flags: argparse.Namespace, scratch: Path):
        self.flags, self.scratch = flags, scratch
        self.rows: list[dict[str, Any]] = []

    @property
    def failed(self) -> int:
        return sum(row["verdict"] == FAIL for row in self.rows)

    def run(self) -> None:
        adopt_orphans()
        names, ends_at = self.flags.only or self.usual(), time.time() + self.flags.budget_s
        for i, name in enumerate(names):
            share = SECTIONS[name][1] / sum(SECTIONS[other][1] for other in names[i:])
            limit_s = DRY_RUN_S if self.flags.dry_run else share * (ends_at - time.time())
            limit_s = max(limit_s, COMMAND_S) if name == "smoke" else limit_s  # a cold disk slows imports
            if limit_s < 5:
                self.add(name, {"row": "", "verdict": SKIPPED, "note": "section did not fit into --budget_s"})
            else:
                self.section(name, limit_s)
            if name == "smoke" and self.failed:
                print((self.flags.out / "failures.log").read_text(), flush=True)
                self.write("The smoke test failed.")
                return

    def usual(self) -> list[str]:
        """Return the names of the sections that run by default, without --only."""
        absent = {"thorough", *(SEVERAL_GPUS if not self.flags.dry_run and self.flags.gpus < 2 else ())}
        return [name for name in SECTIONS if name not in absent]

    def section(self, name: str, limit_s: float) -> None:
        flags, folder = self.flags, (self.scratch / name).absolute()
        folder.mkdir()
        command_s = DRY_RUN_S if flags.dry_run else COMMAND_S * max(1.0, flags.budget_s / BUDGET_S)
        ends_at, failures = time.time() + limit_s, flags.out.absolute() / "failures.log"
        setting = Setting(folder, flags.data, flags.gpus or 0, flags.dry_run, ends_at, command_s, failures)
        at_once = checks_at_once(flags.dry_run) if name in AT_ONCE else 1
        try:
            with contextlib.closing(run_rows(SECTIONS[name][0](), setting, at_once)) as rows:
                for row in rows:
                    self.add(name, row)
        finally:
            while remaining := running_descendants():
                kill(remaining)
                psutil.wait_procs(remaining, timeout=1)
            shutil.rmtree(folder, ignore_errors=True)

    def add(self, section: str, row: dict[str, Any]) -> None:
        self.rows.append({"section": section, **row})
        names = ("section", "row", "value", "unit", "verdict", "note", "seconds")
        cells = [str(self.rows[-1].get(name, "")) for name in names]
        print(" ".join(filter(None, cells)), flush=True)
        self.write()

    def write(self, remark: str = "") -> None:
        out = self.flags.out
        write_text(out / "rows.json", json.dumps(self.rows, indent=1) + "\n")
        columns = ("section", "row", "value", "unit", "expected", "verdict", "note", "seconds")
        parts = [table(columns, [[row.get(column) for column in columns] for row in self.rows])]
        for row in self.rows:  # list each case's most expensive kernels
            if cells := [(name, f"{ms:.3f}", f"{n:g}") for name, ms, n in row.get("kernels", ())]:
                parts += [row["row"] + ":", table(("kernel", "ms a step", "a step"), cells)]
        write_text(out / "table.md", "\n\n".join([*parts, *([remark] if remark else [])]) + "\n")


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    shown = [["" if v is None else f"{v:,}" if isinstance(v, int) else v for v in row] for row in rows]
    return markdown.markdown_table(shown, columns, numbers=False)


def checks_at_once(dry_run: bool) -> int:
    """Return the maximum number of rows that run in parallel in sections that do not measure time."""
    cores = len(os.sched_getaffinity(0))
    if dry_run:
        return min(2, cores)
    total_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    return max(1, min(cores // CHECK_CORES, int(total_gib // CHECK_GIB)))


if __name__ == "__main__":
    sys.exit(run_command(main))
