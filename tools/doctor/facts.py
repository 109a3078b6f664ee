"""Answers doctor.py's questions on a host: JSON lines in and out, without importing torch.

    {"ask": "connect", "address": "10.0.0.11", "port": 29500}  ->  ANSWER and {"refused": null}

A question names one of the functions below and gives its arguments.
"""

import hashlib
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from common.system.gpus import devices, torch_cuda, visible_devices
from common.system.network import interface_to, listener, use_interface
from common.system.paths import ROOT
from tools.launch.hosts import connection_addresses

ANSWER = "\x1eanswer "  # prefix of an answer, to tell it from other output of the host
PACKAGES = ("torch", "accelerate", "deepspeed", "timm", "numpy", "safetensors")


def main() -> None:
    """Answers questions until the end of the input, when doctor.py has ended."""
    listening: list[socket.socket] = []  # stay open until the end
    questions: dict[str, Callable[..., Any]] = {
        "facts": facts,
        "route": route,
        "listen": lambda port: _listen(port, listening),
        "connect": connect,
        "writable": writable,
        "remove_token": remove_token,
        "free_port": free_port,
        "s3": s3,
        "all_reduce": all_reduce,
    }
    for line in sys.stdin:
        question = json.loads(line)
        name = question.pop("ask")
        try:
            answer = questions[name](**question)
        except Exception as error:  # sent as an answer, as further questions can still be answered
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(ANSWER + json.dumps(answer), flush=True)


def facts(data: str | None, data_root: tuple[str, ...] = ()) -> dict[str, Any]:
    """Facts about this host. Sizes in GiB, times in seconds since 1970."""
    asked_from, reached_at = connection_addresses()
    return {
        "clock": time.time(),
        "hostname": socket.gethostname(),
        "own_name_is": _resolved(socket.gethostname()),
        "reached_at": reached_at,
        "asked_from": asked_from,
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "nccl": _nccl_version(),
        "code": code(),
        "devices": devices()._asdict(),
        "torch_cuda": torch_cuda(),
        "shm_gib": shutil.disk_usage("/dev/shm").free / 2**30 if Path("/dev/shm").is_dir() else 0.0,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "data": _contents(data, tuple(data_root)) if data else None,
    }


def route(master: str) -> dict[str, Any]:
    """The interface to the master's address, and this host's address on it."""
    name, address = interface_to(master)
    return {"interface": name, "address": address}


def _listen(port: int, listening: list[socket.socket]) -> dict[str, Any]:
    try:
        listening.append(socket.create_server(("", port)))
    except OSError as error:
        return {"taken": f"{os.strerror(error.errno or 0)}{listener(port)}"}
    return {"taken": None}


def connect(address: str, port: int) -> dict[str, Any]:
    try:
        socket.create_connection((address, port), timeout=5).close()
    except OSError as error:
        return {"refused": error.strerror or str(error)}
    return {"refused": None}


def writable(folder: str, token: str, leave: bool) -> dict[str, Any]:
    """Tries to write to the folder. Answers `problem` or None, free space, and if it `sees` the token.

    leave: creates the token, an empty file by which other hosts see that the folder is shared.
    """
    path = Path(folder)
    existing = next(parent for parent in [path, *path.parents] if parent.exists())
    answer = {"folder": str(existing), "free_gib": shutil.disk_usage(existing).free / 2**30}
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"doctor")
        if leave:
            (existing / token).touch()
    except OSError as error:
        return answer | {"problem": error.strerror}
    return answer | {"problem": None, "sees": (existing / token).exists()}


def remove_token(file: str) -> dict[str, Any]:
    Path(file).unlink(missing_ok=True)
    return {}


def free_port() -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return {"port": probe.getsockname()[1]}


def s3(url: str) -> dict[str, Any]:
    """Writes, reads and deletes an object, with this host's credentials."""
    from common.system.s3 import ObjectStore

    try:
        ObjectStore(url).probe()
    except ValueError as error:
        return {"problem": str(error)}
    return {"problem": None}


