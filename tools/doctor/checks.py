"""Host checks for doctor.py. docs/trouble.md explains all finding codes."""

import argparse
import secrets
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from onecurve.system.gpus import Devices, driver_problem, runs_on
from onecurve.system.text import plural
from tools.launch.hosts import Connection, Host, master_address, start_on

Facts = dict[str, dict[str, Any]]  # facts about each host by host name

ASK_S, DATA_S, S3_S, ALL_REDUCE_S = 30, 300, 180, 60  # timeouts (s); --data may contain a million files
NO_ANSWER = "the host did not respond"
CLOCK_S = 2.0  # tolerated clock error in seconds
SHM_GIB, SHM_LEAST_GIB = 1.0, 0.0625  # warning and failure limits of /dev/shm; containers default to 64 MiB
DISK_GIB, DISK_LEAST_GIB = 10.0, 1.0  # limits for a warning and a failure
OPEN_FILES = 4096  # minimum open-file limit without a warning
TOLERATED_GPU_SHARE = 0.1  # fraction of a GPU's memory that other processes may use without a warning

# Meaning and remedy of each finding, by code
FINDINGS: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("findings.yaml").read_text())


@dataclass(frozen=True)
class Finding:
    """Problem that a check has found on a host."""

    code: str  # key in findings.yaml
    host: str  # host name
    what: str  # description of the problem on this host
    fails: bool = True  # True if the job would fail, or False for a warning

    @property
    def remedy(self) -> str:
        return FINDINGS[self.code]["remedy"].replace("HOST", self.host)


class HostClient(Connection):
    """Connection to a host on which tools/doctor/facts.py answers questions."""

    def __init__(self, host: Host):
        super().__init__(host, start_on(host.name, "tools.doctor.facts"))
        self.name = host.name
        self.last_line = ""  # last line of the host's output that is not an event

    def ask(self, name: str, within_s: float = ASK_S, **question: Any) -> dict[str, Any]:
        """Return the host's answer.

        Without an answer, return the keys `error` (the reason) and `gone` (True).
        """
        # Kill the process at the timeout, because a late answer could be mistaken for the answer to the next
        # question.
        timer = threading.Timer(within_s, self.process.kill)
        timer.start()
        self.request(name, **question)
        for event in self.events():
            if not isinstance(event, str):
                timer.cancel()
                return event["answer"]
            self.last_line = event.strip()
        if timer.finished.is_set():
            self.last_line = f"{NO_ANSWER} within {within_s:.0f} s"
        timer.cancel()
        return {"error": self.last_line or f"exit status {self.process.wait()}", "gone": True}


