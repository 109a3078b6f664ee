"""Answers to doctor.py's questions, computed on each host without importing torch.

A request names one of QUESTIONS:

    {"request": "connect", "address": "10.0.0.11", "port": 29500}
    EVENT {"event": "answer", "answer": {"refused": null}}
"""

import hashlib
import json
import os
import platform
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

from onecurve.system.files import sha256_of
from onecurve.system.gpus import list_gpus, torch_cuda, visible_devices
from onecurve.system.paths import ROOT
from onecurve.system.processes import interface_problem, interface_to, listening_process, use_interface
from tools.launch.hosts import connection_addresses, event_line, requests

PACKAGES = ("torch", "accelerate", "deepspeed", "timm", "numpy", "safetensors")
SMALL, LARGE = 1, 2**24  # numbers of fp32 elements in the two all-reduces, 4 bytes and 64 MiB
ROUNDS = 5

_listening: list[socket.socket] = []  # sockets that stay open until this process ends


def main() -> None:
    """Answer questions until the input ends, which means that doctor.py has ended."""
    for name, question in requests():
        try:
            answer = QUESTIONS[name](**question)
        except Exception as error:  # report any error as an answer, because later questions may still succeed
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(event_line("answer", answer=answer), flush=True)


def facts(data: str | None) -> dict[str, Any]:
    """Return facts about this host. Sizes are in GiB, and the clock is in seconds since 1970."""
    return connection_addresses() | {
        "clock": time.time(),
        "hostname": socket.gethostname(),
        "own_name_is": _resolved(socket.gethostname()),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "nccl": _nccl_version(),
        "code": code_digests(),
        "devices": list_gpus()._asdict(),
        "torch_cuda": torch_cuda(),
        "shm_gib": shutil.disk_usage("/dev/shm").free / 2**30 if Path("/dev/shm").is_dir() else 0.0,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "data": _contents(data) if data else None,
    }


def route(master: str) -> dict[str, Any]:
    """Return the network interface that reaches the master's address, and this host's address on it."""
    if problem := interface_problem(os.environ, bool(list_gpus().gpus)):
        raise ValueError(problem)
    name, address = interface_to(master)
    return {"interface": name, "address": address}


def listen(port: int) -> dict[str, Any]:
    """Listen on the port unless another process uses it. The answer also contains a free port."""
    with socket.create_server(("", 0)) as probe:
        free_port = probe.getsockname()[1]
    taken = None
    try:
        _listening.append(socket.create_server(("", port)))
    except OSError as error:
        taken = f"{os.strerror(error.errno or 0)}{listening_process(port)}"
    return {"taken": taken, "free_port": free_port}


def connect(address: str, port: int) -> dict[str, Any]:
    try:
        socket.create_connection((address, port), timeout=5).close()
    except OSError as error:
        return {"refused": error.strerror or str(error)}
    return {"refused": None}


def writable(folder: str, token: str, leave: bool) -> dict[str, Any]:
    """Try to write to a folder.

    Args:
        folder: The folder. If it does not exist yet, its nearest existing parent is tested.
        token: Name of an empty file that shows other hosts that the folder is shared.
        leave: Create the token.

    Returns:
        Keys `folder` (the folder tested), `free_gib`, `problem` (None if the folder is writable) and `sees`
        (True if the token exists).
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


def s3(url: str) -> dict[str, Any]:
    """Write, read and delete an object with this host's credentials."""
    from onecurve.system.s3 import ObjectStore

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
    """Run one process per device in a process group that spans all hosts, like a job.

    Args:
        address: Address of the first host.
        port: Port on the first host.
        first_rank: Rank of the first process on this host.
        processes: Number of processes on all hosts.
        devices: Indices of this host's devices, as in the hostfile.
        gpus: True if the job's hosts have GPUs, so that torch must use a GPU.
        interface: Network interface for NCCL and gloo.
        deadline_s: Timeout in seconds.

    Returns:
        Key `ranks`, a list with one answer per process. An answer contains torch's facts about the GPU, and
        either latency and bandwidth or a `problem`.
    """
    env = use_interface(interface) | os.environ | visible_devices(devices)
    env |= {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tools.doctor.facts", str(deadline_s), *(["--gpus"] if gpus else [])],
            env=env | {"RANK": str(first_rank + number), "LOCAL_RANK": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for number in range(len(devices))
    ]
    deadline = time.monotonic() + deadline_s

    def answer(child: subprocess.Popen[str]) -> dict[str, Any]:
        reply: dict[str, Any] = {"problem": None}
        try:
            output, errors = child.communicate(timeout=deadline - time.monotonic())
        except subprocess.TimeoutExpired:
            child.kill()
            output, errors = child.communicate()
            reply["problem"] = f"no answer within {deadline_s:.0f} s"
        for line in output.splitlines():
            reply |= json.loads(line)
        if child.returncode and not reply["problem"]:
            reply["problem"] = (errors.strip() or f"exit status {child.returncode}").splitlines()[-1]
        return reply

    with ThreadPoolExecutor(len(started)) as threads:
        return {"ranks": list(threads.map(answer, started))}


def run_rank(within_s: float, gpu: bool) -> None:
    """Run one process of the all-reduce, with NCCL between GPUs and gloo otherwise.

    The process prints lines of JSON. On a GPU, the first line contains the architectures that torch was built
    for and the GPU's compute capability. If torch can't use the GPU, the first line contains the reason
    (`unusable`), and the process exits. The last line contains the seconds of a small all-reduce, and the
    speed of a large all-reduce in GB/s (tensor bytes / s).
    """
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        try:
            torch.cuda.init()
            torch.cuda.set_device(device)
        except (RuntimeError, AssertionError) as error:  # torch without CUDA raises AssertionError
            print(json.dumps({"unusable": str(error).splitlines()[0]}), flush=True)
            sys.exit(1)
        built_for, capability = torch.cuda.get_arch_list(), torch.cuda.get_device_capability()
        # Print before the all-reduce, because it fails on a GPU that torch was not built for.
        print(json.dumps({"built_for": built_for, "capability": capability}), flush=True)

    def measure_s(tensor: torch.Tensor) -> float:
        """Return the median seconds of ROUNDS all-reduces. An unmeasured one first opens the connections."""
        times = []
        for _ in range(ROUNDS + 1):
            began = time.perf_counter()
            dist.all_reduce(tensor)
            if gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])

    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=within_s))
    latency_s = measure_s(torch.ones(SMALL, device=device))
    gb_per_s = LARGE * 4 / 1e9 / measure_s(torch.ones(LARGE, device=device))
    dist.barrier()
    answer = {"latency_s": latency_s, "gb_per_s": gb_per_s, "backend": dist.get_backend()}
    print(json.dumps(answer), flush=True)
    os._exit(0)  # gloo's threads sometimes abort in destructors (pytorch #179291)


