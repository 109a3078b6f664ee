"""Starts a job on all hosts of a hostfile, over ssh, and ends it on all of them.

    python launch.py --hostfile hostfile --config_file accelerate_configs/ddp_2x2gpu.yaml train_cnn_a.py
    python launch.py --mode single-node --gpus 2
    python launch.py --hostfile hostfile --min_hosts 2 train_vit.py --s3 s3://my-bucket/vit-1

Each host runs one `accelerate launch`, with its rank, the first host's address and the interface to it. The
project and its Python must be at the same path on every host, and ssh must work without a prompt. The default
script is train_hello.py. Words after the script, and unknown flags, are passed to the script.

Each host has a log file. When one fails, all are stopped, and the first failure is shown. After Ctrl-C,
SIGTERM or SIGHUP all save and exit (status 75), and the same command resumes. A second Ctrl-C kills all.

With --min_hosts the job is elastic: the others continue when a host is lost or told to stop, and hosts may
join. Run launch.py on a machine outside of the job, as its own host can't be lost.
"""

import argparse
import math
import os
import re
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from onecurve.flags.recipe import Job
from onecurve.system.cli import (
    check_positive,
    command_parser,
    config_file,
    run_command,
    split_at_script,
    underscores,
)
from onecurve.system.files import read_yaml, write_text
from onecurve.system.gpus import list_gpus
from onecurve.system.paths import ROOT
from onecurve.system.text import did_you_mean
from onecurve.upstream.python_ import flag_names
from tools.launch.elastic import ElasticJob
from tools.launch.hosts import NAME, Host, read_hostfile, select
from tools.launch.job import JobRunner, LaunchPlan