class Checks:
    """Sequence of all checks. Some checks use the results of earlier checks."""

    def __init__(self, clients: list[HostClient], flags: argparse.Namespace, config: dict[str, Any]):
        self.clients, self.flags, self.config = clients, flags, config
        self.first = clients[0].name
        self.facts: Facts = {}
        self.checked: list[str] = []  # codes of all checked problems, in check order
        self.notes: list[str] = []

    def run(self, model: Callable[[], dict[str, Any]] | None) -> list[Finding]:
        """Run all checks and return their findings.

        Args:
            model: Function that returns facts about the script's model, or None if there is no script to
                check.
        """
        findings: list[Finding] = []
        for check in (self.hosts, self.deepspeed, self.network, self.folders, self.s3, self.all_reduce):
            findings += check()
            if len(self.facts) < len(self.clients):
                break  # the remaining checks need facts about all hosts
        return findings + list(self.job(model()) if model else [])

    def hosts(self) -> Iterator[Finding]:
        self.checked += ["ssh", "clock", "versions", "driver", "old-driver", "driver-broken", "code", "slots"]
        self.checked += ["own-name", "shm", "open-files", *(["data"] if self.flags.data else [])]

        def ask(client: HostClient) -> dict[str, Any]:
            began = time.time()
            within_s = DATA_S if self.flags.data else ASK_S
            answer = client.ask("facts", within_s, data=self.flags.data)
            # The host read the clock between `began` and now. The clock is correct if its reading is within
            # this interval.
            clock = answer.get("clock", began)
            return answer | {"clock_off_s": min(clock - began, 0) + max(clock - time.time(), 0)}

        for client, answer in _ask_all(self.clients, ask):
            if "error" in answer:
                yield Finding(self._failure_code(answer), client.name, answer["error"])
            else:
                self.facts[client.name] = answer
        yield from check_hosts([client.host for client in self.clients], self.facts)
        yield from compare_hosts(self.facts)
        self.gpus = [gpu for host_facts in self.facts.values() for gpu in host_facts["devices"]["gpus"]]
        if self.gpus:
            self.checked += ["device-memory", "peer-access", "precision"]
        else:
            self.notes.append("No host has a GPU. The job would be a rehearsal on CPUs, with gloo.")

    def _failure_code(self, answer: dict[str, Any]) -> str:
        """Return the finding code for a host that did not return facts."""
        if "Host key" in answer["error"]:
            return "host-key"
        if self.flags.data and answer["error"].startswith(NO_ANSWER):
            return "data"
        return "ssh" if "gone" in answer else "facts"

    def deepspeed(self) -> Iterator[Finding]:
        """Check that `deepspeed --hostfile` can connect.

        A problem is only a warning, because launch.py may still connect.
        """
        if not any(facts["versions"]["deepspeed"] for facts in self.facts.values()):
            return
        self.checked.append("deepspeed")
        answers = _ask_all(self.clients, lambda client: {"problem": deepspeed_problem(client.name)})
        for client, answer in answers:
            if answer["problem"]:
                what = f"ssh {client.name} hostname: {answer['problem']}"
                yield Finding("deepspeed", client.name, what, False)
        if len(self.clients) > 1 and shutil.which("pdsh") is None:
            yield Finding("deepspeed", self.first, "pdsh is not installed on this machine", False)

    def network(self) -> Iterator[Finding]:
        self.checked += ["interface", "port-taken"]
        self.address = self.flags.master_addr or master_address(list(self.facts.values()))
        for client, answer in _ask_all(self.clients, lambda client: client.ask("route", master=self.address)):
            self.facts[client.name]["interface"] = answer.get("interface")
            if "error" in answer:
                yield Finding("interface", client.name, answer["error"])
            elif len(self.clients) > 1 and answer["address"].startswith("127."):
                what = f"the first host's address {self.address} is a loopback address on this host"
                yield Finding("interface", client.name, what)
        first_client, *other_clients = self.clients
        answer = first_client.ask("listen", port=self.flags.port)
        self.free_port = answer.get("free_port")
        if problem := answer.get("taken") or answer.get("error"):
            yield Finding("port-taken", first_client.name, f"port {self.flags.port}: {problem}")
            return
        self.checked.append("port-closed")
        question = {"address": self.address, "port": self.flags.port}
        for client, answer in _ask_all(other_clients, lambda client: client.ask("connect", **question)):
            if problem := answer.get("refused") or answer.get("error"):
                what = f"can't connect to {self.address}:{self.flags.port}: {problem}"
                yield Finding("port-closed", client.name, what)

    def folders(self) -> Iterator[Finding]:
        """Check whether all hosts can write to --output_dir.

        A problem is only a warning on hosts other than the first, because only rank 0 writes to the folder.
        """
        self.checked += ["output", "disk"]
        folder, token = str(Path(self.flags.output_dir).absolute()), f".doctor-{secrets.token_hex(4)}"
        first_client, *other_clients = self.clients

        def ask(client: HostClient) -> dict[str, Any]:
            return client.ask("writable", folder=folder, token=token, leave=client is first_client)

        answers = [(first_client, ask(first_client)), *_ask_all(other_clients, ask)]
        if token_in := answers[0][1].get("folder"):
            first_client.ask("remove_token", file=f"{token_in}/{token}")
        for client, answer in answers:
            if problem := answer.get("problem") or answer.get("error"):
                what = f"can't write to {folder}: {problem}"
                yield Finding("output", client.name, what, client is first_client)
            elif answer["free_gib"] < DISK_GIB:
                what = f"only {answer['free_gib']:.1f} GiB are free in {answer['folder']}"
                is_full = answer["free_gib"] < DISK_LEAST_GIB
                yield Finding("disk", client.name, what, client is first_client and is_full)
        if other_clients:
            if all(answer.get("sees") for _, answer in answers):
                self.notes.append(f"{folder} is shared by all hosts.")
            else:
                sufficient = "The job uses the folder on the first host, which is sufficient."
                self.notes.append(f"{folder} is not shared. {sufficient}")

    def s3(self) -> Iterator[Finding]:
        if self.flags.s3:
            self.checked.append("s3")
            answer = self.clients[0].ask("s3", S3_S, url=self.flags.s3)
            if problem := answer.get("problem") or answer.get("error"):
                yield Finding("s3", self.first, problem)

    def all_reduce(self) -> Iterator[Finding]:
        """Run an all-reduce with one process per device. It may hang even between GPUs in one host."""
        slots = [len(client.host.devices) for client in self.clients]
        first_ranks = dict(zip(self.facts, accumulate(slots, initial=0), strict=False))
        is_unusable = any(_driver_problem(host_facts) for host_facts in self.facts.values())
        interfaces = [host_facts["interface"] for host_facts in self.facts.values()]
        if sum(slots) < 2 or is_unusable or not all(interfaces):
            return
        self.checked += ["all-reduce", *(["unsupported-gpu", "unusable-gpu"] if self.gpus else [])]

        def ask(client: HostClient) -> dict[str, Any]:
            job = {"address": self.address, "port": self.free_port, "processes": sum(slots)}
            host_part = {"first_rank": first_ranks[client.name], "devices": client.host.devices}
            host_part |= {"interface": self.facts[client.name]["interface"], "gpus": bool(self.gpus)}
            return client.ask("all_reduce", ALL_REDUCE_S + 10, **job, **host_part, deadline_s=ALL_REDUCE_S)

        measured_ranks = []
        for client, answer in _ask_all(self.clients, ask):
            yield from check_all_reduce(client.host, answer)
            measured_ranks += [rank for rank in answer.get("ranks", ()) if "latency_s" in rank]
        if len(measured_ranks) == sum(slots):
            latency_ms = max(rank["latency_s"] for rank in measured_ranks) * 1e3
            gb_per_s = min(rank["gb_per_s"] for rank in measured_ranks)
            backend = f"{measured_ranks[0]['backend']} over {', '.join(sorted(set(interfaces)))}"
            self.notes.append(f"all-reduce ({backend}): {latency_ms:.2f} ms, 64 MiB at {gb_per_s:.2f} GB/s")

    def job(self, model: dict[str, Any]) -> Iterator[Finding]:
        if "unchecked" in model:
            reason = model["unchecked"]
            self.notes.append(f"The model, strategy and batch size were not checked, because {reason}")
            return
        self.checked.append("script")
        if "error" in model:
            yield Finding("script", self.first, model["error"])
            return
        self.checked += ["strategy", "batch"]
        memory_gib = min((gpu["memory_gib"] for gpu in self.gpus if gpu["memory_gib"]), default=None)
        yield from check_job(self.first, self.config, model, memory_gib)


