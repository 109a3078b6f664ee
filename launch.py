"""Start a job on all hosts in a hostfile over SSH, and stop the job on all hosts when one host fails.

    python launch.py --hostfile hostfile --config_file accelerate_configs/ddp_2x2gpu.yaml train_cnn_a.py
    python launch.py --mode single-node --gpus 2
    python launch.py --hostfile hostfile --min_hosts 2 train_vit.py --s3 s3://my-bucket/vit-1

On each host, launch.py starts one `accelerate launch` with the host's rank, the first host's address and the
network interface that reaches the first host. The project and its Python must be at the same path on every
host, and ssh must work without a prompt. The default script is train_hello.py. The script receives unknown
flags and all arguments after its name.

launch.py writes each host's output to a log file. When one host fails, launch.py stops all hosts and shows
the first failure. After Ctrl-C, SIGTERM or SIGHUP, all processes save a checkpoint and exit with status 75,
and the same command resumes the job. A second Ctrl-C kills all processes.

With --min_hosts the job is elastic. When a host is lost or shut down, the remaining hosts continue. New hosts
may join a running job. Run launch.py on a machine outside the job, because a job can't survive the loss of
the machine that runs launch.py.
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
from tools.launch.hosts import HOST_NAME, Host, add_host_flags, read_hostfile, select_hosts
from tools.launch.job import JobRunner, LaunchPlan

SINGLE = "accelerate_configs/single_gpu.yaml"
DDP = "accelerate_configs/ddp_2gpu.yaml"  # config file that works for any number of processes
# Environment variables that DeepSpeed's launcher may pass to other hosts. None of these variables is secret.
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
    """Return the launcher's flags, with the script and its flags in the attribute `script`."""
    parser = command_parser(__doc__, "%(prog)s [flags] [SCRIPT [SCRIPT_FLAGS ...]]")
    add_host_flags(parser)
    add = parser.add_argument
    config_help = (
        "Accelerate config file, for example accelerate_configs/fsdp_4gpu.yaml. Default: ddp_2gpu.yaml, or"
        " single_gpu.yaml for one process."
    )
    add("--config_file", type=config_file, metavar="FILE", help=config_help)
    mode_help = (
        "Hosts to use instead of a hostfile. `single-node` uses this machine. `multi-node` uses the hosts in"
        " --master_node and --worker_nodes."
    )
    add("--mode", choices=("single-node", "multi-node"), help=mode_help)
    gpus_help = (
        "Number of GPUs to use on this machine, with --mode single-node. Default: all GPUs, or one process"
        " on a machine without GPUs."
    )
    add("--gpus", type=int, metavar="N", help=gpus_help)
    per_node_help = "Number of GPUs per host, with --mode multi-node. Default: this machine's number of GPUs."
    add("--gpus_per_node", type=int, metavar="N", help=per_node_help)
    add("--master_node", metavar="HOST", help="Name of the first host, with --mode multi-node.")
    add("--worker_nodes", metavar="HOST,HOST", help="Names of all other hosts, with --mode multi-node.")
    elastic_help = (
        "Minimum number of hosts. --min_hosts makes the job elastic, so that hosts may leave and join."
    )
    add("--min_hosts", type=int, metavar="N", help=elastic_help)
    add("--max_hosts", type=int, metavar="N", help="Maximum number of hosts, with --min_hosts.")
    env_help = "Name of an environment variable to pass to every process. The flag can be repeated."
    add("--env", action="append", default=[], metavar="NAME", help=env_help)
    add(
        "--log_dir",
        type=Path,
        metavar="FOLDER",
        help="Folder for the hosts' log files. Default: runs/launch/<time>.",
    )
    add("--dry_run", action="store_true", help="Print each host's command, then exit.")
    add("--write_deepspeed_env", action="store_true", help="Write .deepspeed_env for DeepSpeed, then exit.")
    parser.add_argument_group("script", "SCRIPT is the script to launch. Default: train_hello.py.")
    words, script = split_at_script(argv)
    flags, rest = parser.parse_known_args(words)
    check_positive(parser, flags, "gpus", "gpus_per_node")
    if script and rest:
        suggestion = did_you_mean(rest[0], flag_names(parser))
        parser.error(f"unknown flag {rest[0]}" + (suggestion and f": {suggestion}"))
    flags.script = script or ["train_hello.py", *rest]
    return flags


def elastic_job(flags: argparse.Namespace) -> ElasticJob:
    hosts, most = _hosts(flags), flags.max_hosts or math.inf
    if flags.min_hosts is None or flags.dry_run:
        raise ValueError("--max_hosts needs --min_hosts, and neither can be combined with --dry_run")
    if not 1 <= flags.min_hosts <= min(len(hosts), most):
        raise ValueError(
            f"--min_hosts {flags.min_hosts} must be at least 1, and at most --max_hosts and the number of"
            f" hosts ({len(hosts)})"
        )
    flags.config_file = flags.config_file or DDP
    log_dir = flags.log_dir = plan(flags).log_dir
    plan_for, read_hosts = partial(plan, flags), partial(_hosts, flags)
    return ElasticJob(plan_for, read_hosts, log_dir, flags.min_hosts, flags.max_hosts)


