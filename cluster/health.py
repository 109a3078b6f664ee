"""Checks if the training in this container is alive: prints one line, and exits with status 0 or 1.

    python cluster/health.py --within_s 1800

It is alive while processes of a train script run, none of them is stopped, and, if the main process is among
them, its log has got a line within --within_s seconds. A line comes every --log_every steps and at each
evaluation. Before the first line (start, preparation of data) running processes are enough.
"""

import argparse
import re
import sys
import time
from pathlib import Path

import psutil

SCRIPT = re.compile(r"(.*/)?train_\w+\.py")
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--within_s", type=float, default=1800, help="how old the log's last line may be")
    is_alive, about = health(parser.parse_args().within_s)
    print(about)
    sys.exit(0 if is_alive else 1)


def health(within_s: float) -> tuple[bool, str]:
    """True if the training is alive, and a line about it."""
    processes = psutil.process_iter(["pid", "cmdline", "status", "open_files"])
    found = [process.info for process in processes if trains(process.info["cmdline"] or [""])]
    if not found:
        return False, "no process of a train script runs"
    if stopped := next((process["pid"] for process in found if process["status"] in STOPPED), None):
        return False, f"process {stopped} of the training is stopped"
    files = {Path(file.path) for process in found for file in process["open_files"] or ()}
    logs = [file for file in files if file.name == "metrics.jsonl" and file.exists()]
    ages = {log: time.time() - log.stat().st_mtime for log in logs if log.stat().st_size}
    for log, age_s in ages.items():
        if age_s > within_s:
            return False, f"{log} has got no line for {age_s:.0f} s, more than --within_s {within_s:.0f}"
    newest = f"; the newest line is {min(ages.values()):.0f} s old" if ages else ""
    return True, f"processes that train: {len(found)}{newest}"


def trains(words: list[str]) -> bool:
    """True for Python with a script train_*.py: a rank or a worker, but no launcher. words: its command."""
    script = next((word for word in words[1:] if not word.startswith("-")), "")
    return bool(re.match(r"python[\d.]*$", Path(words[0]).name) and SCRIPT.fullmatch(script))


if __name__ == "__main__":
    main()
