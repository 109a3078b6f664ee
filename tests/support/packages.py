"""What tests need of a machine beside Python's packages: programs of Debian, root, real images.

`python3 -m tests.support.packages` prints the packages that this machine lacks, for `make packages`.
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
PACKAGES = {  # of each program
    "ip": "iproute2",  # hosts and networks, made of this machine
    "tc": "iproute2",
    "nft": "nftables",
    "sshd": "openssh-server",
    "git": "git",  # the commit of a run
    "g++": "g++",  # torch.compile's kernels
    "ps": "procps",
    "pgrep": "procps",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "pdsh": "pdsh",  # how DeepSpeed's launcher reaches several hosts
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "munged": "munge",
}
OTHERS = {  # True: is there
    "root": os.geteuid() == 0,
    "two cores": len(os.sched_getaffinity(1)) >= 2,
    "make setup": Path(sys.prefix, "installed").exists(),  # it made this environment
    "TEST_DATA_DIR": bool(os.environ.get("TEST_DATA_DIR")),
}


def missing(names: tuple[str, ...]) -> list[str]:
    """The packages of those programs, and those of OTHERS, that this machine lacks."""
    lacking = {name for name in names if not OTHERS.get(name)}
    programs = {name for name in lacking - OTHERS.keys() if not shutil.which(name, path=PATH)}
    return sorted({PACKAGES[name] for name in programs} | (lacking & OTHERS.keys()))


if __name__ == "__main__":
    venv = [] if importlib.util.find_spec("ensurepip") else ["python3-venv"]  # for `make setup`
    print(*venv, *missing(tuple(PACKAGES)))
