"""Answers doctor.py's questions on each host without importing torch.

Each request contains the name of a function in QUESTIONS and its arguments:

    {"request": "connect_to_port", "address": "10.0.0.11", "port": 29500}
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
from onecurve.system.processes import describe_listener, interface_problem, interface_to, use_interface
from tools.launch.hosts import connection_addresses, event_line, read_requests

COMPARED_PACKAGES = ("torch", "accelerate", "deepspeed", "timm", "numpy", "safetensors")
SMALL_ELEMENT_COUNT = 1  # number of fp32 elements in the small all-reduce (4 bytes)
LARGE_ELEMENT_COUNT = 2**24  # number of fp32 elements in the large all-reduce (64 MiB)
DIGEST_DIGITS = 12  # number of hexadecimal digits to compare of each SHA-256 digest
TIMED_ALL_REDUCES = 5  # number of timed all-reduces per size

_listening_sockets: list[socket.socket] = []  # sockets that stay open until this process ends


def main() -> None:
    """Answer questions from stdin on stdout until doctor.py ends and closes stdin."""
    for question_name, question_arguments in read_requests():
        try:
            question_answer = QUESTIONS[question_name](**question_arguments)
        except Exception as error:  # the answer contains the error, because later questions may still succeed
            question_answer = {"error": f"{type(error).__name__}: {error}"}
        print(event_line("answer", answer=question_answer), flush=True)


def describe_host(data_location: str | None) -> dict[str, Any]:
    """Return facts about this host, with sizes in GiB and the clock in seconds since 1970."""
    shm_folder = Path("/dev/shm")
    open_file_limit, _hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    return connection_addresses() | {
        "clock": time.time(),
        "hostname": socket.gethostname(),
        "own_name_is": _resolve_host_name(socket.gethostname()),
        "versions": {"python": platform.python_version()}
        | {package_name: _package_version(package_name) for package_name in COMPARED_PACKAGES},
        "nccl": _nccl_version(),
        "code": code_digests(),
        "devices": list_gpus()._asdict(),
        "torch_cuda": torch_cuda(),
        "shm_gib": shutil.disk_usage(shm_folder).free / 2**30 if shm_folder.is_dir() else 0.0,
        "open_files": open_file_limit,
        "data": _data_digest(data_location) if data_location else None,
    }


def find_route(first_host_address: str) -> dict[str, Any]:
    """Return the network interface on the route to the first host, and this host's address on the interface.

    Raises:
        ValueError: If there is no route, or if GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME matches no interface.
    """
    if network_problem := interface_problem(os.environ, bool(list_gpus().gpus)):
        raise ValueError(network_problem)
    network_interface, local_address = interface_to(first_host_address)
    return {"interface": network_interface, "address": local_address}


def listen_on_port(port: int) -> dict[str, Any]:
    """Listen on a port until this process ends, unless another process uses the port.

    Returns:
        Keys `taken` (None, or the reason why this process can't listen) and `free_port` (a different, unused
        port).
    """
    with socket.create_server(("", 0)) as free_socket:  # port 0 selects a free port
        _, free_port = free_socket.getsockname()
    taken_reason = None
    try:
        _listening_sockets.append(socket.create_server(("", port)))
    except OSError as bind_error:
        taken_reason = f"{os.strerror(bind_error.errno or 0)}{describe_listener(port)}"
    return {"taken": taken_reason, "free_port": free_port}


def connect_to_port(address: str, port: int) -> dict[str, Any]:
    """Test a TCP connection. Return the key `refused` with the failure reason, or with None on success."""
    try:
        socket.create_connection((address, port), timeout=5).close()
    except OSError as connect_error:
        return {"refused": connect_error.strerror or str(connect_error)}
    return {"refused": None}


def probe_folder(folder: str, token_name: str, creates_token: bool) -> dict[str, Any]:
    """Test whether a folder is writable, and whether the hosts share the folder.

    Args:
        folder: Folder path. If the folder does not exist yet, test the nearest existing parent folder.
        token_name: Name of an empty file. Hosts that see this file share the folder.
        creates_token: True to create the file.

    Returns:
        Keys `folder` (the tested folder's path), `free_gib` (free space), `problem` (None if the folder is
        writable) and `sees` (True if the token exists).
    """
    folder_path = Path(folder)
    existing_folder = next(parent for parent in [folder_path, *folder_path.parents] if parent.exists())
    free_gib = shutil.disk_usage(existing_folder).free / 2**30
    folder_facts = {"folder": str(existing_folder), "free_gib": free_gib}
    try:
        with tempfile.TemporaryFile(dir=existing_folder) as probe_file:
            probe_file.write(b"doctor")
        if creates_token:
            (existing_folder / token_name).touch()
    except OSError as write_error:
        return folder_facts | {"problem": write_error.strerror}
    return folder_facts | {"problem": None, "sees": (existing_folder / token_name).exists()}


def remove_token(token_file: str) -> dict[str, Any]:
    """Remove the file that probe_folder() created on this host. The answer is empty."""
    Path(token_file).unlink(missing_ok=True)
    return {}


def probe_s3(url: str) -> dict[str, Any]:
    """Write, read and delete an S3 object with this host's credentials."""
    from onecurve.system.s3 import ObjectStore

    try:
        ObjectStore(url).probe()
    except ValueError as s3_error:
        return {"problem": str(s3_error)}
    return {"problem": None}