SINGLE = "accelerate_configs/single_gpu.yaml"
DDP = "accelerate_configs/ddp_2gpu.yaml"  # for any number of processes
# Variables that DeepSpeed's launcher may pass to other hosts. None is secret.
DEEPSPEED_ENV = ["CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG"]
DEEPSPEED_ENV += ["NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "HF_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS"]
DEEPSPEED_ENV += ["WANDB_MODE", "WANDB_PROJECT"]


def main() -> int:
    flags = parse_flags(sys.argv[1:])
    if flags.write_deepspeed_env:
        return write_deepspeed_env()
    if flags.min_hosts is None and flags.max_hosts is None:
        return JobRunner(plan(flags)).run(flags.dry_run)
    return elastic_job(flags).run()


def parse_flags(argv: list[str]) -> argparse.Namespace:
    """The launcher's flags; `script` has the script and its flags."""
    parser = command_parser(__doc__, "%(prog)s [flags] [SCRIPT [its flags]]")
    add = parser.add_argument
    add("--hostfile", type=Path, help="`name slots=N` lines (default: hostfile)")
    add("--include", default="", help="hosts and GPUs, as worker-1@worker-2:0,2")
    add("--exclude", default="", help="hosts and GPUs to leave out, in the same form")
    add("--config_file", type=config_file, help="one of accelerate_configs/ (default: DDP)")
    add("--mode", choices=("single-node", "multi-node"), help="name hosts by flags, without a hostfile")
    add(
        "--gpus",
        type=int,
        help="GPUs of this machine, with --mode single-node (default: all, or one process)",
    )
    add(
        "--gpus_per_node",
        type=int,
        help="GPUs per host, with --mode multi-node (default: as this machine has)",
    )
    add("--master_node", help="the first host, with --mode multi-node")
    add("--worker_nodes", help="the other hosts, as a,b,c, with --mode multi-node")
    add("--port", type=int, default=29500, help="of the first host (default: %(default)s)")
    add("--master_addr", help="the first host's address (default: as ssh reaches it)")
    add("--min_hosts", type=int, help="elastic: hosts may leave and join, at least this many stay")
    add("--max_hosts", type=int, help="with --min_hosts: the most hosts at once")
    add("--env", action="append", default=[], metavar="NAME", help="pass this variable")
    add("--log_dir", type=Path, help="for each host's log (default: runs/launch/<time>)")
    add("--dry_run", action="store_true", help="print each host's command, and exit")
    add("--write_deepspeed_env", action="store_true", help="write .deepspeed_env for DeepSpeed, and exit")
    mine, script = split_at_script(argv)
    flags, rest = parser.parse_known_args(mine)
    check_positive(parser, flags, "gpus", "gpus_per_node")
    if script and rest:
        meant = did_you_mean(rest[0], flag_names(parser))
        parser.error(f"unknown flag {rest[0]}" + (meant and f": {meant}"))
    flags.script = script or ["train_hello.py", *rest]
    return flags


def elastic_job(flags: argparse.Namespace) -> ElasticJob:
    hosts, most = _hosts(flags), flags.max_hosts or math.inf
    if flags.min_hosts is None or flags.dry_run:
        raise ValueError("--max_hosts needs --min_hosts, and --dry_run does not go with them")
    if not 1 <= flags.min_hosts <= min(len(hosts), most):
        raise ValueError(
            f"--min_hosts {flags.min_hosts}: must be from 1 to --max_hosts, and to the {len(hosts)} hosts"
        )
    flags.config_file = flags.config_file or DDP
    log_dir = flags.log_dir = plan(flags).log_dir
    plan_for, read_hosts = partial(plan, flags), partial(_hosts, flags)
    return ElasticJob(plan_for, read_hosts, log_dir, flags.min_hosts, flags.max_hosts)


def plan(flags: argparse.Namespace, hosts: list[Host] | None = None) -> LaunchPlan:
    """The launch on these hosts, by default on all. ValueError for a mistake, before connecting to a host."""
    hosts = hosts or _hosts(flags)
    if not 1 <= flags.port <= 65535:
        raise ValueError(f"--port {flags.port}: must be from 1 to 65535")
    processes = sum(len(host.devices) for host in hosts)
    config = flags.config_file or (SINGLE if processes == 1 else DDP)
    for file in (config, flags.script[0]):
        if not (ROOT / file).is_file():
            raise ValueError(f"{file}: no such file in {ROOT}")
    if missing := [name.partition("=")[0] for name in flags.env if name not in os.environ]:
        raise ValueError(f"--env {missing[0]}: give the name of a variable of this environment, not a value")
    rehearsal = ["CUDA_VISIBLE_DEVICES"] if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else []
    env = {name: os.environ[name] for name in [*flags.env, *rehearsal]}
    log_dir = flags.log_dir or ROOT / "runs" / "launch" / time.strftime("%Y-%m-%d_%H-%M-%S")
    content = read_yaml("--config_file", ROOT / config)
    if content.get("distributed_type") in ("NO", False) and (processes > 1 or flags.min_hosts):
        reason = f"this job has {processes}" if processes > 1 else "hosts may join this job"
        raise ValueError(f"--config_file {config} starts one process, and {reason}: choose another, as {DDP}")
    needs_equal = "hybrid sharding" if "parallelism_config" in content else flags.min_hosts and "--min_hosts"
    if needs_equal and len({len(host.devices) for host in hosts}) > 1:
        slots = ", ".join(f"{host.name} {len(host.devices)}" for host in hosts)
        raise ValueError(f"{needs_equal} needs hosts with equal slots, not {slots}: see --include")
    given = re.findall(r" --timeout_s[ =](\d+)(?= |$)", " ".join(map(underscores, flags.script)))
    timeout_s = int(given[-1]) if given else Job.timeout_s
    launcher = ["--config_file", str(config), *_for_several(content, hosts, timeout_s)]
    return LaunchPlan(hosts, launcher, flags.script, env, flags.master_addr, flags.port, log_dir)


def _hosts(flags: argparse.Namespace) -> list[Host]:
    for_mode = {
        "single-node": ("gpus",),
        "multi-node": ("gpus_per_node", "master_node", "worker_nodes"),
        None: ("hostfile", "include", "exclude"),
    }
    for mode, names in for_mode.items():
        if mode != flags.mode and (given := [name for name in names if getattr(flags, name)]):
            needed = f"needs --mode {mode}" if mode else f"does not go with --mode {flags.mode}"
            raise ValueError(f"--{given[0]} {needed}")
    if flags.mode == "single-node":
        return [Host("localhost", tuple(range(flags.gpus or _gpus_here())))]
    if flags.mode == "multi-node":
        if not (flags.master_node and flags.worker_nodes):
            raise ValueError("--mode multi-node needs --master-node and --worker-nodes")
        hosts = [flags.master_node, *flags.worker_nodes.split(",")]
        if wrong := [name for name in hosts if not NAME.fullmatch(name)]:
            raise ValueError(f"{wrong[0]!r} is no host's name")
        if len(set(hosts)) < len(hosts):
            raise ValueError(f"--master-node and --worker-nodes name a host twice: {', '.join(hosts)}")
        slots = tuple(range(flags.gpus_per_node or _gpus_here()))
        return [Host(name, slots) for name in hosts]
    return select(read_hostfile(flags.hostfile or ROOT / "hostfile"), flags.include, flags.exclude)


def _gpus_here() -> int:
    """Return the number of this machine's GPUs, or 1 for a rehearsal."""
    is_rehearsal = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    return 1 if is_rehearsal else len(list_gpus().gpus) or 1


def _for_several(config: dict[str, Any], hosts: list[Host], timeout_s: int) -> list[str]:
    """Flags that the config needs on these hosts. Hybrid sharding shards within each host.

    torch's launchers would wait for one another for 600 s. DeepSpeed's other launchers would write the whole
    environment into a file and onto command lines.
    """
    flags = ["--rdzv_conf", f"timeout={timeout_s}"] if len(hosts) > 1 else []
    if config.get("distributed_type") == "DEEPSPEED" and len(hosts) > 1:
        flags += ["--deepspeed_multinode_launcher", "standard"]
    if "parallelism_config" in config:
        prefix, slots = "--parallelism_config_dp", len(hosts[0].devices)
        flags += [f"{prefix}_replicate_size", str(len(hosts)), f"{prefix}_shard_size", str(slots)]
    return flags


def write_deepspeed_env() -> int:
    """Writes what other hosts need: DeepSpeed puts it on command lines. Lines of other variables stay."""
    file = Path(".deepspeed_env")
    lines = file.read_text().splitlines() if file.exists() else []
    # Without blank lines, on which DeepSpeed's reader fails
    kept = [line for line in lines if line.strip() and line.partition("=")[0] not in DEEPSPEED_ENV]
    ours = [f"{name}={os.environ[name]}" for name in DEEPSPEED_ENV if os.environ.get(name)]
    write_text(file, "".join(f"{line}\n" for line in [*kept, *ours]))
    print(f"{file}: {', '.join(line.partition('=')[0] for line in ours) or 'nothing of this environment'}")
    if kept:
        print(f"kept as they were, check that none is secret: {', '.join(k.partition('=')[0] for k in kept)}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
