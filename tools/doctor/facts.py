"""Answers doctor.py's questions on each host without importing torch.

Each request contains the name of a function in QUESTIONS and its arguments:

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
# Number of fp32 elements in the small (4 bytes) and the large (64 MiB) all-reduce
SMALL_ELEMENTS, LARGE_ELEMENTS = 1, 2**24
MEASURED_ROUNDS = 5  # number of timed all-reduces per size

_listening: list[socket.socket] = []  # listening sockets, which stay open until this process ends


def main() -> None:
    """Answer questions until doctor.py ends and closes the input."""
    for name, question in requests():
        try:
            answer = QUESTIONS[name](**question)
        except Exception as error:  # the answer contains the error, because later questions may still succeed
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(event_line("answer", answer=answer), flush=True)


def facts(data: str | None) -> dict[str, Any]:
    """Return facts about this host, with sizes in GiB and the clock in seconds since 1970."""
    return connection_addresses() | {
        "clock": time.time(),
        "hostname": socket.gethostname(),
        "own_name_is": _resolve_name(socket.gethostname()),
        "versions": {"python": platform.python_version()}
        | {name: _package_version(name) for name in PACKAGES},
        "nccl": _nccl_version(),
        "code": code_digests(),
        "devices": list_gpus()._asdict(),
        "torch_cuda": torch_cuda(),
        "shm_gib": shutil.disk_usage("/dev/shm").free / 2**30 if Path("/dev/shm").is_dir() else 0.0,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "data": _data_digest(data) if data else None,
    }


def route(master: str) -> dict[str, Any]:
    """Return the network interface on the route to the master, and this host's address on the interface."""
    if problem := interface_problem(os.environ, bool(list_gpus().gpus)):
        raise ValueError(problem)
    name, address = interface_to(master)
    return {"interface": name, "address": address}


def listen(port: int) -> dict[str, Any]:
    """Listen on a port unless another process uses it. Also return a free port number."""
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
    """Test whether a folder is writable, and whether the hosts share the folder.

    Args:
        folder: Folder path. If the folder does not exist yet, test the nearest existing parent folder.
        token: Name of an empty file. Hosts that see this file share the folder.
        leave: True to create the file.

    Returns:
        Keys `folder` (the tested folder's path), `free_gib` (free space), `problem` (None if the folder is
        writable) and `sees` (True if the token exists).
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
    """Write, read and delete an S3 object with this host's credentials."""
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
    """Run this host's processes in a test job with one process per device on all hosts.

    Args:
        address: The first host's address.
        port: Rendezvous port on the first host.
        first_rank: Rank of the first process on this host.
        processes: Total number of processes on all hosts.
        devices: Indices of this host's devices, numbered as in the hostfile.
        gpus: True if the processes run on GPUs.
        interface: Network interface for NCCL and gloo.
        deadline_s: Timeout in seconds.

    Returns:
        Key `ranks`, a list with one answer per process. Each answer contains torch's facts about the GPU, and
        either the latency and the bandwidth or a `problem`.
    """
    env = use_interface(interface) | os.environ | visible_devices(devices)
    env |= {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "tools.doctor.facts", str(deadline_s), *(["--gpus"] if gpus else [])],
            env=env | {"RANK": str(first_rank + local_rank), "LOCAL_RANK": str(local_rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for local_rank in range(len(devices))
    ]
    end_s = time.monotonic() + deadline_s

    def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
        rank_answer: dict[str, Any] = {"problem": None}
        try:
            output, errors = process.communicate(timeout=end_s - time.monotonic())
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
            rank_answer["problem"] = f"the process did not respond within {deadline_s:.0f} s"
        for line in output.splitlines():
            rank_answer |= json.loads(line)
        if process.returncode and not rank_answer["problem"]:
            rank_answer["problem"] = (errors.strip() or f"exit status {process.returncode}").splitlines()[-1]
        return rank_answer

    with ThreadPoolExecutor(len(children)) as threads:
        return {"ranks": list(threads.map(answer, children))}


def run_rank(within_s: float, gpu: bool) -> None:
    """Run one all-reduce process, with NCCL on GPUs and gloo on CPUs.

    The process prints lines of JSON. On a GPU, the first line contains the architectures for which torch was
    built, and the GPU's compute capability. If torch can't use the GPU, the first line contains the reason
    (`unusable`), and the process exits. The last line contains the latency of a small all-reduce in seconds,
    and the bandwidth of a large all-reduce in GB/s (tensor bytes / s).
    """
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        try:
            torch.cuda.init()
            torch.cuda.set_device(device)
        except (RuntimeError, AssertionError) as error:  # a torch build without CUDA raises AssertionError
            print(json.dumps({"unusable": str(error).splitlines()[0]}), flush=True)
            sys.exit(1)
        built_for, capability = torch.cuda.get_arch_list(), torch.cuda.get_device_capability()
        # Print before the all-reduce, which fails if torch was not built for the GPU.
        print(json.dumps({"built_for": built_for, "capability": capability}), flush=True)

    def measure_s(tensor: torch.Tensor) -> float:
        """Return the median duration of MEASURED_ROUNDS all-reduces.

        The first all-reduce opens connections and is ignored.
        """
        times = []
        for _ in range(MEASURED_ROUNDS + 1):
            began = time.perf_counter()
            dist.all_reduce(tensor)
            if gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])

    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=within_s))
    latency_s = measure_s(torch.ones(SMALL_ELEMENTS, device=device))
    gb_per_s = LARGE_ELEMENTS * 4 / 1e9 / measure_s(torch.ones(LARGE_ELEMENTS, device=device))
    dist.barrier()
    answer = {"latency_s": latency_s, "gb_per_s": gb_per_s, "backend": dist.get_backend()}
    print(json.dumps(answer), flush=True)
    os._exit(0)  # skip destructors, in which gloo's threads sometimes abort (pytorch #179291)