def run_all_reduce(
    first_host_address: str,
    port: int,
    first_rank: int,
    process_count: int,
    device_indices: list[int],
    uses_gpus: bool,
    interface: str,
    job_timeout_s: float,
) -> dict[str, Any]:
    """Run this host's processes in a test job with one process per device on all hosts.

    Args:
        first_host_address: The first host's address.
        port: Rendezvous port on the first host.
        first_rank: Rank of the first process on this host.
        process_count: Total number of processes on all hosts.
        device_indices: Indices of this host's devices, numbered as in the hostfile.
        uses_gpus: True if the processes run on GPUs.
        interface: Network interface for NCCL and gloo.
        job_timeout_s: Timeout in seconds.

    Returns:
        Key `ranks`, a list with one answer per process. Each answer contains torch's facts about the GPU, and
        either the latency and the bandwidth or a `problem`.
    """
    # The user's own interface variables take precedence over `interface`.
    job_env = use_interface(interface) | os.environ | visible_devices(device_indices)
    job_env |= {"MASTER_ADDR": first_host_address, "MASTER_PORT": str(port), "WORLD_SIZE": str(process_count)}
    gpu_flags = ["--gpus"] if uses_gpus else []
    rank_processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tools.doctor.facts", str(job_timeout_s), *gpu_flags],
            env=job_env | {"RANK": str(first_rank + local_rank), "LOCAL_RANK": str(local_rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for local_rank in range(len(device_indices))
    ]
    deadline_s = time.monotonic() + job_timeout_s

    def wait_for_answer(rank_process: subprocess.Popen[str]) -> dict[str, Any]:
        """Wait until a process ends, or kill it at the deadline. Merge its lines of JSON into one answer."""
        rank_answer: dict[str, Any] = {"problem": None}
        try:
            rank_output, rank_error_text = rank_process.communicate(timeout=deadline_s - time.monotonic())
        except subprocess.TimeoutExpired:
            rank_process.kill()
            rank_output, rank_error_text = rank_process.communicate()
            rank_answer["problem"] = f"the process did not respond within {job_timeout_s:.0f} s"
        for answer_line in rank_output.splitlines():
            rank_answer |= json.loads(answer_line)
        if rank_process.returncode and not rank_answer["problem"]:
            rank_problem_text = rank_error_text.strip() or f"exit status {rank_process.returncode}"
            rank_answer["problem"] = rank_problem_text.splitlines()[-1]  # last line of the traceback
        return rank_answer

    with ThreadPoolExecutor(len(rank_processes)) as thread_pool:
        return {"ranks": list(thread_pool.map(wait_for_answer, rank_processes))}


def run_all_reduce_rank(timeout_s: float, uses_gpu: bool) -> None:
    """Run one all-reduce process, with NCCL on GPUs and gloo on CPUs.

    The process prints lines of JSON. On a GPU, the first line contains the architectures for which torch was
    built, and the GPU's compute capability. If torch can't use the GPU, the first line contains the reason
    (`unusable`), and the process exits. The last line contains the latency of a small all-reduce in seconds,
    and the bandwidth of a large all-reduce in GB/s (tensor bytes / s).
    """
    import torch
    import torch.distributed as dist

    rank_device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if uses_gpu else torch.device("cpu")
    if uses_gpu:
        try:
            torch.cuda.init()
            torch.cuda.set_device(rank_device)
        except (RuntimeError, AssertionError) as error:  # a torch build without CUDA raises AssertionError
            first_error_line, *_ = str(error).splitlines()
            print(json.dumps({"unusable": first_error_line}), flush=True)
            sys.exit(1)
        torch_architectures, gpu_capability = torch.cuda.get_arch_list(), torch.cuda.get_device_capability()
        # Print before the all-reduce, which fails if torch was not built for the GPU.
        print(json.dumps({"built_for": torch_architectures, "capability": gpu_capability}), flush=True)

    def median_all_reduce_s(reduced_tensor: torch.Tensor) -> float:
        """Return the median duration of TIMED_ALL_REDUCES all-reduces.

        The first all-reduce opens connections and is ignored.
        """
        durations_s = []
        for _ in range(TIMED_ALL_REDUCES + 1):
            start_s = time.perf_counter()
            dist.all_reduce(reduced_tensor)
            if uses_gpu:
                torch.cuda.synchronize()
            durations_s.append(time.perf_counter() - start_s)
        _first_duration_s, *timed_durations_s = durations_s
        return statistics.median(timed_durations_s)

    dist.init_process_group("nccl" if uses_gpu else "gloo", timeout=timedelta(seconds=timeout_s))
    latency_s = median_all_reduce_s(torch.ones(SMALL_ELEMENT_COUNT, device=rank_device))
    large_tensor = torch.ones(LARGE_ELEMENT_COUNT, device=rank_device)
    gb_per_s = large_tensor.nbytes / 1e9 / median_all_reduce_s(large_tensor)
    dist.barrier()
    measurement = {"latency_s": latency_s, "gb_per_s": gb_per_s, "backend": dist.get_backend()}
    print(json.dumps(measurement), flush=True)
    os._exit(0)  # skip destructors, in which gloo's threads sometimes abort (pytorch #179291)


def code_digests() -> dict[str, str]:
    """Return the first 12 hex digits of each project file's SHA-256, by path, for files that a job uses."""
    code_patterns = ["*.py", "onecurve/**/*.py", "tools/**/*.py"]
    code_patterns += ["accelerate_configs/*.yaml", "ds_configs/*.json"]
    job_files = sorted(job_file for code_pattern in code_patterns for job_file in ROOT.glob(code_pattern))
    return {str(job_file.relative_to(ROOT)): _short_sha256(job_file.read_bytes()) for job_file in job_files}


def _short_sha256(hashed_bytes: bytes) -> str:
    return hashlib.sha256(hashed_bytes).hexdigest()[:DIGEST_DIGITS]


def _data_digest(data_location: str) -> dict[str, Any]:
    """Return a `digest` of --data, or a `problem` if the data can't be read.

    The digest covers the names and sizes of all files in a folder, the contents of a list or table, or the
    shard manifest.
    """
    if data_location.startswith("hub:") or data_location in ("digits", "cifar10", "synthetic"):
        return {"problem": None}  # no digest, because each host generates or downloads the data
    data_facts: dict[str, Any] = {"problem": None}
    try:
        if data_location.startswith("s3://"):  # hosts that see the same shards read the same manifest
            from onecurve.data.shards import find_stored_manifest
            from onecurve.system.s3 import ObjectStore

            shard_manifest, _ = find_stored_manifest(ObjectStore(data_location))
            return data_facts | {"digest": shard_manifest.sha256[:DIGEST_DIGITS]}
        data_path = Path(data_location)
        if data_path.is_file():  # a table, or a list that may refer to images in any folder
            return data_facts | {"digest": sha256_of(data_path)[:DIGEST_DIGITS]}
        data_files = sorted(_visible_files(data_path))
        if not data_files:
            raise ValueError("the --data folder does not exist or is empty")
        file_sizes = (file.exists() and file.stat().st_size for file in data_files)  # False for a broken link
        files_with_sizes = zip(data_files, file_sizes, strict=True)
        file_listing = "".join(f"{file.relative_to(data_path)} {size}\n" for file, size in files_with_sizes)
        data_facts["digest"] = _short_sha256(file_listing.encode(errors="surrogateescape"))
        if (data_path / "manifest.json").is_file():
            from onecurve.data.shards import find_local_manifest

            find_local_manifest(data_path)  # raises ValueError if the manifest is damaged
    except ValueError as data_error:
        data_facts["problem"] = str(data_error)
    return data_facts


def _visible_files(top_folder: Path) -> Iterator[Path]:
    """Yield the visible files in a folder.

    Follow all links except links to a folder that contains the link.
    """
    from onecurve.data.class_folders import is_hidden, is_link_to_parent

    for folder, subfolders, file_names in os.walk(top_folder, followlinks=True):
        yield from (Path(folder) / file_name for file_name in file_names if not is_hidden(file_name))
        visible_names = (name for name in subfolders if not is_hidden(name))
        # os.walk() visits only the subfolders that remain in this list.
        subfolders[:] = [name for name in visible_names if not is_link_to_parent(Path(folder, name))]


def _resolve_host_name(host_name: str) -> str | None:
    """Return a host name's IPv4 address, or None if this host can't resolve the name."""
    with suppress(OSError):
        return socket.gethostbyname(host_name)
    return None


def _package_version(package_name: str) -> str | None:
    """Return the installed version of a package, or None if the package is not installed."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package_name)
    return None


def _nccl_version() -> str | None:
    """Return the version of the NCCL package for PyPI's torch, or None if the package is not installed."""
    for distribution in metadata.distributions():
        package_name = distribution.metadata["Name"]
        if package_name and package_name.startswith("nvidia-nccl-"):
            return _package_version(package_name)
    return None


_ANSWERING_FUNCTIONS: list[Callable[..., dict[str, Any]]] = [describe_host, find_route, listen_on_port]
_ANSWERING_FUNCTIONS += [connect_to_port, probe_folder, remove_token, probe_s3, run_all_reduce]
# Function that answers each question, by the question's name in a request
QUESTIONS = {answering_function.__name__: answering_function for answering_function in _ANSWERING_FUNCTIONS}

if __name__ == "__main__":
    if len(sys.argv) > 1:  # run_all_reduce() started this process
        run_all_reduce_rank(timeout_s=float(sys.argv[1]), uses_gpu="--gpus" in sys.argv)  # never returns
    main()
