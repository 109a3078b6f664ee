"""Proves or disproves, on the GPUs at hand, what this project says of GPUs: a table in ten minutes.

    python -m benchmarks.gpu_suite --out gpu --data /data/cifar10
    python -m benchmarks.gpu_suite --out gpu --only strategies,throughput
    python -m benchmarks.gpu_suite --out gpu --dry_run

The sections of benchmarks/gpu/ run one after the other, the most telling first, each in a process of its own
with a deadline. Its rows() run one after another; its checks(), which measure no time, several at once where
cores and memory allow. table.md and rows.json in --out are written anew after each row. A row that fails does
not end the others; what no longer fits into --budget_s says so. --dry_run does all of it small on the
CPU.
"""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.gpu.rows import FAIL, SKIPPED, Setting, checks_at_once, run_rows
from common.report.markdown import table, text
from common.system.cli import command_parser, run_command
from common.system.files import write_text
from common.system.processes import adopt_orphans, end_with_parent, kill, running_descendants

# Section -> seconds it may take, in order of what it tells for its time.
SECTIONS = {
    "ceilings": 30,
    "scripts": 150,
    "waits": 60,
    "snapshots": 60,
    "strategies": 150,
    "determinism": 120,
    "memory": 120,
    "throughput": 200,
    "accuracy": 180,
    "inputs": 60,
    "several": 240,
}
BUDGET_S = 560  # with more, each section may take longer in proportion
COMMAND_S = 150  # with this budget a command that takes longer hangs
DRY_RUN_S = 900  # a section may take so long on a CPU
GRACE_S = 5


def main() -> int:
    flags = parse(sys.argv[1:])
    if flags.section:
        return run_section(flags)
    if not flags.dry_run and not torch.cuda.is_available():
        raise ValueError("there is no GPU that torch can use: --dry_run does all of it small on the CPU")
    flags.out.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    suite = Suite(flags)
    try:
        suite.run()
    except KeyboardInterrupt:
        suite.write("interrupted")
        print(f"interrupted: {flags.out / 'table.md'} has what was measured", flush=True)
        return 130
    failed = sum(row["verdict"] == FAIL for row in suite.rows)
    print(f"{len(suite.rows)} rows, {failed} failed: {flags.out / 'table.md'}")
    return int(failed > 0)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command_parser(__doc__, "python -m benchmarks.gpu_suite --out FOLDER [flags]")
    parser.add_argument("--out", type=Path, required=True, help="where table.md and rows.json go")
    parser.add_argument("--budget_s", type=float, default=BUDGET_S, help="for all sections (default: 560)")
    parser.add_argument("--only", default="", help=f"of the sections {', '.join(SECTIONS)}")
    parser.add_argument("--gpus", type=int, help="GPUs to use (default: all)")
    parser.add_argument("--data", default="synthetic", help="CIFAR-10, or other images of 32 pixels")
    parser.add_argument("--dry_run", action="store_true", help="all of it small, on the CPU")
    parser.add_argument("--section", help=argparse.SUPPRESS)  # in a child process: the one to run
    parser.add_argument("--ends_at", type=float, help=argparse.SUPPRESS)
    flags = parser.parse_args(argv)
    flags.only = [name for name in flags.only.split(",") if name]
    if unknown := [name for name in flags.only if name not in SECTIONS]:
        raise ValueError(f"--only {unknown[0]}: choose of {', '.join(SECTIONS)}")
    if flags.dry_run:
        flags.data = "digits"
    elif flags.gpus is None:
        flags.gpus = torch.cuda.device_count()
    return flags


class Suite:
    """Runs the sections as child processes, and keeps the table."""

    def __init__(self, flags: argparse.Namespace):
        self.flags = flags
        self.rows: list[dict[str, Any]] = []
        self.ends_at = time.time() + (1e9 if flags.dry_run else flags.budget_s)

    def run(self) -> None:
        adopt_orphans()
        for name in self.flags.only or SECTIONS:
            left_s = self.ends_at - time.time()
            limit_s = DRY_RUN_S if self.flags.dry_run else min(SECTIONS[name] * slack(self.flags), left_s)
            if limit_s < 10:
                self.add(name, {"row": "", "verdict": SKIPPED, "note": "did not fit into --budget_s"})
            else:
                self.section(name, limit_s)

    def section(self, name: str, limit_s: float) -> None:
        words = [sys.executable, "-m", "benchmarks.gpu_suite", *sys.argv[1:]]
        words += ["--section", name, "--ends_at", str(time.time() + limit_s)]
        env = dict(os.environ)
        if self.flags.dry_run:  # one thread: with more a single process rounds otherwise than each of several
            env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        child = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            preexec_fn=end_with_parent,
            start_new_session=True,
        )
        expired = threading.Event()

        def stop() -> None:
            expired.set()
            child.kill()

        timer = threading.Timer(limit_s + GRACE_S, stop)
        timer.start()
        try:
            assert child.stdout
            for line in child.stdout:
                self.add(name, json.loads(line))
            child.wait()
        finally:
            timer.cancel()
            child.kill()
            while left := running_descendants():
                kill(left)
                psutil.wait_procs(left, timeout=1)
        if child.returncode:
            note = f"ended by its deadline, {limit_s:.0f} s" if expired.is_set() else "the section crashed"
            self.add(name, {"row": "", "verdict": FAIL, "note": note})

    def add(self, section: str, row: dict[str, Any]) -> None:
        self.rows.append({"section": section, **row})
        print(" ".join(str(value) for value in self.rows[-1].values() if value != ""), flush=True)
        self.write()

    def write(self, remark: str = "") -> None:
        out = self.flags.out
        write_text(out / "rows.json", json.dumps(self.rows, indent=1) + "\n")
        columns = ("section", "row", "value", "unit", "verdict", "note", "seconds")
        cells = ([text(shown(row.get(column, ""))) for column in columns] for row in self.rows)
        write_text(
            out / "table.md", "\n\n".join(filter(None, [table(columns, cells, numbers=False), remark])) + "\n"
        )


def shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def run_section(flags: argparse.Namespace) -> int:
    """In a child process: prints each row as a line of JSON. What rows print goes to stderr."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    folder = (flags.out / "scratch" / flags.section).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    command_s = DRY_RUN_S if flags.dry_run else COMMAND_S * slack(flags)
    setting = Setting(folder, flags.data, flags.gpus or 0, flags.dry_run, flags.ends_at, command_s)
    section = importlib.import_module(f"benchmarks.gpu.{flags.section}")
    found = run_rows(section.rows(), setting) if hasattr(section, "rows") else iter(())
    if hasattr(section, "checks"):
        found = chain(found, run_rows(section.checks(), setting, checks_at_once(setting)))
    for row in found:
        print(json.dumps(row), file=output, flush=True)
    return 0


def slack(flags: argparse.Namespace) -> float:
    return max(1.0, flags.budget_s / BUDGET_S)


if __name__ == "__main__":
    sys.exit(run_command(main))
