"""Check whether training in this container is alive. Prints one line, and exits with status 0 or 1.

    python cluster/health.py
    python cluster/health.py --within_s 600

Training is alive if a train script is running and none of its processes is suspended. In the main process's
container, the newest line in the log must also be at most --within_s seconds old. The main process logs a
line every --log_every steps and at each evaluation. Before the first line, while the job starts and prepares
data, the log's age is not checked.
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
    description, _, epilog = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--within_s",
        type=float,
        default=1800,
        metavar="SECONDS",
        help="maximum age of the log's last line in seconds (default: %(default)s)",
    )
    is_alive, message = health(parser.parse_args().within_s)
    print(message)
    sys.exit(0 if is_alive else 1)


def health(within_s: float) -> tuple[bool, str]:
    """Return True if training is alive, and a message with the reason."""
    candidates = psutil.process_iter(["pid", "cmdline", "status", "open_files"])
    processes = [process.info for process in candidates if trains(process.info["cmdline"] or [""])]
    if not processes:
        return False, "no train script is running"
    if stopped := next((process["pid"] for process in processes if process["status"] in STOPPED), None):
        return False, f"training process {stopped} is suspended"
    files = {Path(file.path) for process in processes for file in process["open_files"] or ()}
    logs = [file for file in files if file.name == "metrics.jsonl" and file.exists()]
    ages = {log: time.time() - log.stat().st_mtime for log in logs if log.stat().st_size}
    for log, age_s in ages.items():
        if age_s > within_s:
            return (
                False,
                f"{log} received no new line for {age_s:.0f} s, which exceeds --within_s {within_s:.0f}",
            )
    message = f"training processes: {len(processes)}"
    if ages:
        message = f"{message}. The newest log line is {min(ages.values()):.0f} s old"
    return True, message


def trains(command_line: list[str]) -> bool:
    """Return True if a command line runs Python with a train_*.py script, as all ranks and workers do."""
    script = next((word for word in command_line[1:] if not word.startswith("-")), "")
    return bool(re.match(r"python[\d.]*$", Path(command_line[0]).name) and SCRIPT.fullmatch(script))


if __name__ == "__main__":
    main()
