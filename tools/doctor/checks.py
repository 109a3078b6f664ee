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

from onecurve.system.gpus import GpuInventory, driver_problem, runs_on
from onecurve.system.text import plural
from tools.launch.hosts import Connection, Host, master_address, start_module_on

FactsByHost = dict[str, dict[str, Any]]  # result of facts.describe_host() on each host, by host name

ANSWER_TIMEOUT_S = 30
DATA_TIMEOUT_S = 300  # timeout for facts about a host with --data, which may contain a million files
S3_TIMEOUT_S = 180
ALL_REDUCE_TIMEOUT_S = 60
NO_RESPONSE = "the host did not respond"
TOLERATED_CLOCK_ERROR_S = 2.0
SHM_WARNING_GIB = 1.0  # free space in /dev/shm below which the doctor warns
SHM_FAILURE_GIB = 0.0625  # free space in /dev/shm below which the job would fail; default in containers
DISK_WARNING_GIB = 10.0  # free space in --output_dir below which the doctor warns
DISK_FAILURE_GIB = 1.0  # free space in --output_dir below which the job would fail
MIN_OPEN_FILES = 4096  # minimum open-file limit without a warning
MIN_SPARE_RATIO = 5  # minimum ratio of a GPU's memory to the model's memory that makes sharding unnecessary
PARAMETER_BYTES = 16  # per parameter: 4 bytes each for the weight, the gradient and both Adam moments
MIN_BF16_CAPABILITY = [8, 0]  # minimum compute capability with native bf16
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
        """Start tools/doctor/facts.py on the host, over SSH unless the host is this machine."""
        super().__init__(host, start_module_on(host.name, "tools.doctor.facts"))
        self.name = host.name
        self.last_line = ""  # last line of the host's output that is not an event

    def ask(self, question: str, timeout_s: float = ANSWER_TIMEOUT_S, **arguments: Any) -> dict[str, Any]:
        """Call a function of tools/doctor/facts.py on the host, and return the function's result.

        If the function fails, return the key `error` with the reason. If the host does not answer within
        `timeout_s` seconds or the connection ends, also return the key `gone` (True).

        Args:
            question: Name of the function, a key in facts.QUESTIONS.
            timeout_s: Maximum number of seconds until the answer.
            arguments: Keyword arguments of the function.
        """
        # Kill the process at the timeout, because a late answer could be mistaken for the answer to the next
        # question.
        kill_timer = threading.Timer(timeout_s, self.process.kill)
        kill_timer.start()
        self.request(question, **arguments)
        for event_or_line in self.events_and_lines():
            if not isinstance(event_or_line, str):
                kill_timer.cancel()
                return event_or_line["answer"]  # facts.py sends no other events
            self.last_line = event_or_line.strip()
        # The process has ended. The timer is finished only if it has killed the process.
        if kill_timer.finished.is_set():
            self.last_line = f"{NO_RESPONSE} within {timeout_s:.0f} s"
        kill_timer.cancel()
        return {"error": self.last_line or f"exit status {self.process.wait()}", "gone": True}