def code_digests() -> dict[str, str]:
    """Return the first 12 digits of each project file's SHA-256, by path, for all files that a job uses."""
    patterns = ("*.py", "onecurve/**/*.py", "tools/**/*.py", "accelerate_configs/*.yaml", "ds_configs/*.json")
    files = sorted(file for pattern in patterns for file in ROOT.glob(pattern))
    return {str(file.relative_to(ROOT)): _digest(file.read_bytes()) for file in files}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _contents(data: str) -> dict[str, Any]:
    """Return a digest of --data, or a `problem`.

    The digest covers the names and sizes of a folder's files, the content of a list or table, or the manifest
    of shards.
    """
    if data.startswith("hub:") or data in ("digits", "cifar10", "synthetic"):
        return {"problem": None}  # nothing to compare, because each host generates or downloads the data
    answer: dict[str, Any] = {"problem": None}
    try:
        if data.startswith("s3://"):
            from onecurve.data.shards import find_stored
            from onecurve.system.s3 import ObjectStore

            return answer | {"digest": find_stored(ObjectStore(data))[0].sha256[:12]}
        root = Path(data)
        if root.is_file():  # a table or a list, which may refer to images in any folder
            return answer | {"digest": sha256_of(root)[:12]}
        files = sorted(_files(root))
        if not files:
            raise ValueError("the folder of --data does not exist or is empty")
        sizes = ((path, path.exists() and path.stat().st_size) for path in files)  # False for a broken link
        lines = "".join(f"{path.relative_to(root)} {size}\n" for path, size in sizes)
        answer["digest"] = _digest(lines.encode(errors="surrogateescape"))
        if (root / "manifest.json").is_file():
            from onecurve.data.shards import find_local

            find_local(root)
    except ValueError as error:
        answer["problem"] = str(error)
    return answer


def _files(root: Path) -> Iterator[Path]:
    """Yield the visible files in a folder. Follow links, except to a folder that contains the link."""
    from onecurve.data.class_folders import is_hidden, leads_above

    for folder, folders, names in os.walk(root, followlinks=True):
        yield from (Path(folder) / name for name in names if not is_hidden(name))
        folders[:] = [name for name in folders if not is_hidden(name) and not leads_above(Path(folder, name))]


def _resolved(name: str) -> str | None:
    with suppress(OSError):
        return socket.gethostbyname(name)
    return None


def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _nccl_version() -> str | None:
    """Return the version of the NCCL package that PyPI's torch loads, or None without this package."""
    names = (d.metadata["Name"] for d in metadata.distributions())
    return next((_version(name) for name in names if name and name.startswith("nvidia-nccl-")), None)


QUESTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    function.__name__: function
    for function in (facts, route, listen, connect, writable, remove_token, s3, all_reduce)
}

if __name__ == "__main__":
    if sys.argv[1:]:  # all_reduce() started this process
        run_rank(float(sys.argv[1]), "--gpus" in sys.argv[2:])
    main()
