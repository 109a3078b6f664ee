"""Finds what would make a job hang or fail on its hosts, before it is started.

    python doctor.py
    python doctor.py --hostfile hostfile --config_file accelerate_configs/ddp_2x2gpu.yaml
    python doctor.py --data /data/cifar10 --output_dir /shared/run --s3 s3://bucket/prefix
    python doctor.py --config_file accelerate_configs/fsdp_2x4gpu.yaml train_vit.py --batch_size 512

It asks all hosts in parallel, over ssh as launch.py does; then one process per slot takes part in an
all-reduce. The table has a row for each check and a column for each host. Each finding has a remedy, and a
code that docs/trouble.md explains. Given a script and its flags, it also checks model, strategy and data.

The exit status is 1 if the job would fail, else 0, also with warnings. --json FILE writes all findings.
Eight virtual hosts with one slot each took 1.6 s on 2 CPU cores, and 9 s more for the all-reduce, as each
process imports torch.
"""

import argparse
import dataclasses
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from common.system.cli import command_parser, run_command, split_at_script
from common.system.files import read_accelerate_config
from common.system.gpus import Devices, driver_problem
from common.system.paths import ROOT
from tools.doctor.checks import (
    DISK_GIB,
    DISK_LEAST_GIB,
    REMEDIES,
    Finding,
    check_all_reduce,
    check_hosts,
    check_job,
    compare_hosts,
)
from tools.doctor.client import ASK_S, HostClient
from tools.launch.hosts import Host, close_and_wait, master_address, read_hostfile, select

ALL_REDUCE_S = 60


def main() -> int:
    flags = parse(sys.argv[1:])
    clients: list[HostClient] = []
    try:
        hosts = select(read_hostfile(flags.hostfile), flags.include, flags.exclude)
        config = read_accelerate_config(flags.config_file) if flags.config_file else {}
        clients += [HostClient(host) for host in hosts]
        checks = Checks(clients, flags, config)
        findings = checks.run()
        show(hosts, checks, findings)
        if flags.json:
            content = {"findings": [dataclasses.asdict(f) | {"remedy": f.remedy} for f in findings]}
            flags.json.write_text(json.dumps(content | {"facts": checks.facts}, indent=1) + "\n")
    finally:
        close_and_wait([client.process for client in clients], 2)
    return int(any(finding.fails for finding in findings))


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command_parser(__doc__, "%(prog)s [flags] [SCRIPT [its flags]]")
    parser.add_argument("--hostfile", type=Path, default=ROOT / "hostfile")
    parser.add_argument("--include", default="", help="as launch.py's")
    parser.add_argument("--exclude", default="", help="as launch.py's")
    parser.add_argument("--config_file", type=Path, help="one of accelerate_configs/")
    parser.add_argument("--data", help="a folder, or s3://bucket/prefix of shards, that each host must reach")
    parser.add_argument("--data_root", action="append", default=[], help="as the train scripts'")
    parser.add_argument("--output_dir", help="the run's folder (default: runs)", default="runs")
    parser.add_argument("--s3", help="s3://bucket/prefix to test from the first host")
    parser.add_argument("--port", type=int, default=29500)
    parser.add_argument("--master_addr", help="the first host's address (default: as ssh reaches it)")
    parser.add_argument("--json", type=Path, help="write the findings to this file")
    mine, script = split_at_script(argv)
    flags = parser.parse_args(mine)
    flags.script = script
    return flags


