"""The doctor's checks of all hosts. Their findings have codes, which docs/trouble.md explains."""

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

Facts = dict[str, dict[str, Any]]  # host's name -> its facts

ASK_S, DATA_S, S3_S, ALL_REDUCE_S = 30, 300, 180, 60  # time-outs; a folder of --data may have a million files
CLOCK_S = 2.0
SHM_GIB, SHM_LEAST_GIB = 1.0, 0.0625  # the least is what a container has by default
DISK_GIB, DISK_LEAST_GIB = 10.0, 1.0
OPEN_FILES = 4096
HELD_PART = 0.1  # share of a GPU's memory that other processes may hold without a finding

# code -> meaning and remedy
FINDINGS: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("findings.yaml").read_text())


@dataclass(frozen=True)
class Finding:
    code: str
    host: str
    what: str
    fails: bool = True  # True if the job would fail; False for a warning

    @property
    def remedy(self) -> str:
        return FINDINGS[self.code]["remedy"].replace("HOST", self.host)


class HostClient(Connection):
    """The connection to a host, where tools/doctor/facts.py answers questions."""

    def __init__(self, host: Host):
        super().__init__(host, start_on(host.name, "tools.doctor.facts"))
        self.name = host.name
        self.last_line = ""  # of other output

    def ask(self, name: str, within_s: float = ASK_S, **question: Any) -> dict[str, Any]:
        """The host's answer; if there is none, the keys `error`, with the reason, and `gone`."""
        # A late answer would be taken for that to the next question.
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
    """The checks in order: each needs the results of those before it."""

    def __init__(self, clients: list[HostClient], flags: argparse.Namespace, config: dict[str, Any]):
        self.clients, self.flags, self.config = clients, flags, config
        self.first = clients[0].name
        self.facts: Facts = {}
        self.checked: list[str] = []  # codes, in order
        self.notes: list[str] = []

    def run(self, model: Callable[[], dict[str, Any]] | None) -> list[Finding]:
        """model: returns the facts of the script's model; None without a script."""
        findings: list[Finding] = []
        for check in (self.hosts, self.deepspeed, self.network, self.folders, self.s3, self.all_reduce):
            findings += check()
            if len(self.facts) < len(self.clients):
                break  # later checks need all hosts
        return findings + list(self.job(model()) if model else [])

    def hosts(self) -> Iterator[Finding]:
        self.checked += ["ssh", "clock", "versions", "driver", "old-driver", "driver-broken", "code", "slots"]
        self.checked += ["own-name", "shm", "open-files", *(["data"] if self.flags.data else [])]

        def ask(client: HostClient) -> dict[str, Any]:
            began = time.time()
            within_s = DATA_S if self.flags.data else ASK_S
            answer = client.ask("facts", within_s, data=self.flags.data)
            # The host read its clock between `began` and now: a time within that interval is right.
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
        self.gpus = [gpu for own in self.facts.values() for gpu in own["devices"]["gpus"]]
        if self.gpus:
            self.checked += ["device-memory", "peer-access", "precision"]
        else:
            self.notes.append("no GPUs: the job would be a rehearsal, on gloo processes")

    def deepspeed(self) -> Iterator[Finding]:
        """Ask each host as `deepspeed --hostfile` does. launch.py needs less, so these are warnings."""
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
                what = f"the first host's address {self.address} is this host's loopback"
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
                what = f"{self.address}:{self.flags.port} is not reached: {problem}"
                yield Finding("port-closed", client.name, what)

    def folders(self) -> Iterator[Finding]:
        """Checks --output_dir. Only rank 0 writes, so a problem on another host is a warning."""
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
            shared = all(answer.get("sees") for _, answer in answers)
            kind = "shared" if shared else "not shared: the first host's is used, which is enough"
            self.notes.append(f"{folder} is {kind}")

    def s3(self) -> Iterator[Finding]:
        if self.flags.s3:
            self.checked.append("s3")
            answer = self.clients[0].ask("s3", S3_S, url=self.flags.s3)
            if problem := answer.get("problem") or answer.get("error"):
                yield Finding("s3", self.first, problem)

    def all_reduce(self) -> Iterator[Finding]:
        """Runs a process per device, as the job does, because GPUs of one host may hang, too."""
        slots = [len(client.host.devices) for client in self.clients]
        first_ranks = dict(zip(self.facts, accumulate(slots, initial=0), strict=False))
        unusable = any(_driver_problem(own) for own in self.facts.values())
        interfaces = [own["interface"] for own in self.facts.values()]
        if sum(slots) < 2 or unusable or not all(interfaces):
            return
        self.checked += ["all-reduce", *(["unsupported-gpu", "unusable-gpu"] if self.gpus else [])]

        def ask(client: HostClient) -> dict[str, Any]:
            job = {"address": self.address, "port": self.free_port, "processes": sum(slots)}
            own = {"first_rank": first_ranks[client.name], "devices": client.host.devices}
            own |= {"interface": self.facts[client.name]["interface"], "gpus": bool(self.gpus)}
            return client.ask("all_reduce", ALL_REDUCE_S + 10, **job, **own, deadline_s=ALL_REDUCE_S)

        times = []
        for client, answer in _all(self.clients, ask):
            yield from check_all_reduce(client.host, answer)
            times += [rank for rank in answer.get("ranks", ()) if "latency_s" in rank]
        if len(times) == sum(slots):
            slowest, speed = max(t["latency_s"] for t in times), min(t["gb_per_s"] for t in times)
            how = f"{times[0]['backend']} over {', '.join(sorted(set(interfaces)))}"
            self.notes.append(f"all-reduce ({how}): {slowest * 1e3:.2f} ms, 64 MiB at {speed:.2f} GB/s")

    def job(self, model: dict[str, Any]) -> Iterator[Finding]:
        if "unchecked" in model:
            self.notes.append(f"not checked: model, strategy and batch, as {model['unchecked']}")
            return
        self.checked.append("script")
        if "error" in model:
            yield Finding("script", self.first, model["error"])
            return
        self.checked += ["strategy", "batch"]
        memory_gib = min((gpu["memory_gib"] for gpu in self.gpus if gpu["memory_gib"]), default=None)
        yield from check_job(self.first, self.config, model, memory_gib)


