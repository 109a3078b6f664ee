"""Check all hosts for problems that would make a job hang or fail.

    python doctor.py
    python doctor.py --hostfile hostfile --config_file accelerate_configs/ddp_2x2gpu.yaml
    python doctor.py --data /data/cifar10 --output_dir /shared/run --s3 s3://bucket/prefix
    python doctor.py --config_file accelerate_configs/fsdp_2x4gpu.yaml train_vit.py --batch_size 512

The doctor connects to all hosts as launch.py does and checks them in parallel. After the host
checks, the doctor runs an all-reduce with one process per slot. The printed table contains a row for each
check and a column for each host. Each finding includes a remedy and a code that docs/trouble.md explains.
Pass a train script and its flags to also check the model, strategy and data.

The exit status is 1 if the job would fail and 0 otherwise, even if there are warnings.
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
from tools.launch.hosts import Host, add_host_flags, close_and_wait, read_hostfile, select_hosts


def main() -> int:
    flags = parse_flags(sys.argv[1:])
    clients: list[HostClient] = []
    try:
        hosts = select_hosts(read_hostfile(flags.hostfile), flags.include, flags.exclude)
        config = read_yaml("--config_file", flags.config_file) if flags.config_file else {}
        clients += [HostClient(host) for host in hosts]
        checks = Checks(clients, flags, config)
        with ThreadPoolExecutor(1) as background:  # loads the model during the host checks
            model = background.submit(_inspect_model, flags.script).result if flags.script else None
            findings = checks.run(model)
        print_findings(hosts, checks, findings)
        if flags.json:
            content = {"findings": [dataclasses.asdict(f) | {"remedy": f.remedy} for f in findings]}
            flags.json.write_text(json.dumps(content | {"facts": checks.facts_by_host}, indent=1) + "\n")
    finally:
        close_and_wait(clients, 2)
    return int(any(finding.fails for finding in findings))


def parse_flags(argv: list[str]) -> argparse.Namespace:
    """Return the doctor's flags, with the script and its flags in the attribute `script`."""
    parser = command_parser(__doc__, "%(prog)s [flags] [SCRIPT [SCRIPT_FLAGS ...]]")
    add_host_flags(parser, hostfile=ROOT / "hostfile")
    add = parser.add_argument
    config_help = "The job's Accelerate config file, for example accelerate_configs/ddp_2gpu.yaml."
    add("--config_file", type=config_file, metavar="FILE", help=config_help)
    data_help = "Training data that every host must be able to read: a folder, or an S3 prefix with shards."
    add("--data", metavar="PATH|URL", help=data_help)
    add("--output_dir", default="runs", metavar="FOLDER", help="Run folder to check. Default: runs.")
    s3_help = "S3 prefix that the first host must be able to read and write."
    add("--s3", metavar="s3://BUCKET/PREFIX", help=s3_help)
    add("--json", type=Path, metavar="FILE", help="JSON file for the findings and the facts about each host.")
    script_help = "SCRIPT is a train script. Pass a script to also check its model, strategy and data."
    parser.add_argument_group("script", script_help)
    words, script = split_at_script(argv)
    flags = parser.parse_args(words)
    flags.script = script
    return flags


def _inspect_model(script: list[str]) -> dict[str, Any]:
    """Return facts about a script's model, data and batch.

    A subprocess imports torch and collects the facts.
    """
    file = ROOT / script[0]
    # Never run a script that declares no recipe.
    if file.is_file() and "onecurve.flags.recipe" not in file.read_text(errors="replace"):
        return {"unchecked": f"{script[0]} declares no recipe from onecurve.flags.recipe"}
    words = [sys.executable, "-m", "onecurve.models.script", *script]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"error": (done.stderr.strip() or done.stdout.strip() or "no answer").splitlines()[-1]}


def print_findings(hosts: list[Host], checks: Checks, findings: list[Finding]) -> None:
    """Print the table of checks, then all findings with their remedies. Failures come before warnings."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    console = Console(highlight=False)
    table = Table(Column("check", no_wrap=True), *(host.name for host in hosts))
    ordered = sorted(findings, key=_severity)
    worst = {(f.code, f.host): "FAILS" if f.fails else "warn" for f in reversed(ordered)}
    for code in dict.fromkeys([*checks.checked_codes, *(finding.code for finding in findings)]):
        marks = {host.name: "ok" if host.name in checks.facts_by_host else " " for host in hosts}
        table.add_row(code, *(worst.get((code, name), mark) for name, mark in marks.items()))
    if console.measure(table, options=console.options.update(max_width=10_000)).maximum <= console.width:
        console.print(table)
    else:  # rich would truncate a table that is wider than the console
        console.print(f"Checks on {len(hosts)} hosts: {', '.join(checks.checked_codes)}", soft_wrap=True)
    for (is_warning, code), group in groupby(ordered, key=_severity):
        for finding in group:
            label = "warning" if is_warning else "FAILS"
            console.print(escape(f"{label} [{code}] {finding.host}: {finding.what}"), soft_wrap=True)
        console.print(escape(f"    {FINDINGS[code]['remedy']}"), soft_wrap=True)
    for remark in checks.remarks:
        console.print(escape(remark), soft_wrap=True)
    fails = sum(finding.fails for finding in findings)
    summary = f"The job would fail: {fails} of {len(findings)} findings are failures."
    console.print(summary if fails else "The doctor found no problem that would make the job fail.")


def _severity(finding: Finding) -> tuple[bool, str]:
    return not finding.fails, finding.code


if __name__ == "__main__":
    sys.exit(run_command(main))
