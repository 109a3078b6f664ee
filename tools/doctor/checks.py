"""Checks of all hosts for doctor.py. Each finding has a code that docs/trouble.md explains."""

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
from tools.launch.hosts import Connection, Host, master_address, start_on

Facts = dict[str, dict[str, Any]]  # facts by host name

ASK_S, DATA_S, S3_S, ALL_REDUCE_S = 30, 300, 180, 60  # timeouts; --data may contain a million files
CLOCK_S = 2.0  # tolerated error of a clock
SHM_GIB, SHM_LEAST_GIB = 1.0, 0.0625  # limits of a warning and a failure (a container's default is 64 MiB)
DISK_GIB, DISK_LEAST_GIB = 10.0, 1.0  # limits of a warning and a failure
OPEN_FILES = 4096  # smallest limit without a warning
HELD_PART = 0.1  # fraction of a GPU's memory that other processes may use without a finding

# Meaning and remedy of each code
FINDINGS: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("findings.yaml").read_text())


@dataclass(frozen=True)
class Finding:
    """A problem that a check found on a host."""

    code: str
    host: str
    what: str
    fails: bool = True  # True if the job would fail, False for a warning

    @property
    def remedy(self) -> str:
        return FINDINGS[self.code]["remedy"].replace("HOST", self.host)


class HostClient(Connection):
    """Connection to a host where tools/doctor/facts.py answers questions."""

    def __init__(self, host: Host):
        super().__init__(host, start_on(host.name, "tools.doctor.facts"))
        self.name = host.name
        self.last_line = ""  # last line of output that is not an event

    def ask(self, name: str, within_s: float = ASK_S, **question: Any) -> dict[str, Any]:
        """Return the host's answer. If there is none, key `error` is the reason, and key `gone` is set."""
        # Kill the process at the timeout, so that no late answer is mistaken for the next question's answer.
        timer = threading.Timer(within_s, self.process.kill)
        timer.start()
        self.request(name, **question)
        for event in self.events():
            if not isinstance(event, str):
                timer.cancel()
                return event["answer"]
            self.last_line = event.strip()
        if timer.finished.is_set():
            self.last_line = f"no answer within {within_s:.0f} s"
        timer.cancel()
        return {"error": self.last_line or f"exit status {self.process.wait()}", "gone": True}