def deepspeed_problem(host: str) -> str | None:
    """Return why the question that DeepSpeed's launcher asks a host by ssh fails, else None."""
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
    """The answers of all clients, which are asked in parallel."""
    with ThreadPoolExecutor(len(clients) or 1) as threads:
        return list(zip(clients, threads.map(ask, clients), strict=True))


def check_hosts(hosts: list[Host], facts: Facts) -> Iterator[Finding]:
    for host in hosts:
        if (own := facts.get(host.name)) is None:
            continue
        gpus = own["devices"]["gpus"]
        if problem := _driver_problem(own):
            broken = own["devices"]["problem"]
            code = "driver-broken" if broken else "old-driver" if own["torch_cuda"] else "unusable-gpu"
            yield Finding(code, host.name, problem)
        if gpus and max(host.devices) >= len(gpus):
            what = f"slot {max(host.devices)} in the hostfile, and {len(gpus)} GPUs"
            yield Finding("slots", host.name, what)
        for number in host.devices:
            if number < len(gpus):
                yield from _check_gpu(host.name, number, gpus[number])
        is_unknown = own["own_name_is"] is None  # torchrun --standalone waits for it on one host, too
        if is_unknown or (len(hosts) > 1 and own["own_name_is"].startswith("127.")):
            what = f"its own name {own['hostname']} is {own['own_name_is'] or 'unknown'} there"
            yield Finding("own-name", host.name, what, False)
        if own["shm_gib"] < SHM_GIB:
            what = f"/dev/shm has {own['shm_gib'] * 1024:.0f} MiB"
            yield Finding("shm", host.name, what, own["shm_gib"] < SHM_LEAST_GIB)
        if own["open_files"] < OPEN_FILES:
            yield Finding("open-files", host.name, f"{own['open_files']} open files at most", False)
        if own["data"] and own["data"]["problem"]:
            yield Finding("data", host.name, own["data"]["problem"])


def _driver_problem(own: dict[str, Any]) -> str | None:
    return driver_problem(Devices(**own["devices"]), own["torch_cuda"])