class Checks:
    """Sequence of all checks. Some checks use the results of earlier checks.

    Args:
        clients: Connections to the job's hosts, starting with the first host.
        flags: Flags of doctor.py.
        launch_config: Contents of the accelerate config, or an empty dict.
    """

    def __init__(self, clients: list[HostClient], flags: argparse.Namespace, launch_config: dict[str, Any]):
        self.clients, self.flags, self.launch_config = clients, flags, launch_config
        self.first_host_name = clients[0].name
        self.facts_by_host: FactsByHost = {}
        self.checked_codes: list[str] = []  # codes of all checked problems, in check order
        self.remarks: list[str] = []  # sentences to print after the findings

    def run(self, inspect_model: Callable[[], dict[str, Any]] | None) -> list[Finding]:
        """Run all checks and return their findings.

        Args:
            inspect_model: Function that returns facts about the script's model, or None if there is no script
                to check.
        """
        findings: list[Finding] = []
        check_methods = [self.host_findings, self.deepspeed_findings, self.network_findings]
        check_methods += [self.folder_findings, self.s3_findings, self.all_reduce_findings]
        for check_method in check_methods:
            findings += check_method()
            if len(self.facts_by_host) < len(self.clients):
                break  # the remaining checks need facts about all hosts
        if inspect_model:
            findings += self.job_findings(inspect_model())
        return findings

    def host_findings(self) -> Iterator[Finding]:
        """Collect facts about all hosts in self.facts_by_host, and check the facts."""
        self.checked_codes += ["ssh", "clock", "versions", "driver", "old-driver", "driver-broken", "code"]
        self.checked_codes += ["slots", "own-name", "shm", "open-files"]
        self.checked_codes += ["data"] if self.flags.data else []

        def ask_facts(client: HostClient) -> dict[str, Any]:
            asked_at_s = time.time()
            facts_timeout_s = DATA_TIMEOUT_S if self.flags.data else ANSWER_TIMEOUT_S
            facts_answer = client.ask("describe_host", facts_timeout_s, data_location=self.flags.data)
            # The host read the clock between `asked_at_s` and now. The clock is correct if its reading is
            # within this interval.
            host_clock_s = facts_answer.get("clock", asked_at_s)
            behind_s = min(host_clock_s - asked_at_s, 0)  # negative if the host's clock is slow
            ahead_s = max(host_clock_s - time.time(), 0)  # positive if the host's clock is fast
            return facts_answer | {"clock_off_s": behind_s + ahead_s}

        for client, facts_answer in _ask_all(self.clients, ask_facts):
            if "error" in facts_answer:
                yield Finding(self._failure_code(facts_answer), client.name, facts_answer["error"])
            else:
                self.facts_by_host[client.name] = facts_answer
        yield from check_hosts([client.host for client in self.clients], self.facts_by_host)
        yield from compare_hosts(self.facts_by_host)
        gpu_inventories = [host_facts["devices"] for host_facts in self.facts_by_host.values()]
        self.gpu_facts = [gpu for gpu_inventory in gpu_inventories for gpu in gpu_inventory["gpus"]]
        if self.gpu_facts:  # check_hosts() has also checked each GPU
            self.checked_codes += ["device-memory", "peer-access", "precision"]
        else:
            self.remarks.append("No host has a GPU. The job would be a rehearsal on CPUs, with gloo.")

    def _failure_code(self, failed_answer: dict[str, Any]) -> str:
        """Return the finding code for a host that returned an error instead of facts."""
        if "Host key" in failed_answer["error"]:  # ssh's message is `Host key verification failed.`
            return "host-key"
        if self.flags.data and failed_answer["error"].startswith(NO_RESPONSE):
            return "data"  # the timeout probably expired while the host was reading --data
        # Without the key `gone`, the connection works, but describe_host() failed.
        return "ssh" if "gone" in failed_answer else "facts"

    def deepspeed_findings(self) -> Iterator[Finding]:
        """Check that `deepspeed --hostfile` can connect, if DeepSpeed is installed on any host.

        A problem is only a warning, because launch.py may still connect.
        """
        if not any(host_facts["versions"]["deepspeed"] for host_facts in self.facts_by_host.values()):
            return
        self.checked_codes.append("deepspeed")
        ssh_answers = _ask_all(self.clients, lambda client: {"problem": deepspeed_problem(client.name)})
        for client, ssh_answer in ssh_answers:
            if ssh_answer["problem"]:
                ssh_description = f"ssh {client.name} hostname: {ssh_answer['problem']}"
                yield Finding("deepspeed", client.name, ssh_description, fails=False)
        if len(self.clients) > 1 and shutil.which("pdsh") is None:
            pdsh_description = "pdsh is not installed on this machine"
            yield Finding("deepspeed", self.first_host_name, pdsh_description, fails=False)

    def network_findings(self) -> Iterator[Finding]:
        """Check that every host can connect to --port on the first host.

        Add each host's network interface to self.facts_by_host. tools/doctor/facts.py on the first host keeps
        the port open until the doctor ends.
        """
        self.checked_codes += ["interface", "port-taken"]
        self.first_host_address = self.flags.master_addr or master_address(list(self.facts_by_host.values()))

        def ask_route(client: HostClient) -> dict[str, Any]:
            return client.ask("find_route", first_host_address=self.first_host_address)

        for client, route_answer in _ask_all(self.clients, ask_route):
            self.facts_by_host[client.name]["interface"] = route_answer.get("interface")
            if "error" in route_answer:
                yield Finding("interface", client.name, route_answer["error"])
            elif len(self.clients) > 1 and route_answer["address"].startswith("127."):
                address_text = f"the first host's address {self.first_host_address}"
                loopback_description = f"{address_text} is a loopback address on this host"
                yield Finding("interface", client.name, loopback_description)
        first_client, *other_clients = self.clients
        port_answer = first_client.ask("listen_on_port", port=self.flags.port)
        self.free_port = port_answer.get("free_port")  # for the all-reduce, because --port stays in use
        if port_problem := port_answer.get("taken") or port_answer.get("error"):
            yield Finding("port-taken", first_client.name, f"port {self.flags.port}: {port_problem}")
            return
        self.checked_codes.append("port-closed")

        def ask_connection(client: HostClient) -> dict[str, Any]:
            return client.ask("connect_to_port", address=self.first_host_address, port=self.flags.port)

        for client, connection_answer in _ask_all(other_clients, ask_connection):
            if tcp_problem := connection_answer.get("refused") or connection_answer.get("error"):
                port_text = f"can't connect to {self.first_host_address}:{self.flags.port}: {tcp_problem}"
                yield Finding("port-closed", client.name, port_text)

    def folder_findings(self) -> Iterator[Finding]:
        """Check whether all hosts can write to --output_dir, and whether the hosts share the folder.

        The first host creates a token file for which all hosts look. A problem is only a warning on hosts
        other than the first, because only rank 0 writes to the folder.
        """
        self.checked_codes += ["output", "disk"]
        folder = str(Path(self.flags.output_dir).absolute())
        token_name = f".doctor-{secrets.token_hex(4)}"
        first_client, *other_clients = self.clients

        def ask_folder(client: HostClient) -> dict[str, Any]:
            is_first = client is first_client
            return client.ask("probe_folder", folder=folder, token_name=token_name, creates_token=is_first)

        first_probe_answer = ask_folder(first_client)
        probe_answers = [(first_client, first_probe_answer), *_ask_all(other_clients, ask_folder)]
        if token_folder := first_probe_answer.get("folder"):
            first_client.ask("remove_token", token_file=f"{token_folder}/{token_name}")
        for client, probe_answer in probe_answers:
            is_first = client is first_client
            if io_problem := probe_answer.get("problem") or probe_answer.get("error"):
                yield Finding("output", client.name, f"can't write to {folder}: {io_problem}", fails=is_first)
            elif probe_answer["free_gib"] < DISK_WARNING_GIB:
                disk_text = f"only {probe_answer['free_gib']:.1f} GiB are free in {probe_answer['folder']}"
                is_disk_full = probe_answer["free_gib"] < DISK_FAILURE_GIB
                yield Finding("disk", client.name, disk_text, fails=is_first and is_disk_full)
        if other_clients:
            if all(probe_answer.get("sees") for _, probe_answer in probe_answers):
                self.remarks.append(f"{folder} is shared by all hosts.")
            else:
                folder_explanation = "The job uses the folder on the first host, which is sufficient."
                self.remarks.append(f"{folder} is not shared. {folder_explanation}")

    def s3_findings(self) -> Iterator[Finding]:
        """Check that the first host can write, read and delete an object under --s3."""
        if self.flags.s3:
            self.checked_codes.append("s3")
            first_client, *_ = self.clients
            s3_answer = first_client.ask("probe_s3", S3_TIMEOUT_S, url=self.flags.s3)
            if s3_problem := s3_answer.get("problem") or s3_answer.get("error"):
                yield Finding("s3", self.first_host_name, s3_problem)

    def all_reduce_findings(self) -> Iterator[Finding]:
        """Run an all-reduce with one process per device. It may hang even between GPUs in one host.

        Skip the all-reduce for a single process, and if a host has an unusable driver or no interface.
        """
        slot_counts = [len(client.host.devices) for client in self.clients]
        process_count = sum(slot_counts)
        # accumulate() also yields the total number of processes, which zip() ignores.
        first_ranks = accumulate(slot_counts, initial=0)
        first_rank_by_host = dict(zip(self.facts_by_host, first_ranks, strict=False))
        has_unusable_driver = any(map(_find_driver_problem, self.facts_by_host.values()))
        host_interfaces = [host_facts["interface"] for host_facts in self.facts_by_host.values()]
        if process_count < 2 or has_unusable_driver or not all(host_interfaces):
            return
        self.checked_codes += ["all-reduce"]
        self.checked_codes += ["unsupported-gpu", "unusable-gpu"] if self.gpu_facts else []

        def ask_all_reduce(client: HostClient) -> dict[str, Any]:
            return client.ask(
                "run_all_reduce",
                timeout_s=ALL_REDUCE_TIMEOUT_S + 10,  # more than job_timeout_s, so that the host can answer
                first_host_address=self.first_host_address,
                port=self.free_port,
                first_rank=first_rank_by_host[client.name],
                process_count=process_count,
                device_indices=client.host.devices,
                uses_gpus=bool(self.gpu_facts),
                interface=self.facts_by_host[client.name]["interface"],
                job_timeout_s=ALL_REDUCE_TIMEOUT_S,
            )

        measured_answers = []  # answers of the processes that completed the all-reduce
        for client, host_answer in _ask_all(self.clients, ask_all_reduce):
            yield from check_all_reduce(client.host, host_answer)
            rank_answers = host_answer.get("ranks", ())
            measured_answers += [rank_answer for rank_answer in rank_answers if "latency_s" in rank_answer]
        if len(measured_answers) == process_count:
            latency_ms = max(rank_answer["latency_s"] for rank_answer in measured_answers) * 1e3
            gb_per_s = min(rank_answer["gb_per_s"] for rank_answer in measured_answers)
            interfaces_text = ", ".join(sorted(set(host_interfaces)))
            transport_text = f"{measured_answers[0]['backend']} over {interfaces_text}"
            speed_text = f"{latency_ms:.2f} ms, 64 MiB at {gb_per_s:.2f} GB/s"
            self.remarks.append(f"all-reduce ({transport_text}): {speed_text}")

    def job_findings(self, model_facts: dict[str, Any]) -> Iterator[Finding]:
        """Check the strategy and the batch size of the user's train script.

        `model_facts` contains facts about the script's model and data. If the facts are missing, it contains
        only the reason, under the key `unchecked` (for a remark) or `error` (for a finding).
        """
        if "unchecked" in model_facts:
            skip_reason = model_facts["unchecked"]
            self.remarks.append(f"The model, strategy and batch size were not checked, because {skip_reason}")
            return
        self.checked_codes.append("script")
        if "error" in model_facts:
            yield Finding("script", self.first_host_name, model_facts["error"])
            return
        self.checked_codes += ["strategy", "batch"]
        gpu_sizes_gib = [gpu["memory_gib"] for gpu in self.gpu_facts if gpu["memory_gib"]]
        smallest_gpu_gib = min(gpu_sizes_gib, default=None)
        yield from check_job(self.first_host_name, self.launch_config, model_facts, smallest_gpu_gib)