class Checks:
    """All checks in order. A check may need the results of earlier checks."""

    def __init__(self, clients: list[HostClient], flags: argparse.Namespace, config: dict[str, Any]):
        self.clients, self.flags, self.config = clients, flags, config
        self.first = clients[0].name
        self.facts: Facts = {}
        self.checked: list[str] = []  # codes in the order of the checks
        self.notes: list[str] = []

    def run(self, model: Callable[[], dict[str, Any]] | None) -> list[Finding]:
        """Run all checks and return their findings.

        Args:
            model: Function that returns facts about the script's model, or None without a script.
        """
        findings: list[Finding] = []
        for check in (self.hosts, self.deepspeed, self.network, self.folders, self.s3, self.all_reduce):
            findings += check()
            if len(self.facts) < len(self.clients):
                break  # the remaining checks need all hosts
        return findings + list(self.job(model()) if model else [])

    def hosts(self) -> Iterator[Finding]:
        self.checked += ["ssh", "clock", "versions", "driver", "old-driver", "driver-broken", "code", "slots"]
        self.checked += ["own-name", "shm", "open-files", *(["data"] if self.flags.data else [])]

        def ask(client: HostClient) -> dict[str, Any]:
            began = time.time()
            within_s = DATA_S if self.flags.data else ASK_S
            answer = client.ask("facts", within_s, data=self.flags.data)
            # The host read its clock between `began` and now, so any time in this interval is correct.
            clock = answer.get("clock", began)
            return answer | {"clock_off_s": min(clock - began, 0) + max(clock - time.time(), 0)}

        for client, answer in _all(self.clients, ask):
            if "error" in answer:
                is_late = self.flags.data and answer["error"].startswith("no answer")
                gone = "data" if is_late else "ssh" if "gone" in answer else "facts"
                code = "host-key" if "Host key" in answer["error"] else gone
                yield Finding(code, client.name, answer["error"])
            else:
                self.facts[client.name] = answer
        yield from check_hosts([client.host for client in self.clients], self.facts)
        yield from compare_hosts(self.facts)
        self.gpus = [gpu for host_facts in self.facts.values() for gpu in host_facts["devices"]["gpus"]]
        if self.gpus:
            self.checked += ["device-memory", "peer-access", "precision"]
        else:
            self.notes.append("No host has GPUs. The job would be a rehearsal with gloo processes.")

    def deepspeed(self) -> Iterator[Finding]:
        """Check that `deepspeed --hostfile` can connect. Only warn, because launch.py needs less."""
        if not any(facts["versions"]["deepspeed"] for facts in self.facts.values()):
            return
        self.checked.append("deepspeed")
        for client, answer in _all(self.clients, lambda client: {"problem": deepspeed_problem(client.name)}):
            if answer["problem"]:
                what = f"ssh {client.name} hostname: {answer['problem']}"
                yield Finding("deepspeed", client.name, what, False)
        if len(self.clients) > 1 and shutil.which("pdsh") is None:
            yield Finding("deepspeed", self.first, "pdsh is not installed here", False)

    def network(self) -> Iterator[Finding]:
        self.checked += ["interface", "port-taken"]
        self.address = self.flags.master_addr or master_address(list(self.facts.values()))
        for client, answer in _all(self.clients, lambda client: client.ask("route", master=self.address)):
            self.facts[client.name]["interface"] = answer.get("interface")
            if "error" in answer:
                yield Finding("interface", client.name, answer["error"])
            elif len(self.clients) > 1 and answer["address"].startswith("127."):
                what = f"the first host's address {self.address} is a loopback address on this host"
                yield Finding("interface", client.name, what)
        first, *others = self.clients
        answer = first.ask("listen", port=self.flags.port)
        self.free_port = answer.get("free_port")
        if problem := answer.get("taken") or answer.get("error"):
            yield Finding("port-taken", first.name, f"port {self.flags.port}: {problem}")
            return
        self.checked.append("port-closed")
        question = {"address": self.address, "port": self.flags.port}
        for client, answer in _all(others, lambda client: client.ask("connect", **question)):
            if problem := answer.get("refused") or answer.get("error"):
                what = f"can't connect to {self.address}:{self.flags.port}: {problem}"
                yield Finding("port-closed", client.name, what)

    def folders(self) -> Iterator[Finding]:
        """Check --output_dir. Only rank 0 writes there, so a problem on another host is a warning."""
        self.checked += ["output", "disk"]
        folder, token = str(Path(self.flags.output_dir).absolute()), f".doctor-{secrets.token_hex(4)}"
        first, *others = self.clients

        def ask(client: HostClient) -> dict[str, Any]:
            return client.ask("writable", folder=folder, token=token, leave=client is first)

        answers = [(first, ask(first)), *_all(others, ask)]
        if token_in := answers[0][1].get("folder"):
            first.ask("remove_token", file=f"{token_in}/{token}")
        for client, answer in answers:
            if problem := answer.get("problem") or answer.get("error"):
                what = f"{folder} can't be written to: {problem}"
                yield Finding("output", client.name, what, client is first)
            elif answer["free_gib"] < DISK_GIB:
                what = f"{answer['free_gib']:.1f} GiB are free in {answer['folder']}"
                is_full = answer["free_gib"] < DISK_LEAST_GIB
                yield Finding("disk", client.name, what, client is first and is_full)
        if others:
            is_shared = all(answer.get("sees") for _, answer in answers)
            not_shared = "not shared. The job uses the first host's folder, which is sufficient"
            self.notes.append(f"{folder} is {'shared' if is_shared else not_shared}.")

    def s3(self) -> Iterator[Finding]:
        if self.flags.s3:
            self.checked.append("s3")
            answer = self.clients[0].ask("s3", S3_S, url=self.flags.s3)
            if problem := answer.get("problem") or answer.get("error"):
                yield Finding("s3", self.first, problem)

    def all_reduce(self) -> Iterator[Finding]:
        """Run an all-reduce with one process per device, because even the GPUs of a single host may hang."""
        slots = [len(client.host.devices) for client in self.clients]
        first_ranks = dict(zip(self.facts, accumulate(slots, initial=0), strict=False))
        is_unusable = any(_driver_problem(host_facts) for host_facts in self.facts.values())
        interfaces = [host_facts["interface"] for host_facts in self.facts.values()]
        if sum(slots) < 2 or is_unusable or not all(interfaces):
            return
        self.checked += ["all-reduce", *(["unsupported-gpu", "unusable-gpu"] if self.gpus else [])]

        def ask(client: HostClient) -> dict[str, Any]:
            job = {"address": self.address, "port": self.free_port, "processes": sum(slots)}
            part = {"first_rank": first_ranks[client.name], "devices": client.host.devices}
            part |= {"interface": self.facts[client.name]["interface"], "gpus": bool(self.gpus)}
            return client.ask("all_reduce", ALL_REDUCE_S + 10, **job, **part, deadline_s=ALL_REDUCE_S)

        times = []
        for client, answer in _all(self.clients, ask):
            yield from check_all_reduce(client.host, answer)
            times += [rank for rank in answer.get("ranks", ()) if "latency_s" in rank]
        if len(times) == sum(slots):
            slowest, speed = max(t["latency_s"] for t in times), min(t["gb_per_s"] for t in times)
            backend = f"{times[0]['backend']} over {', '.join(sorted(set(interfaces)))}"
            self.notes.append(f"all-reduce ({backend}): {slowest * 1e3:.2f} ms, 64 MiB at {speed:.2f} GB/s")

    def job(self, model: dict[str, Any]) -> Iterator[Finding]:
        if "unchecked" in model:
            self.notes.append(f"not checked: model, strategy and batch, because {model['unchecked']}")
            return
        self.checked.append("script")
        if "error" in model:
            yield Finding("script", self.first, model["error"])
            return
        self.checked += ["strategy", "batch"]
        memory_gib = min((gpu["memory_gib"] for gpu in self.gpus if gpu["memory_gib"]), default=None)
        yield from check_job(self.first, self.config, model, memory_gib)