def _check_gpu(host: str, number: int, gpu: dict[str, Any]) -> Iterator[Finding]:
    held = gpu["memory_gib"] - gpu["free_gib"] if gpu["memory_gib"] else 0
    if held > HELD_PART * (gpu["memory_gib"] or 0):
        by = f" by process {', '.join(gpu['held_by'])}" if gpu["held_by"] else ""
        yield Finding("device-memory", host, f"{held:.1f} GiB of GPU {number} are held{by}", False)
    if gpu["capability"] and gpu["capability"] < [8, 0]:
        name = f"{gpu['name']}, {'.'.join(map(str, gpu['capability']))}"
        yield Finding("precision", host, f"GPU {number} ({name}) has no native bf16", False)
    if not all(gpu["peers"]):
        yield Finding("peer-access", host, f"GPU {number} does not reach all others directly", False)


def compare_hosts(facts: Facts) -> Iterator[Finding]:
    """Findings about differences between hosts. The most common value counts as right."""
    every = facts.items()
    rows = [  # code, name, the value on each host, fails
        *(
            (code, name, {host: own[code].get(name) for host, own in every}, True)
            for code in ("versions", "code")
            for name in sorted({name for own in facts.values() for name in own[code]})
        ),
        ("slots", "a GPU", {host: bool(own["devices"]["gpus"]) for host, own in every}, True),
        ("driver", "driver", {host: own["devices"]["driver"] for host, own in every}, False),
        ("driver", "NCCL", {host: own["nccl"] for host, own in every}, True),
    ]
    digests = {h: own["data"]["digest"] for h, own in every if "digest" in (own["data"] or {})}
    for code, name, values, fails in [*rows, ("data", "the content of --data", digests, True)]:
        usual = Counter(values.values()).most_common(1)[0][0] if values else None
        for host, value in values.items():
            if value != usual:
                yield Finding(code, host, f"{name} is {value}, elsewhere {usual}", fails)
    for host, own in facts.items():
        if abs(own["clock_off_s"]) > CLOCK_S:
            yield Finding("clock", host, f"its clock is {own['clock_off_s']:+.1f} s off this one's", False)


def check_all_reduce(host: Host, answer: dict[str, Any]) -> Iterator[Finding]:
    """Findings from a host's answer; the same one of several devices is reported once."""
    devices_of: dict[tuple[str, str], list[int]] = {}  # code and what is wrong -> devices
    for device, own in zip(host.devices, answer.get("ranks", ()), strict=False):
        major, minor = own.get("capability") or (0, 0)
        if "unusable" in own:
            key = ("unusable-gpu", own["unusable"])
        elif major and not any(runs_on(built, major, minor) for built in own["built_for"]):
            what = f"torch is built for {', '.join(own['built_for'])}, the GPU is sm_{major}{minor}"
            key = ("unsupported-gpu", what)
        elif own["problem"]:
            key = ("all-reduce", own["problem"])
        else:
            continue
        devices_of.setdefault(key, []).append(device)
    for (code, what), devices in devices_of.items():
        of = "" if len(devices) == len(host.devices) else f"slot {', '.join(map(str, devices))}: "
        yield Finding(code, host.name, of + what)
    if "error" in answer:
        yield Finding("all-reduce", host.name, answer["error"])


def check_job(
    host: str, config: dict[str, Any], model: dict[str, Any], memory_gib: float | None
) -> Iterator[Finding]:
    """Checks that strategy, model and data fit. memory_gib: of the smallest GPU; None without a GPU."""
    fsdp = config.get("distributed_type") == "FSDP"
    zero3 = "zero3" in str((config.get("deepspeed_config") or {}).get("deepspeed_config_file"))
    needed_gib = 16 * model["parameters"] / 2**30  # fp32 weights, gradients, two moments
    if (fsdp or zero3) and memory_gib and 0 < needed_gib < memory_gib / 5:
        kind = "FSDP" if fsdp else "ZeRO-3"
        size = f"{needed_gib:.2f} GiB with its optimizer, on {memory_gib:.0f} GiB"
        yield Finding("strategy", host, f"{kind} for a model that takes {size}", False)
    if model["images"] and model["batch_size"] > model["images"]:
        what = f"--batch_size {model['batch_size']} of {model['images']:,} images in {model['data']}"
        yield Finding("batch", host, what)