def code_digests() -> dict[str, str]:
    """Return the first 12 hex digits of each project file's SHA-256, by path, for files that a job uses."""
    patterns = ("*.py", "onecurve/**/*.py", "tools/**/*.py", "accelerate_configs/*.yaml", "ds_configs/*.json")
    files = sorted(file for pattern in patterns for file in ROOT.glob(pattern))
    return {str(file.relative_to(ROOT)): _digest(file.read_bytes()) for file in files}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _data_digest(location: str) -> dict[str, Any]:
    """Return a `digest` of --data, or a `problem` if the data can't be read.

    The digest covers the names and sizes of all files in a folder, the contents of a list or table, or the
    shard manifest.
    """
    if location.startswith("hub:") or location in ("digits", "cifar10", "synthetic"):
        return {"problem": None}  # no digest, because each host generates or downloads the data
    answer: dict[str, Any] = {"problem": None}
    try:
        if location.startswith("s3://"):
            from onecurve.data.shards import find_stored_manifest
            from onecurve.system.s3 import ObjectStore

            return answer | {"digest": find_stored_manifest(ObjectStore(location))[0].sha256[:12]}
        root = Path(location)
        if root.is_file():  # a table, or a list that may refer to images in any folder
            return answer | {"digest": sha256_of(root)[:12]}
        files = sorted(_visible_files(root))
        if not files:
            raise ValueError("the --data folder does not exist or is empty")
        sizes = ((path, path.exists() and path.stat().st_size) for path in files)  # False for a broken link
        listing = "".join(f"{path.relative_to(root)} {size}\n" for path, size in sizes)
        answer["digest"] = _digest(listing.encode(errors="surrogateescape"))
        if (root / "manifest.json").is_file():
            from onecurve.data.shards import find_local_manifest

            find_local_manifest(root)
    except ValueError as error:
        answer["problem"] = str(error)
    return answer


def _visible_files(root: Path) -> Iterator[Path]:
    """Yield the visible files in a folder.

    Follow all links except links to a folder that contains the link.
    """
    from onecurve.data.class_folders import is_hidden, is_link_to_parent

    for folder, folders, names in os.walk(root, followlinks=True):
        yield from (Path(folder) / name for name in names if not is_hidden(name))
        folders[:] = [
            name for name in folders if not is_hidden(name) and not is_link_to_parent(Path(folder, name))
        ]


def _resolve_name(name: str) -> str | None:
    with suppress(OSError):
        return socket.gethostbyname(name)
    return None


def _package_version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _nccl_version() -> str | None:
    """Return the version of the NCCL package for PyPI's torch, or None if the package is not installed."""
    for distribution in metadata.distributions():
        package = distribution.metadata["Name"]
        if package and package.startswith("nvidia-nccl-"):
            return _package_version(package)
    return None


QUESTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    function.__name__: function
    for function in (facts, route, listen, connect, writable, remove_token, s3, all_reduce)
}

if __name__ == "__main__":
    if sys.argv[1:]:  # arguments from all_reduce(), which started this process
        run_rank(float(sys.argv[1]), "--gpus" in sys.argv[2:])
    main()