def deepspeed_problem(host: str) -> str | None:
    """Return why `ssh HOST hostname` with the options of DeepSpeed's launcher fails, or None if it works."""
    options = ["-o", "PasswordAuthentication=no", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
    try:
        done = subprocess.run(
            ["ssh", *options, host, "hostname"], capture_output=True, text=True, timeout=ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no answer within {ASK_S} s" if isinstance(error, subprocess.TimeoutExpired) else str(error)
    last_line = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
    return last_line if done.returncode else None


def _all(clients: list[HostClient], ask: Callable[[HostClient], dict]) -> list[tuple[HostClient, dict]]:
    """Ask all clients in parallel, and return each client with its answer."""
    with ThreadPoolExecutor(len(clients) or 1) as threads:
        return list(zip(clients, threads.map(ask, clients), strict=True))


def check_hosts(hosts: list[Host], facts: Facts) -> Iterator[Finding]:
    """Check the facts of each host."""
    for host in hosts:
        if (host_facts := facts.get(host.name)) is None:
            continue
        gpus = host_facts["devices"]["gpus"]
        if problem := _driver_problem(host_facts):
            is_broken = host_facts["devices"]["problem"]
            code = "old-driver" if host_facts["torch_cuda"] else "unusable-gpu"
            yield Finding("driver-broken" if is_broken else code, host.name, problem)
        if gpus and max(host.devices) >= len(gpus):
            what = f"the hostfile uses slot {max(host.devices)}, but the host has {len(gpus)} GPUs"
            yield Finding("slots", host.name, what)
        for number in host.devices:
            if number < len(gpus):
                yield from _check_gpu(host.name, number, gpus[number])
        address = host_facts["own_name_is"]
        # Even on one host, torchrun --standalone hangs if the name can't be resolved.
        if address is None or (len(hosts) > 1 and address.startswith("127.")):
            what = f"its own name {host_facts['hostname']} is {address or 'unknown'} there"
            yield Finding("own-name", host.name, what, False)
        if (shm_gib := host_facts["shm_gib"]) < SHM_GIB:
            what = f"/dev/shm has {shm_gib * 1024:.0f} MiB"
            yield Finding("shm", host.name, what, shm_gib < SHM_LEAST_GIB)
        if (limit := host_facts["open_files"]) < OPEN_FILES:
            yield Finding("open-files", host.name, f"at most {limit} open files", False)
        if host_facts["data"] and host_facts["data"]["problem"]:
            yield Finding("data", host.name, host_facts["data"]["problem"])


def _driver_problem(host_facts: dict[str, Any]) -> str | None:
    return driver_problem(Devices(**host_facts["devices"]), host_facts["torch_cuda"])


def _check_gpu(host: str, number: int, gpu: dict[str, Any]) -> Iterator[Finding]:
    held_gib = gpu["memory_gib"] - gpu["free_gib"] if gpu["memory_gib"] else 0
    if held_gib > HELD_PART * (gpu["memory_gib"] or 0):
        holder = f" by process {', '.join(gpu['held_by'])}" if gpu["held_by"] else ""
        yield Finding("device-memory", host, f"{held_gib:.1f} GiB of GPU {number} are held{holder}", False)
    if gpu["capability"] and gpu["capability"] < [8, 0]:
        name = f"{gpu['name']}, {'.'.join(map(str, gpu['capability']))}"
        yield Finding("precision", host, f"GPU {number} ({name}) has no native bf16", False)
    if not all(gpu["peers"]):
        yield Finding("peer-access", host, f"GPU {number} can't access all other GPUs directly", False)


def compare_hosts(facts: Facts) -> Iterator[Finding]:
    """Find differences between hosts. The most common value is taken as correct."""
    items = facts.items()
    rows = [  # code of the finding, name of the fact, its value on each host, True for a failure
        *(
            (code, name, {host: host_facts[code].get(name) for host, host_facts in items}, True)
            for code in ("versions", "code")
            for name in sorted({name for host_facts in facts.values() for name in host_facts[code]})
        ),
        ("slots", "a GPU", {host: bool(host_facts["devices"]["gpus"]) for host, host_facts in items}, True),
        ("driver", "driver", {host: host_facts["devices"]["driver"] for host, host_facts in items}, False),
        ("driver", "NCCL", {host: host_facts["nccl"] for host, host_facts in items}, True),
    ]
    data = {host: host_facts["data"] or {} for host, host_facts in items}
    digests = {host: answer["digest"] for host, answer in data.items() if "digest" in answer}
    for code, name, values, fails in [*rows, ("data", "the content of --data", digests, True)]:
        usual = Counter(values.values()).most_common(1)[0][0] if values else None
        for host, value in values.items():
            if value != usual:
                yield Finding(code, host, f"{name} is {value}, elsewhere {usual}", fails)
    for host, host_facts in facts.items():
        if abs(offset_s := host_facts["clock_off_s"]) > CLOCK_S:
            yield Finding("clock", host, f"its clock differs by {offset_s:+.1f} s from this machine's", False)


def check_all_reduce(host: Host, answer: dict[str, Any]) -> Iterator[Finding]:
    """Check a host's answer about the all-reduce. Report a problem that several devices share once."""
    devices_of: dict[tuple[str, str], list[int]] = {}  # devices that have a problem, by code and problem
    for device, rank in zip(host.devices, answer.get("ranks", ()), strict=False):
        major, minor = rank.get("capability") or (0, 0)
        if "unusable" in rank:
            key = ("unusable-gpu", rank["unusable"])
        elif major and not any(runs_on(arch, major, minor) for arch in rank["built_for"]):
            what = f"torch is built for {', '.join(rank['built_for'])}, but the GPU is sm_{major}{minor}"
            key = ("unsupported-gpu", what)
        elif rank["problem"]:
            key = ("all-reduce", rank["problem"])
        else:
            continue
        devices_of.setdefault(key, []).append(device)
    for (code, what), devices in devices_of.items():
        slots = "" if len(devices) == len(host.devices) else f"slot {', '.join(map(str, devices))}: "
        yield Finding(code, host.name, slots + what)
    if "error" in answer:
        yield Finding("all-reduce", host.name, answer["error"])


def check_job(
    host: str, config: dict[str, Any], model: dict[str, Any], memory_gib: float | None
) -> Iterator[Finding]:
    """Check that the strategy suits the model, and that the batch is not larger than the data set.

    Args:
        host: Name of the first host, which the findings refer to.
        config: Content of the accelerate config.
        model: Facts about the script's model.
        memory_gib: Memory of the smallest GPU, or None without a GPU.
    """
    fsdp = config.get("distributed_type") == "FSDP"
    zero3 = "zero3" in str((config.get("deepspeed_config") or {}).get("deepspeed_config_file"))
    needed_gib = 16 * model["parameters"] / 2**30  # fp32 weights, gradients, two moments
    if (fsdp or zero3) and memory_gib and 0 < needed_gib < memory_gib / 5:
        strategy = "FSDP" if fsdp else "ZeRO-3"
        size = f"{needed_gib:.2f} GiB with its optimizer, and a GPU has {memory_gib:.0f} GiB"
        yield Finding("strategy", host, f"{strategy} shards a model that needs {size}", False)
    if model["images"] and model["batch_size"] > model["images"]:
        size = f"more than the {model['images']:,} images in {model['data']}"
        yield Finding("batch", host, f"--batch_size {model['batch_size']} is {size}")