def deepspeed_problem(host_name: str) -> str | None:
    """Test `ssh HOST hostname` with the DeepSpeed launcher's options. Return the failure reason, or None."""
    ssh_command = ["ssh", "-o", "PasswordAuthentication=no", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
    ssh_command += [host_name, "hostname"]
    try:
        ssh_process = subprocess.run(ssh_command, capture_output=True, text=True, timeout=ANSWER_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"{NO_RESPONSE} within {ANSWER_TIMEOUT_S} s"
    except OSError as ssh_error:
        return str(ssh_error)
    if ssh_process.returncode == 0:
        return None
    *_, last_error_line = (ssh_process.stderr.strip() or f"exit status {ssh_process.returncode}").splitlines()
    return last_error_line


def _ask_all(clients: list[HostClient], ask: Callable[[HostClient], dict]) -> list[tuple[HostClient, dict]]:
    """Call ask(client) for all clients in parallel, and return (client, answer) pairs in the same order."""
    with ThreadPoolExecutor(len(clients) or 1) as thread_pool:  # 0 threads are not allowed
        return list(zip(clients, thread_pool.map(ask, clients), strict=True))


def check_hosts(hosts: list[Host], facts_by_host: FactsByHost) -> Iterator[Finding]:
    """Check each host's facts separately. Skip hosts without facts.

    The checks cover the driver, the hostfile's slots, the GPUs, the host's own name, /dev/shm, the open-file
    limit and --data.
    """
    for host in hosts:
        if (host_facts := facts_by_host.get(host.name)) is None:
            continue
        gpu_facts = host_facts["devices"]["gpus"]
        if gpu_problem := _find_driver_problem(host_facts):
            finding_code = "old-driver"
            if host_facts["devices"]["problem"]:  # NVML can't list the GPUs
                finding_code = "driver-broken"
            elif host_facts["torch_cuda"] is None:  # torch was built without CUDA
                finding_code = "unusable-gpu"
            yield Finding(finding_code, host.name, gpu_problem)
        if gpu_facts and (last_slot := max(host.devices)) >= len(gpu_facts):
            gpus_text = plural(len(gpu_facts), "GPU")
            slot_text = f"the hostfile uses slot {last_slot} (counted from 0), but the host has {gpus_text}"
            yield Finding("slots", host.name, slot_text)
        for gpu_index in host.devices:
            if gpu_index < len(gpu_facts):
                yield from _check_gpu(host.name, gpu_index, gpu_facts[gpu_index])
        own_name_address = host_facts["own_name_is"]
        # Even in a job on one host, torchrun --standalone hangs if the host's name can't be resolved.
        if own_name_address is None or (len(hosts) > 1 and own_name_address.startswith("127.")):
            name_resolution = f"resolves to {own_name_address}" if own_name_address else "is unknown"
            name_description = f"the host's own name {host_facts['hostname']} {name_resolution} on the host"
            yield Finding("own-name", host.name, name_description, fails=False)
        if (shm_gib := host_facts["shm_gib"]) < SHM_WARNING_GIB:
            shm_description = f"/dev/shm has only {shm_gib * 1024:.0f} MiB of free space"
            yield Finding("shm", host.name, shm_description, fails=shm_gib < SHM_FAILURE_GIB)
        if (open_file_limit := host_facts["open_files"]) < MIN_OPEN_FILES:
            limit_description = f"a process can open at most {open_file_limit} files"
            yield Finding("open-files", host.name, limit_description, fails=False)
        if host_facts["data"] and host_facts["data"]["problem"]:
            yield Finding("data", host.name, host_facts["data"]["problem"])


def _find_driver_problem(host_facts: dict[str, Any]) -> str | None:
    """Return the reason why torch can't use the host's GPUs, or None if no reason is known."""
    return driver_problem(GpuInventory(**host_facts["devices"]), host_facts["torch_cuda"])


def _check_gpu(host_name: str, gpu_index: int, gpu: dict[str, Any]) -> Iterator[Finding]:
    """Warn about a GPU that is in use, lacks native bf16, or can't access the memory of other GPUs.

    `gpu` contains the GPU's properties from list_gpus(). Unknown properties are None.
    """
    used_gib = gpu["memory_gib"] - gpu["free_gib"] if gpu["memory_gib"] else 0
    if used_gib > TOLERATED_GPU_SHARE * (gpu["memory_gib"] or 0):
        user_text = f" by process {', '.join(gpu['held_by'])}" if gpu["held_by"] else ""
        usage_text = f"{used_gib:.1f} GiB of the memory of GPU {gpu_index} are already in use{user_text}"
        yield Finding("device-memory", host_name, usage_text, fails=False)
    if gpu["capability"] and gpu["capability"] < MIN_BF16_CAPABILITY:
        gpu_text = f"{gpu['name']}, compute capability {'.'.join(map(str, gpu['capability']))}"
        bf16_description = f"GPU {gpu_index} ({gpu_text}) does not support bf16 natively"
        yield Finding("precision", host_name, bf16_description, fails=False)
    if not all(gpu["peers"]):  # one boolean for each other GPU on the host
        peer_description = f"GPU {gpu_index} can't directly access the memory of all other GPUs"
        yield Finding("peer-access", host_name, peer_description, fails=False)


def compare_hosts(facts_by_host: FactsByHost) -> Iterator[Finding]:
    """Find differences between hosts. The most common value of each fact is considered correct."""
    hosts_and_facts = facts_by_host.items()
    for finding_code in ("versions", "code"):  # these facts are dicts, with the code as their key
        fact_names = {fact for host_facts in facts_by_host.values() for fact in host_facts[finding_code]}
        for fact_name in sorted(fact_names):
            value_by_host = {host: facts[finding_code].get(fact_name) for host, facts in hosts_and_facts}
            yield from _compare_values(finding_code, fact_name, value_by_host)
    gpu_presence = {host: _gpu_presence(facts["devices"]["gpus"]) for host, facts in hosts_and_facts}
    yield from _compare_values("slots", "a GPU", gpu_presence)
    data_by_host = {host: facts["data"] or {} for host, facts in hosts_and_facts}
    data_digests = {host: data["digest"] for host, data in data_by_host.items() if "digest" in data}
    yield from _compare_values("data", "the content of --data", data_digests)
    driver_versions = {host: facts["devices"]["driver"] for host, facts in hosts_and_facts}
    yield from _compare_values("driver", "driver", driver_versions, fails=False)
    nccl_versions = {host: facts["nccl"] for host, facts in hosts_and_facts}
    yield from _compare_values("driver", "NCCL", nccl_versions)
    for host_name, host_facts in hosts_and_facts:
        if abs(clock_error_s := host_facts["clock_off_s"]) > TOLERATED_CLOCK_ERROR_S:
            clock_description = f"the host's clock differs from this machine's by {clock_error_s:+.1f} s"
            yield Finding("clock", host_name, clock_description, fails=False)


def _compare_values(
    finding_code: str, fact_name: str, value_by_host: dict[str, Any], fails: bool = True
) -> Iterator[Finding]:
    """Yield a finding for each host on which a fact's value is not the most common value.

    Args:
        finding_code: Code of the findings.
        fact_name: Name of the fact in the findings.
        value_by_host: Value of the fact on each host.
        fails: True if the job would fail, or False to warn.
    """
    # most_common(1) is empty if there are no hosts.
    for usual_value, _count in Counter(value_by_host.values()).most_common(1):
        for host_name, host_value in value_by_host.items():
            if host_value != usual_value:
                difference = f"{fact_name} is {host_value} on this host, but {usual_value} on other hosts"
                yield Finding(finding_code, host_name, difference, fails)


def _gpu_presence(gpu_facts: list[Any]) -> str:
    return "present" if gpu_facts else "missing"


def check_all_reduce(host: Host, host_answer: dict[str, Any]) -> Iterator[Finding]:
    """Check a host's all-reduce results. Report a problem only once if several devices have it.

    `host_answer` is the result of facts.run_all_reduce(), or contains the key `error`.
    """
    slots_by_problem: dict[tuple[str, str], list[int]] = {}  # slots with a problem, by code and description
    rank_answers = host_answer.get("ranks", ())  # empty after an error
    for slot, rank_answer in zip(host.devices, rank_answers, strict=False):
        major, minor = rank_answer.get("capability") or (0, 0)  # (0, 0) if unknown, such as on a CPU
        if "unusable" in rank_answer:
            code_and_description = ("unusable-gpu", rank_answer["unusable"])
        elif major and not any(runs_on(arch_name, major, minor) for arch_name in rank_answer["built_for"]):
            architectures = ", ".join(rank_answer["built_for"])
            built_for_text = f"torch was built for {architectures}"
            problem_text = f"{built_for_text}, but the GPU's architecture is sm_{major}{minor}"
            code_and_description = ("unsupported-gpu", problem_text)
        elif rank_answer["problem"]:
            code_and_description = ("all-reduce", rank_answer["problem"])
        else:
            continue
        slots_by_problem.setdefault(code_and_description, []).append(slot)
    for (finding_code, problem_text), problem_slots in slots_by_problem.items():
        have_all_slots_failed = len(problem_slots) == len(host.devices)
        slot_prefix = "" if have_all_slots_failed else f"slot {', '.join(map(str, problem_slots))}: "
        yield Finding(finding_code, host.name, slot_prefix + problem_text)
    if "error" in host_answer:
        yield Finding("all-reduce", host.name, host_answer["error"])


def check_job(
    host_name: str, launch_config: dict[str, Any], model_facts: dict[str, Any], smallest_gpu_gib: float | None
) -> Iterator[Finding]:
    """Check that the strategy suits the model, and that the batch is not larger than the data set.

    Args:
        host_name: Name of the first host, to which all findings refer.
        launch_config: Contents of the accelerate config.
        model_facts: Facts about the script's model and data. `parameters` is 0 for an unknown model.
        smallest_gpu_gib: Memory in GiB of the GPU with the least memory, or None if the job has no GPUs.
    """
    is_fsdp = launch_config.get("distributed_type") == "FSDP"
    deepspeed_section = launch_config.get("deepspeed_config") or {}
    is_zero3 = "zero3" in str(deepspeed_section.get("deepspeed_config_file"))
    model_gib = PARAMETER_BYTES * model_facts["parameters"] / 2**30
    model_fits_easily = smallest_gpu_gib is not None and 0 < model_gib < smallest_gpu_gib / MIN_SPARE_RATIO
    if (is_fsdp or is_zero3) and model_fits_easily:
        sharding_strategy = "FSDP" if is_fsdp else "ZeRO-3"
        model_text = f"a model that needs only {model_gib:.2f} GiB including the optimizer"
        shard_text = f"{sharding_strategy} shards {model_text}, but each GPU has {smallest_gpu_gib:.0f} GiB"
        yield Finding("strategy", host_name, shard_text, fails=False)
    batch_size, image_count = model_facts["batch_size"], model_facts["images"]
    if image_count and batch_size > image_count:
        data_text = f"the {image_count:,} images in {model_facts['data']}"
        yield Finding("batch", host_name, f"--batch_size {batch_size} is larger than {data_text}")
