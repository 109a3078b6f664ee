"""Measures the time from launch.py to the start of the last host's processes, on 1 and on 4 hosts.

    python -m benchmarks.launch_time

Virtual hosts on one machine (cluster/virtual_cluster.py; root), reached by real ssh. Medians of alternate
rounds. Results and machine: benchmarks/README.md.
"""

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from cluster import virtual_cluster
from common.system.paths import ROOT

COUNTS = (1, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=7)
    flags = parser.parse_args()
    virtual_cluster.up(max(COUNTS) + 1)
    try:
        rounds = [[seconds(count) for count in COUNTS] for _ in range(flags.rounds)]
    finally:
        virtual_cluster.down()
    few, many = (statistics.median(round[k] for round in rounds) for k in range(len(COUNTS)))
    growth = statistics.median(round[1] - round[0] for round in rounds)
    print(f"{COUNTS[0]} host: {few:.2f} s, {COUNTS[1]} hosts: {many:.2f} s, {growth:.2f} s more")


def seconds(count: int) -> float:
    """The time of one launch from node1, which is no host of the job. The script ends at once."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "nothing.py").touch()
        lines = [f"{name} slots=1\n" for name in virtual_cluster.names()[1 : count + 1]]
        (Path(folder) / "hostfile").write_text("".join(lines))
        words = [sys.executable, "launch.py", "--hostfile", f"{folder}/hostfile", "--log_dir", folder]
        command = virtual_cluster.inside("node1", [*words, f"{folder}/nothing.py"], ROOT)
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return float(re.search(r"started after ([\d.]+) s", done.stdout)[1])


if __name__ == "__main__":
    main()