def deepspeed_problem(host: str) -> str | None:
    """Return the reason why `ssh HOST hostname` with the DeepSpeed launcher's options fails, or None."""
    ssh = ["ssh", "-o", "PasswordAuthentication=no", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
    try:
        completed = subprocess.run([*ssh, host, "hostname"], capture_output=True, text=True, timeout=ASK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        is_late = isinstance(error, subprocess.TimeoutExpired)
        return f"{NO_ANSWER} within {ASK_S} s" if is_late else str(error)
    last_line = (completed.stderr.strip() or f"exit status {completed.returncode}").splitlines()[-1]
    return last_line if completed.returncode else None


def _ask_all(clients: list[HostClient], ask: Callable[[HostClient], dict]) -> list[tuple[HostClient, dict]]:
    """Query all clients in parallel, and return (client, answer) pairs."""
    with ThreadPoolExecutor(len(clients) or 1) as threads:
        return list(zip(clients, threads.map(ask, clients), strict=True))


def check_hosts(hosts: list[Host], facts: Facts) -> Iterator[Finding]:
    """Check each host's facts separately."""
    for host in hosts:
        if (host_facts := facts.get(host.name)) is None:
            continue
        gpus = host_facts["devices"]["gpus"]
        if problem := _driver_problem(host_facts):
            is_broken = host_facts["devices"]["problem"]
            code = "old-driver" if host_facts["torch_cuda"] else "unusable-gpu"
            yield Finding("driver-broken" if is_broken else code, host.name, problem)
        if gpus and (slot := max(host.devices)) >= len(gpus):
            gpu_count = plural(len(gpus), "GPU")
            what = f"the hostfile uses slot {slot} (counted from 0), but the host has {gpu_count}"
            yield Finding("slots", host.name, what)
        for index in host.devices:
            if index < len(gpus):
                yield from _check_gpu(host.name, index, gpus[index])
        address = host_facts["own_name_is"]
        # Even in a job on one host, torchrun --standalone hangs if the host's name can't be resolved.
        if address is None or (len(hosts) > 1 and address.startswith("127.")):
            resolved = f"resolves to {address}" if address else "is unknown"
            what = f"the host's own name {host_facts['hostname']} {resolved} on the host"
            yield Finding("own-name", host.name, what, False)
        if (shm_gib := host_facts["shm_gib"]) < SHM_GIB:
            what = f"/dev/shm has only {shm_gib * 1024:.0f} MiB of free space"
            yield Finding("shm", host.name, what, shm_gib < SHM_LEAST_GIB)
        if (limit := host_facts["open_files"]) < OPEN_FILES:
            yield Finding("open-files", host.name, f"a process can open at most {limit} files", False)
        if host_facts["data"] and host_facts["data"]["problem"]:
            yield Finding("data", host.name, host_facts["data"]["problem"])


def _driver_problem(host_facts: dict[str, Any]) -> str | None:
    return driver_problem(Devices(**host_facts["devices"]), host_facts["torch_cuda"])


def _check_gpu(host: str, index: int, gpu: dict[str, Any]) -> Iterator[Finding]:
    held_gib = gpu["memory_gib"] - gpu["free_gib"] if gpu["memory_gib"] else 0
    if held_gib > TOLERATED_GPU_SHARE * (gpu["memory_gib"] or 0):
        holder = f" by process {', '.join(gpu['held_by'])}" if gpu["held_by"] else ""
        what = f"{held_gib:.1f} GiB of the memory of GPU {index} are already in use{holder}"
        yield Finding("device-memory", host, what, False)
    if gpu["capability"] and gpu["capability"] < [8, 0]:
        description = f"{gpu['name']}, compute capability {'.'.join(map(str, gpu['capability']))}"
        yield Finding("precision", host, f"GPU {index} ({description}) does not support bf16 natively", False)
    if not all(gpu["peers"]):
        what = f"GPU {index} can't directly access the memory of all other GPUs"
        yield Finding("peer-access", host, what, False)


def compare_hosts(facts: Facts) -> Iterator[Finding]:
    """Find differences between hosts. The most common value of each fact is considered correct."""
    # Finding code, fact name, the fact's value on each host, and True for a failure
    comparisons: list[tuple[str, str, dict[str, Any], bool]] = []
    for code in ("versions", "code"):
        for name in sorted({name for host_facts in facts.values() for name in host_facts[code]}):
            values = {host: host_facts[code].get(name) for host, host_facts in facts.items()}
            comparisons.append((code, name, values, True))
    has_gpus = {host: _gpu_presence(host_facts["devices"]["gpus"]) for host, host_facts in facts.items()}
    drivers = {host: host_facts["devices"]["driver"] for host, host_facts in facts.items()}
    nccl_versions = {host: host_facts["nccl"] for host, host_facts in facts.items()}
    data_facts = {host: host_facts["data"] or {} for host, host_facts in facts.items()}
    digests = {host: data["digest"] for host, data in data_facts.items() if "digest" in data}
    comparisons += [("slots", "a GPU", has_gpus, True), ("data", "the content of --data", digests, True)]
    comparisons += [("driver", "driver", drivers, False), ("driver", "NCCL", nccl_versions, True)]
    for code, name, values, fails in comparisons:
        usual_value = Counter(values.values()).most_common(1)[0][0] if values else None
        for host, value in values.items():
            if value != usual_value:
                what = f"{name} is {value} on this host, but {usual_value} on other hosts"
                yield Finding(code, host, what, fails)
    for host, host_facts in facts.items():
        if abs(offset_s := host_facts["clock_off_s"]) > CLOCK_S:
            what = f"the host's clock differs from this machine's by {offset_s:+.1f} s"
            yield Finding("clock", host, what, False)


def _gpu_presence(gpus: list[Any]) -> str:
    return "present" if gpus else "missing"


def check_all_reduce(host: Host, answer: dict[str, Any]) -> Iterator[Finding]:
    """Check a host's all-reduce results. Report a problem only once if several devices have it."""
    devices_of: dict[tuple[str, str], list[int]] = {}  # devices with a problem, by code and text
    for device, rank in zip(host.devices, answer.get("ranks", ()), strict=False):
        major, minor = rank.get("capability") or (0, 0)
        if "unusable" in rank:
            problem_key = ("unusable-gpu", rank["unusable"])
        elif major and not any(runs_on(arch, major, minor) for arch in rank["built_for"]):
            architectures = ", ".join(rank["built_for"])
            what = f"torch was built for {architectures}, but the GPU's architecture is sm_{major}{minor}"
            problem_key = ("unsupported-gpu", what)
        elif rank["problem"]:
            problem_key = ("all-reduce", rank["problem"])
        else:
            continue
        devices_of.setdefault(problem_key, []).append(device)
    for (code, what), devices in devices_of.items():
        slot_text = "" if len(devices) == len(host.devices) else f"slot {', '.join(map(str, devices))}: "
        yield Finding(code, host.name, slot_text + what)
    if "error" in answer:
        yield Finding("all-reduce", host.name, answer["error"])


def check_job(
    host: str, config: dict[str, Any], model: dict[str, Any], memory_gib: float | None
) -> Iterator[Finding]:
    """Check that the strategy suits the model, and that the batch is not larger than the data set.

    Args:
        host: Name of the first host, to which all findings refer.
        config: Contents of the accelerate config.
        model: Facts about the script's model.
        memory_gib: Memory in GiB of the GPU with the least memory, or None if the job has no GPUs.
    """
    fsdp = config.get("distributed_type") == "FSDP"
    zero3 = "zero3" in str((config.get("deepspeed_config") or {}).get("deepspeed_config_file"))
    needed_gib = 16 * model["parameters"] / 2**30  # 4 bytes each for weights, gradients and both Adam moments
    if (fsdp or zero3) and memory_gib and 0 < needed_gib < memory_gib / 5:
        strategy = "FSDP" if fsdp else "ZeRO-3"
        needed = f"{needed_gib:.2f} GiB including the optimizer"
        what = f"{strategy} shards a model that needs only {needed}, but each GPU has {memory_gib:.0f} GiB"
        yield Finding("strategy", host, what, False)
    if model["images"] and model["batch_size"] > model["images"]:
        images = f"the {model['images']:,} images in {model['data']}"
        yield Finding("batch", host, f"--batch_size {model['batch_size']} is larger than {images}")