class Checks:
    """The checks in order: each needs the results of those before it."""

    def __init__(self, clients: list[HostClient], flags: argparse.Namespace, config: dict[str, Any]):
        self.clients, self.flags, self.config = clients, flags, config
        self.first = clients[0].name
        self.facts: dict[str, dict[str, Any]] = {}
        self.checked: list[str] = []  # codes, in order
        self.notes: list[str] = []

    def run(self) -> list[Finding]:
        found: list[Finding] = []
        with ThreadPoolExecutor(1) as beside:
            model = beside.submit(_model, self.flags.script) if self.flags.script else None
            for check in (self.hosts, self.network, self.folders, self.s3, self.all_reduce):
                found += check()
                if len(self.facts) < len(self.clients):
                    break  # later checks need all hosts
            found += self.job(model.result()) if model else []
        return found

    def hosts(self) -> Iterator[Finding]:
        self.checked += ["ssh", "clock", "versions", "driver", "old-driver", "driver-broken", "code", "slots"]
        self.checked += ["own-name", "shm", "open-files", *(["data"] if self.flags.data else [])]
        within_s = 300 if self.flags.data else ASK_S  # a folder may have a million files

        def ask(client: HostClient) -> dict[str, Any]:
            began = time.time()
            roots = [root for given in self.flags.data_root for root in given.split(",")]
            answer = client.ask("facts", within_s, data=self.flags.data, data_root=roots)
            # The host read its clock between `began` and now: a time within that interval is right.
            clock = answer.get("clock", began)
            return answer | {"clock_off_s": min(clock - began, 0) + max(clock - time.time(), 0)}

        for client, answer in self._all(ask):
            if "error" in answer:
                code = "host-key" if "Host key" in answer["error"] else "ssh" if "gone" in answer else "facts"
                yield Finding(code, client.name, answer["error"], True)
            else:
                self.facts[client.name] = answer
        hosts = [client.host for client in self.clients]
        yield from check_hosts(hosts, self.facts)
        yield from compare_hosts(self.facts)
        self.gpus = [gpu for own in self.facts.values() for gpu in own["devices"]["gpus"]]
        if self.gpus:
            self.checked += ["device-memory", "peer-access", "precision"]
        else:
            self.notes.append("no GPUs: the job would be a rehearsal, on gloo processes")

    def network(self) -> Iterator[Finding]:
        self.checked += ["interface", "port-taken"]
        names = [client.name for client in self.clients]
        ends = [[self.facts[name][key] for name in names] for key in ("reached_at", "asked_from")]
        self.address = self.flags.master_addr or master_address(*ends)
        for client, answer in self._all(lambda client: client.ask("route", master=self.address)):
            self.facts[client.name]["interface"] = answer.get("interface")
            if "error" in answer:
                yield Finding("interface", client.name, answer["error"], True)
            elif len(names) > 1 and answer["address"].startswith("127."):
                what = f"the first host's address {self.address} is this host's loopback"
                yield Finding("interface", client.name, what, True)
        first, *others = self.clients
        answer = first.ask("listen", port=self.flags.port)
        if answer.get("taken") or "error" in answer:
            what = f"port {self.flags.port}: {answer.get('taken') or answer['error']}"
            yield Finding("port-taken", first.name, what, True)
            return
        self.checked.append("port-closed")
        question = {"address": self.address, "port": self.flags.port}
        for client, answer in self._all(lambda client: client.ask("connect", **question), others):
            if problem := answer.get("refused") or answer.get("error"):
                what = f"{self.address}:{self.flags.port} is not reached: {problem}"
                yield Finding("port-closed", client.name, what, True)

    def folders(self) -> Iterator[Finding]:
        """Checks --output_dir. Only rank 0 writes, so a problem on another host is a warning."""
        self.checked += ["output", "disk"]
        question: dict[str, Any] = {
            "folder": str(Path(self.flags.output_dir).absolute()),
            "token": f".doctor-{secrets.token_hex(4)}",
        }
        first, *others = self.clients
        answers = [(first, first.ask("writable", **question, leave=True))]
        answers += self._all(lambda client: client.ask("writable", **question, leave=False), others)
        if token_in := answers[0][1].get("folder"):
            first.ask("remove_token", file=f"{token_in}/{question['token']}")
        for client, answer in answers:
            if problem := answer.get("problem") or answer.get("error"):
                what = f"{question['folder']} can't be written to: {problem}"
                yield Finding("output", client.name, what, client is first)
            elif answer["free_gib"] < DISK_GIB:
                what = f"{answer['free_gib']:.1f} GiB are free in {answer['folder']}"
                yield Finding(
                    "disk", client.name, what, client is first and answer["free_gib"] < DISK_LEAST_GIB
                )
        if others:
            shared = all(answer.get("sees") for _, answer in answers)
            kind = "shared" if shared else "not shared: the first host's is used, which is enough"
            self.notes.append(f"{question['folder']} is {kind}")

    def s3(self) -> Iterator[Finding]:
        if self.flags.s3:
            self.checked.append("s3")
            answer = self.clients[0].ask("s3", within_s=180, url=self.flags.s3)
            if problem := answer.get("problem") or answer.get("error"):
                yield Finding("s3", self.first, problem, True)

    def all_reduce(self) -> Iterator[Finding]:
        """Runs a process per device, as the job does, because GPUs of one host may hang, too."""
        slots = [len(client.host.devices) for client in self.clients]
        processes = sum(slots)
        first_ranks = dict(zip(self.facts, accumulate(slots, initial=0), strict=False))
        unusable = any(
            driver_problem(Devices(**own["devices"]), own["torch_cuda"]) for own in self.facts.values()
        )
        if processes < 2 or unusable or not all(own.get("interface") for own in self.facts.values()):
            return
        self.checked += ["all-reduce", *(["unsupported-gpu", "unusable-gpu"] if self.gpus else [])]
        port = self.clients[0].ask("free_port").get("port")

        def ask(client: HostClient) -> dict[str, Any]:
            job = {"address": self.address, "port": port, "processes": processes, "gpus": bool(self.gpus)}
            own = {"first_rank": first_ranks[client.name], "devices": client.host.devices}
            own["interface"] = self.facts[client.name]["interface"]
            return client.ask("all_reduce", ALL_REDUCE_S + 10, **job, **own, deadline_s=ALL_REDUCE_S)

        times = []
        for client, answer in self._all(ask):
            yield from check_all_reduce(client.host, answer)
            times += [rank for rank in answer.get("ranks", ()) if "latency_s" in rank]
        if len(times) == processes:
            slowest, speed = max(t["latency_s"] for t in times), min(t["gb_per_s"] for t in times)
            interfaces = ", ".join(sorted({own["interface"] for own in self.facts.values()}))
            how = f"{times[0]['backend']} over {interfaces}"
            self.notes.append(f"all-reduce ({how}): {slowest * 1e3:.2f} ms, 64 MiB at {speed:.2f} GB/s")

    def job(self, model: dict[str, Any]) -> Iterator[Finding]:
        self.checked.append("script")
        if "error" in model:
            yield Finding("script", self.first, model["error"], True)
            return
        self.checked += ["strategy", "batch"]
        memory_gib = min((gpu["memory_gib"] for gpu in self.gpus if gpu["memory_gib"]), default=None)
        yield from check_job(self.first, self.config, model, memory_gib)

    def _all(
        self, ask: Callable[[HostClient], dict], clients: list[HostClient] | None = None
    ) -> list[tuple[HostClient, dict]]:
        clients = self.clients if clients is None else clients
        if not clients:
            return []
        with ThreadPoolExecutor(len(clients)) as threads:
            return list(zip(clients, threads.map(ask, clients), strict=True))