def plan(flags: argparse.Namespace, hosts: list[Host] | None = None) -> LaunchPlan:
    """Plan the launch on the given hosts, by default on all hosts, without connecting to any host.

    Raises:
        ValueError: If a flag, the hostfile or the config file contains a mistake.
    """
    hosts = hosts or _hosts(flags)
    if not 1 <= flags.port <= 65535:
        raise ValueError(f"--port {flags.port} must be from 1 to 65535")
    processes = sum(len(host.devices) for host in hosts)
    config = flags.config_file or (SINGLE if processes == 1 else DDP)
    for file in (config, flags.script[0]):
        if not (ROOT / file).is_file():
            raise ValueError(f"{file} does not exist in {ROOT}")
    if missing := [name.partition("=")[0] for name in flags.env if name not in os.environ]:
        raise ValueError(
            f"--env {missing[0]} is not set in this environment. Pass the name of a variable, not a value."
        )
    rehearsal = ["CUDA_VISIBLE_DEVICES"] if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else []
    env = {name: os.environ[name] for name in [*flags.env, *rehearsal]}
    log_dir = flags.log_dir or ROOT / "runs" / "launch" / time.strftime("%Y-%m-%d_%H-%M-%S")
    content = read_yaml("--config_file", ROOT / config)
    if content.get("distributed_type") in ("NO", False) and (processes > 1 or flags.min_hosts):
        reason = f"this job has {processes} processes" if processes > 1 else "hosts may join this job"
        raise ValueError(
            f"--config_file {config} starts only one process, but {reason}. Pass a different config, for"
            f" example {DDP}."
        )
    needs_equal = "hybrid sharding" if "parallelism_config" in content else flags.min_hosts and "--min_hosts"
    if needs_equal and len({len(host.devices) for host in hosts}) > 1:
        slots = ", ".join(f"{host.name} {len(host.devices)}" for host in hosts)
        raise ValueError(
            f"{needs_equal} needs the same number of slots on every host, not {slots}. Select slots with"
            " --include."
        )
    timeouts = re.findall(r" --timeout_s[ =](\d+)(?= |$)", " ".join(map(underscores, flags.script)))
    timeout_s = int(timeouts[-1]) if timeouts else Job.timeout_s
    launcher = ["--config_file", str(config), *_launcher_flags(content, hosts, timeout_s)]
    return LaunchPlan(hosts, launcher, flags.script, env, flags.master_addr, flags.port, log_dir)


def _hosts(flags: argparse.Namespace) -> list[Host]:
    flags_of_mode = {
        "single-node": ("gpus",),
        "multi-node": ("gpus_per_node", "master_node", "worker_nodes"),
        None: ("hostfile", "include", "exclude"),
    }
    for mode, names in flags_of_mode.items():
        if mode != flags.mode and (misplaced := [name for name in names if getattr(flags, name)]):
            reason = f"needs --mode {mode}" if mode else f"can't be combined with --mode {flags.mode}"
            raise ValueError(f"--{misplaced[0]} {reason}")
    if flags.mode == "single-node":
        return [Host("localhost", tuple(range(flags.gpus or _local_gpus())))]
    if flags.mode == "multi-node":
        if not (flags.master_node and flags.worker_nodes):
            raise ValueError("--mode multi-node needs --master-node and --worker-nodes")
        hosts = [flags.master_node, *flags.worker_nodes.split(",")]
        if invalid := [name for name in hosts if not HOST_NAME.fullmatch(name)]:
            raise ValueError(f"{invalid[0]!r} is not a valid host name")
        if len(set(hosts)) < len(hosts):
            raise ValueError(
                f"--master-node and --worker-nodes contain the same host twice: {', '.join(hosts)}"
            )
        slots = tuple(range(flags.gpus_per_node or _local_gpus()))
        return [Host(name, slots) for name in hosts]
    return select_hosts(read_hostfile(flags.hostfile or ROOT / "hostfile"), flags.include, flags.exclude)


def _local_gpus() -> int:
    """Return the number of GPUs in this machine, or 1 in a rehearsal without GPUs."""
    is_rehearsal = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    return 1 if is_rehearsal else len(list_gpus().gpus) or 1


def _launcher_flags(config: dict[str, Any], hosts: list[Host], timeout_s: int) -> list[str]:
    """Return the `accelerate launch` flags that a config needs on the given hosts.

    --rdzv_conf replaces the 600 s that torch's launchers wait for each other. DeepSpeed's `standard` launcher
    is the only DeepSpeed launcher that does not write the whole environment to a file and to command lines.
    Hybrid sharding shards the model within each host.
    """
    flags = ["--rdzv_conf", f"timeout={timeout_s}"] if len(hosts) > 1 else []
    if config.get("distributed_type") == "DEEPSPEED" and len(hosts) > 1:
        flags += ["--deepspeed_multinode_launcher", "standard"]
    if "parallelism_config" in config:
        prefix, slots = "--parallelism_config_dp", len(hosts[0].devices)
        flags += [f"{prefix}_replicate_size", str(len(hosts)), f"{prefix}_shard_size", str(slots)]
    return flags


def write_deepspeed_env() -> int:
    """Write the variables in DEEPSPEED_ENV to .deepspeed_env. Keep all other lines in the file.

    DeepSpeed passes all variables in .deepspeed_env on command lines.
    """
    file = Path(".deepspeed_env")
    lines = file.read_text().splitlines() if file.exists() else []
    # Drop blank lines, because DeepSpeed can't read them.
    kept = [line for line in lines if line.strip() and line.partition("=")[0] not in DEEPSPEED_ENV]
    written = [f"{name}={os.environ[name]}" for name in DEEPSPEED_ENV if os.environ.get(name)]
    write_text(file, "".join(f"{line}\n" for line in [*kept, *written]))
    names = [line.partition("=")[0] for line in written]
    print(f"{file}: {', '.join(names) or 'none of the variables is set'}")
    if kept:
        kept_names = ", ".join(line.partition("=")[0] for line in kept)
        print(f"{file} also contains {kept_names}. Check that none of these variables is secret.")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
