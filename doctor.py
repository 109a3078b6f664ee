"""Finds what would make a job hang or fail on its hosts, before it is started.

    python doctor.py
    python doctor.py --hostfile hostfile --config_file accelerate_configs/ddp_2x2gpu.yaml
    python doctor.py --data /data/cifar10 --output_dir /shared/run --s3 s3://bucket/prefix
    python doctor.py --config_file accelerate_configs/fsdp_2x4gpu.yaml train_vit.py --batch_size 512

It asks all hosts in parallel, over ssh as launch.py does; then one process per slot takes part in an
all-reduce. The table has a row for each check and a column for each host. Each finding has a remedy, and a
code that docs/trouble.md explains. Given a script and its flags, it also checks model, strategy and data.

The exit status is 1 if the job would fail, else 0, also with warnings. --json FILE writes all findings.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

from onecurve.system.cli import command_parser, config_file, run_command, split_at_script
from onecurve.system.files import read_yaml
from onecurve.system.paths import ROOT
from tools.doctor.checks import FINDINGS, Checks, Finding, HostClient
from tools.launch.hosts import Host, close_and_wait, read_hostfile, select


def main() -> int:
    flags = parse_flags(sys.argv[1:])
    clients: list[HostClient] = []
    try:
        hosts = select(read_hostfile(flags.hostfile), flags.include, flags.exclude)
        config = read_yaml("--config_file", flags.config_file) if flags.config_file else {}
        clients += [HostClient(host) for host in hosts]
        checks = Checks(clients, flags, config)
        with ThreadPoolExecutor(1) as beside:
            model = beside.submit(_model, flags.script).result if flags.script else None
            findings = checks.run(model)
        print_findings(hosts, checks, findings)
        if flags.json:
            content = {"findings": [dataclasses.asdict(f) | {"remedy": f.remedy} for f in findings]}
            flags.json.write_text(json.dumps(content | {"facts": checks.facts}, indent=1) + "\n")
    finally:
        close_and_wait(clients, 2)
    return int(any(finding.fails for finding in findings))


def parse_flags(argv: list[str]) -> argparse.Namespace:
    parser = command_parser(__doc__, "%(prog)s [flags] [SCRIPT [its flags]]")
    parser.add_argument("--hostfile", type=Path, default=ROOT / "hostfile")
    parser.add_argument("--include", default="", help="as launch.py's")
    parser.add_argument("--exclude", default="", help="as launch.py's")
    parser.add_argument("--config_file", type=config_file, help="one of accelerate_configs/")
    parser.add_argument("--data", help="a folder, or s3://bucket/prefix of shards, that each host must reach")
    parser.add_argument("--output_dir", help="the run's folder (default: runs)", default="runs")
    parser.add_argument("--s3", help="s3://bucket/prefix to test from the first host")
    parser.add_argument("--port", type=int, default=29500)
    parser.add_argument("--master_addr", help="the first host's address (default: as ssh reaches it)")
    parser.add_argument("--json", type=Path, help="write the findings to this file")
    mine, script = split_at_script(argv)
    flags = parser.parse_args(mine)
    flags.script = script
    return flags


def _model(script: list[str]) -> dict[str, Any]:
    """Size, data and batch of the script with these flags, from a subprocess that imports torch."""
    file = ROOT / script[0]
    if file.is_file() and "onecurve.flags.recipe" not in file.read_text(errors="replace"):  # is not run
        return {"unchecked": f"{script[0]} declares no recipe of onecurve.flags.recipe"}
    words = [sys.executable, "-m", "onecurve.models.script", *script]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"error": (done.stderr.strip() or done.stdout.strip() or "no answer").splitlines()[-1]}


def print_findings(hosts: list[Host], checks: Checks, findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    console = Console(highlight=False)
    table = Table(Column("check", no_wrap=True), *(host.name for host in hosts))
    by_kind = sorted(findings, key=_kind)
    worst = {(f.code, f.host): "FAILS" if f.fails else "warn" for f in reversed(by_kind)}
    for code in dict.fromkeys([*checks.checked, *(finding.code for finding in findings)]):
        other = {host.name: "ok" if host.name in checks.facts else " " for host in hosts}
        table.add_row(code, *(worst.get((code, name), mark) for name, mark in other.items()))
    if console.measure(table, options=console.options.update(max_width=10_000)).maximum <= console.width:
        console.print(table)
    else:  # rich would cut the marks off
        console.print(f"{len(hosts)} hosts, checked: {', '.join(checks.checked)}", soft_wrap=True)
    for (harmless, code), alike in groupby(by_kind, key=_kind):
        for finding in alike:
            kind = "warning" if harmless else "FAILS"
            console.print(escape(f"{kind} [{code}] {finding.host}: {finding.what}"), soft_wrap=True)
        console.print(escape(f"    {FINDINGS[code]['remedy']}"), soft_wrap=True)
    for note in checks.notes:
        console.print(escape(note), soft_wrap=True)
    fails = sum(finding.fails for finding in findings)
    summary = f"the job would fail: {fails} of {len(findings)} findings"
    console.print(summary if fails else "nothing that would make the job fail was found")


def _kind(finding: Finding) -> tuple[bool, str]:
    return not finding.fails, finding.code


if __name__ == "__main__":
    sys.exit(run_command(main))