def _model(script: list[str]) -> dict[str, Any]:
    """Size, data and batch of the script with these flags, from a subprocess that imports torch."""
    done = subprocess.run(
        [sys.executable, "-m", "common.script", *script], cwd=ROOT, capture_output=True, text=True
    )
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"error": (done.stderr.strip() or done.stdout.strip() or "no answer").splitlines()[-1]}


# --- What is shown


def show(hosts: list[Host], checks: Checks, findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    console = Console(highlight=False)
    table = Table(Column("check", no_wrap=True), *(host.name for host in hosts))
    worst: dict[tuple[str, str], bool] = {}  # code, host -> True when the job would fail
    for finding in findings:
        key = (finding.code, finding.host)
        worst[key] = worst.get(key, False) or finding.fails
    missing = {host.name for host in hosts if host.name not in checks.facts}
    for code in dict.fromkeys([*checks.checked, *(finding.code for finding in findings)]):
        marks = []
        for host in hosts:
            key = (code, host.name)
            unknown = host.name in missing and key not in worst
            marks.append(" " if unknown else "ok" if key not in worst else "FAILS" if worst[key] else "warn")
        table.add_row(code, *marks)
    console.print(table)
    for (harmless, code), alike in groupby(sorted(findings, key=_kind), key=_kind):
        for finding in alike:
            kind = "warning" if harmless else "FAILS"
            console.print(escape(f"{kind} [{code}] {finding.host}: {finding.what}"), soft_wrap=True)
        console.print(escape(f"    {REMEDIES[code]}"), soft_wrap=True)
    for note in checks.notes:
        console.print(escape(note), soft_wrap=True)
    fails = sum(finding.fails for finding in findings)
    if fails:
        console.print(f"the job would fail: {fails} of {len(findings)} findings")
    else:
        console.print("nothing that would make the job fail was found")


def _kind(finding: Finding) -> tuple[bool, str]:
    return not finding.fails, finding.code


if __name__ == "__main__":
    sys.exit(run_command(main))