def all_reduce(
    address: str,
    port: int,
    first_rank: int,
    processes: int,
    devices: list[int],
    gpus: bool,
    interface: str,
    deadline_s: float,
) -> dict[str, Any]:
    """Runs one process per device in a group of all hosts, as a job would. Returns their answers as `ranks`.

    An answer has latency and bandwidth, or `problem`, and torch's facts about its GPU. devices: numbers as in
    the hostfile. gpus: True if the job's hosts have GPUs, which torch must then use.
    """
    env = os.environ | use_interface(interface) | visible_devices(devices)
    env |= {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    words = [sys.executable, "-m", "tools.doctor.all_reduce", str(deadline_s), *(["--gpus"] if gpus else [])]
    started = [
        subprocess.Popen(
            words,
            env=env | {"RANK": str(first_rank + number), "LOCAL_RANK": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for number in range(len(devices))
    ]
    deadline = time.monotonic() + deadline_s
    with ThreadPoolExecutor(len(started)) as threads:
        return {
            "ranks": list(threads.map(lambda child: _all_reduce_answer(child, deadline, deadline_s), started))
        }


def _all_reduce_answer(child: subprocess.Popen[str], deadline: float, deadline_s: float) -> dict[str, Any]:
    found: dict[str, Any] = {"problem": None}
    try:
        output, errors = child.communicate(timeout=deadline - time.monotonic())
    except subprocess.TimeoutExpired:
        child.kill()
        output, errors = child.communicate()
        found["problem"] = f"no answer within {deadline_s:.0f} s"
    for line in output.splitlines():
        found |= json.loads(line)
    if child.returncode and not found["problem"]:
        found["problem"] = (errors.strip() or f"exit status {child.returncode}").splitlines()[-1]
    return found


def code() -> dict[str, str]:
    """The first 12 digits of the SHA-256 of each file that a job uses."""
    patterns = ("*.py", "common/**/*.py", "tools/**/*.py", "accelerate_configs/*.yaml", "ds_configs/*.json")
    files = sorted(file for pattern in patterns for file in ROOT.glob(pattern))
    return {str(file.relative_to(ROOT)): hashlib.sha256(file.read_bytes()).hexdigest()[:12] for file in files}


def _contents(data: str, data_root: tuple[str, ...]) -> dict[str, Any]:
    """A digest of a folder's file names and sizes, of a list, or of a manifest in S3; or a `problem`."""
    if data.startswith("s3://"):
        return _stored(data, data_root)
    if data.startswith("hub:") or data in ("digits", "cifar10", "synthetic"):
        return {"problem": None}  # nothing to compare: generated, or downloaded by each host
    root, digest, count = Path(data), hashlib.sha256(), 0
    if root.is_file():  # a list, whose files may be anywhere
        return {"digest": hashlib.sha256(root.read_bytes()).hexdigest()[:12], "problem": None}
    for folder, below, names in os.walk(root):
        below.sort()
        for name in sorted(names):
            path = Path(folder) / name
            line = f"{path.relative_to(root)} {path.lstat().st_size}\n"
            digest.update(line.encode(errors="surrogateescape"))
            count += 1
    if not count:
        return {"problem": "the folder of --data is not there, or empty"}
    found = {"digest": digest.hexdigest()[:12], "problem": None}
    if (root / "manifest.json").is_file():
        from common.data.shards import find_local

        try:
            find_local(root, data_root)
        except ValueError as error:
            found["problem"] = str(error)
    return found


def _stored(url: str, data_root: tuple[str, ...]) -> dict[str, Any]:
    """The digest of the manifest of shards in S3, read with this host's credentials."""
    from common.data.shards import find_stored
    from common.system.s3 import ObjectStore

    try:
        return {"digest": find_stored(ObjectStore(url), data_root)[0].sha256[:12], "problem": None}
    except ValueError as error:
        return {"problem": str(error)}


def _resolved(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _nccl_version() -> str | None:
    """The version of the NCCL that torch from PyPI loads."""
    names = (d.metadata["Name"] for d in metadata.distributions())
    return next((_version(name) for name in names if name and name.startswith("nvidia-nccl-")), None)


if __name__ == "__main__":
    main()
