"""Findings from the hosts' answers, each with a code that docs/trouble.md explains."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from common.system.gpus import Devices, driver_problem, runs_on
from tools.launch.hosts import Host

Facts = dict[str, dict[str, Any]]  # host's name -> its facts

CLOCK_S = 2.0
SHM_GIB, SHM_LEAST_GIB = 1.0, 0.0625  # the least is what a container has by default
DISK_GIB, DISK_LEAST_GIB = 10.0, 1.0
OPEN_FILES = 4096
HELD_PART = 0.1  # share of a GPU's memory that other processes may hold without a finding

# `python -m docs.generate` writes both tables into docs/trouble.md.
MEANINGS = {
    "ssh": "a host can't be reached, or does not have the project at this path",
    "host-key": "the host's key has changed, or is unknown",
    "facts": "a check failed on the host, but not because of ssh",
    "clock": "the host's clock is wrong",
    "versions": "Python or a package differs: ranks would refuse to start together",
    "driver": "driver or NCCL differ between hosts; different NCCLs hang in the first collective",
    "code": "a file of the project differs: ranks would refuse to start together",
    "old-driver": "the installed torch needs a newer driver: a training would run on the CPU",
    "driver-broken": "the driver does not answer: it was updated but not reloaded, a GPU failed, or a"
    " container lost it",
    "slots": "the hostfile has more slots than a host has GPUs, or some hosts have none",
    "device-memory": "another process holds a GPU's memory",
    "peer-access": "GPUs of a host exchange data only through its memory",
    "precision": "a GPU has no native bf16 and emulates it",
    "unsupported-gpu": "the installed torch has no code for this GPU",
    "unusable-gpu": "torch can't use a GPU that the driver reports",
    "interface": "no route to the first host, or its address is a loopback",
    "own-name": "/etc/hosts maps the host's own name to 127.0.1.1, as on Debian: torchrun with c10d does not"
    " recognise the host by its address",
    "port-taken": "another process listens on the port on the first host",
    "port-closed": "the other hosts can't connect to the first host",
    "shm": "/dev/shm is small: NCCL and DataLoader workers need it",
    "disk": "little disk space for checkpoints",
    "open-files": "the limit on open files is low",
    "data": "--data is missing or differs on a host, or the host can't read it from S3",
    "output": "the run folder is not writable; this matters on the first host only",
    "all-reduce": "the test all-reduce failed, or took too long",
    "s3": "a put, get or delete fails on the first host",
    "strategy": "FSDP or ZeRO-3 for a model that needs less than a fifth of a GPU's memory",
    "script": "the script, or one of its flags, is wrong",
    "batch": "the batch is larger than the data set",
}

REMEDIES = {
    "ssh": "make `ssh HOST` work without a prompt (a key, and its name in `~/.ssh/config`), and put the"
    " project with its .venv at this path there",
    "host-key": "compare the fingerprint with the one on the host's console, then `ssh-keyscan HOST >>"
    " ~/.ssh/known_hosts`",
    "facts": "see its message; the checks that need the answer were left out",
    "clock": "set the clock by NTP (`timedatectl set-ntp true`): S3 refuses requests that are minutes off",
    "versions": "run `make setup` on the host",
    "driver": "install the same driver on all hosts, or at least the same NCCL",
    "code": "bring the host to the same commit (`git pull`)",
    "old-driver": "install a newer driver, or a torch for this one: README, `GPUs and drivers`",
    "driver-broken": "restart the host, or the container; `dmesg | grep -i NVRM` says more",
    "slots": "correct the hostfile, or free the GPUs",
    "device-memory": "end the process that holds the memory, or leave the GPU out with --exclude HOST:N",
    "peer-access": "nothing to do on machines without NVLink: NCCL uses host memory, which is slower",
    "precision": "use --mixed_precision fp16 on GPUs before compute capability 8.0",
    "unsupported-gpu": "install a torch that was built for this GPU: README, `GPUs and drivers`",
    "unusable-gpu": "`python -c 'import torch; torch.cuda.init()'` must work on the host; `make setup`"
    " replaces a torch without CUDA (+cpu)",
    "interface": "set up a route between the hosts, or give --master_addr an address that all of them reach",
    "own-name": "give the host's name its real address in /etc/hosts; `launch.py` does not need this",
    "port-taken": "end that process, or give another --port",
    "port-closed": "open all ports among the hosts and to no others, as with a security group whose source is"
    " itself; jobs use many ports",
    "shm": "start the container with --ipc=host, or --shm-size=8g",
    "disk": "free disk space, or give another --output_dir",
    "open-files": "set `ulimit -n 65536` in the shell that starts the job, or in /etc/security/limits.conf",
    "data": "put the same files at the same path on each host; for s3:// credentials, too (the doctor does"
    " not see those of `launch.py --env`)",
    "output": "correct the folder's owner and mode: the user of ssh must be able to write there",
    "all-reduce": "see `port-closed` and `interface`; NCCL_DEBUG=INFO says more",
    "s3": "check the first host's credentials (where boto3 looks for them), the bucket's region and policy",
    "strategy": "use ddp_*.yaml, which is faster if the model fits",
    "script": "see its error: `python SCRIPT --print_config` with the same flags",
    "batch": "give a smaller --batch_size",
}


@dataclass(frozen=True)
class Finding:
    code: str
    host: str
    what: str
    fails: bool  # True if the job would fail; False for a warning

    @property
    def remedy(self) -> str:
        return REMEDIES[self.code].replace("HOST", self.host)


def check_hosts(hosts: list[Host], facts: Facts) -> Iterator[Finding]:
    for host in hosts:
        if (own := facts.get(host.name)) is None:
            continue
        gpus = own["devices"]["gpus"]
        yield from _check_driver(host.name, own)
        if gpus and max(host.devices) >= len(gpus):
            what = f"slot {max(host.devices)} in the hostfile, and {len(gpus)} GPUs"
            yield Finding("slots", host.name, what, True)
        for number in host.devices:
            if number < len(gpus):
                yield from _check_gpu(host.name, number, gpus[number])
        if len(hosts) > 1 and (own["own_name_is"] or "127.").startswith("127."):
            what = f"its own name {own['hostname']} is {own['own_name_is'] or 'unknown'} there"
            yield Finding("own-name", host.name, what, False)
        if own["shm_gib"] < SHM_GIB:
            what = f"/dev/shm has {own['shm_gib'] * 1024:.0f} MiB"
            yield Finding("shm", host.name, what, own["shm_gib"] < SHM_LEAST_GIB)
        if own["open_files"] < OPEN_FILES:
            yield Finding("open-files", host.name, f"{own['open_files']} open files at most", False)
        if own["data"] and own["data"]["problem"]:
            yield Finding("data", host.name, own["data"]["problem"], True)


def _check_driver(host: str, own: dict[str, Any]) -> Iterator[Finding]:
    devices = Devices(**own["devices"])
    if problem := driver_problem(devices, own["torch_cuda"]):
        code = "driver-broken" if devices.problem else "old-driver" if own["torch_cuda"] else "unusable-gpu"
        yield Finding(code, host, problem, True)


def _check_gpu(host: str, number: int, gpu: dict[str, Any]) -> Iterator[Finding]:
    held = gpu["memory_gib"] - gpu["free_gib"] if gpu["memory_gib"] else 0
    if held > HELD_PART * (gpu["memory_gib"] or 0):
        by = f" by process {', '.join(gpu['held_by'])}" if gpu["held_by"] else ""
        yield Finding("device-memory", host, f"{held:.1f} GiB of GPU {number} are held{by}", False)
    if gpu["capability"] and gpu["capability"] < [8, 0]:
        capability = ".".join(map(str, gpu["capability"]))
        yield Finding(
            "precision", host, f"GPU {number} ({gpu['name']}, {capability}) has no native bf16", False
        )
    if not all(gpu["peers"]):
        yield Finding("peer-access", host, f"GPU {number} does not reach all others directly", False)


def compare_hosts(facts: Facts) -> Iterator[Finding]:
    """Findings about differences between hosts. The most common value counts as right."""
    for name in next(iter(facts.values()))["versions"] if facts else ():
        yield from _differences(
            "versions", name, {h: own["versions"][name] for h, own in facts.items()}, True
        )
    gpus = {host: bool(own["devices"]["gpus"]) for host, own in facts.items()}
    yield from _differences("slots", "a GPU", gpus, True)
    if any(gpus.values()):
        yield from _differences(
            "driver", "driver", {h: o["devices"]["driver"] for h, o in facts.items()}, False
        )
    yield from _differences("driver", "NCCL", {h: own["nccl"] for h, own in facts.items()}, True)
    for file in sorted({file for own in facts.values() for file in own["code"]}):
        yield from _differences("code", file, {h: own["code"].get(file) for h, own in facts.items()}, True)
    digests = {h: own["data"]["digest"] for h, own in facts.items() if "digest" in (own["data"] or {})}
    yield from _differences("data", "the content of --data", digests, True)
    for host, own in facts.items():
        if abs(own["clock_off_s"]) > CLOCK_S:
            yield Finding("clock", host, f"its clock is {own['clock_off_s']:+.1f} s off this one's", False)


def _differences(code: str, name: str, values: dict[str, Any], fails: bool) -> Iterator[Finding]:
    if len(set(values.values())) < 2:
        return
    usual = Counter(values.values()).most_common(1)[0][0]
    for host, value in values.items():
        if value != usual:
            yield Finding(code, host, f"{name} is {value}, elsewhere {usual}", fails)


def check_all_reduce(host: Host, answer: dict[str, Any]) -> Iterator[Finding]:
    """Findings from a host's answer; the same one of several devices is reported once."""
    found: dict[tuple[str, str], list[int]] = {}  # code and what is wrong -> devices
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
        found.setdefault(key, []).append(device)
    for (code, what), devices in found.items():
        of = "" if len(devices) == len(host.devices) else f"slot {', '.join(map(str, devices))}: "
        yield Finding(code, host.name, of + what, True)
    if "error" in answer:
        yield Finding("all-reduce", host.name, answer["error"], True)


def check_job(
    host: str, config: dict[str, Any], model: dict[str, Any], memory_gib: float | None
) -> Iterator[Finding]:
    """Checks that strategy, model and data fit. memory_gib: of the smallest GPU; None without a GPU."""
    fsdp = config.get("distributed_type") == "FSDP"
    zero3 = "zero3" in str((config.get("deepspeed_config") or {}).get("deepspeed_config_file"))
    needed_gib = 16 * model["parameters"] / 2**30  # fp32 weights, gradients, two moments
    if (fsdp or zero3) and memory_gib and 0 < needed_gib < memory_gib / 5:
        kind = "FSDP" if fsdp else "ZeRO-3"
        what = (
            f"{kind} for a model that takes {needed_gib:.2f} GiB with its optimizer, on {memory_gib:.0f} GiB"
        )
        yield Finding("strategy", host, what, False)
    if model["images"] and model["batch_size"] > model["images"]:
        what = f"--batch_size {model['batch_size']} of {model['images']:,} images in {model['data']}"
        yield Finding("batch", host, what, True)
