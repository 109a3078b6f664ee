"""Test requirements other than Python packages: Debian packages, root privileges and real images.

`python3 -m tests.support.packages` prints the Debian packages that this machine lacks, for `make packages`.
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
PACKAGES = {  # Debian package that contains each program
    "ip": "iproute2",  # `ip` creates virtual hosts and networks on this machine
    "tc": "iproute2",
    "nft": "nftables",
    "sshd": "openssh-server",
    "git": "git",  # `git` records a run's commit
    "g++": "g++",  # `g++` compiles the kernels of torch.compile
    "ps": "procps",
    "pgrep": "procps",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "pdsh": "pdsh",  # DeepSpeed's launcher reaches several hosts with pdsh
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "munged": "munge",
}
OTHERS = {  # Maps each requirement that is not a program to True if this machine meets it
    "root": os.geteuid() == 0,
    "two cores": len(os.sched_getaffinity(1)) >= 2,
    "make setup": Path(sys.prefix, "installed").exists(),  # `make setup` creates this file
    "TEST_DATA_DIR": bool(os.environ.get("TEST_DATA_DIR")),
}


def missing(names: tuple[str, ...]) -> list[str]:
    """Return the required Debian packages and the entries of OTHERS that this machine lacks."""
    lacking = {name for name in names if not OTHERS.get(name)}
    programs = {name for name in lacking - OTHERS.keys() if not shutil.which(name, path=PATH)}
    return sorted({PACKAGES[name] for name in programs} | (lacking & OTHERS.keys()))


if __name__ == "__main__":
    # `make setup` needs the Debian package python3-venv.
    venv = [] if importlib.util.find_spec("ensurepip") else ["python3-venv"]
    print(*venv, *missing(tuple(PACKAGES)))
