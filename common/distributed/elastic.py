"""Elastic jobs: the maximum number of hosts, and the batch with any number of them."""

import contextlib
import os
import re
import time

import psutil

from common.recipe import Batch, Job, share_out, usable_processes
from common.system.env import MOST_HOSTS, PER_DEVICE, PROCESSES, processes_per_host, rank, report, world_size
from common.system.text import plural

RUN_NODES = re.compile(r"--?nnodes[= ](\d+):(\d+)(?!\d)")
SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def check_processes() -> None:
    """ValueError if this process's job has another number of processes than launch.py has started."""
    promised, processes = int(os.environ.get(PROCESSES, world_size())), world_size()
    if processes != promised:
        found = "this one is alone" if processes == 1 else f"this one is in a job of {processes}"
        raise ValueError(
            f"launch.py started {promised} processes for this job, and {found}: give --config_file one of"
            " accelerate_configs/ for several processes"
        )


def hosts() -> int:
    return max(1, world_size() // processes_per_host())


def most_hosts() -> int:
    """The number of hosts of an elastic job, including those that are away; of other jobs their hosts.

    It comes from launch.py's LAUNCH_MOST_HOSTS, or from torchrun's --nnodes=MIN:MAX.
    """
    told = os.environ.get(MOST_HOSTS) or _torchruns_most()
    return max(int(told), hosts()) if told else hosts()


def elastic_batch(job: Job) -> Batch:
    """The arithmetic of the batch, with the same micro-batch for any number of hosts.

    Unless --per_device_batch_size is given, the micro-batch is that with all hosts: with fewer hosts each
    process accumulates more of them. If this number of hosts does not divide the batch, torchrun's round
    waits job.timeout_s for another number. ValueError with the numbers that can train.
    """
    processes, most = world_size(), most_hosts() * processes_per_host()
    per_device = job.per_device_batch_size
    if per_device is None and PER_DEVICE in os.environ:
        per_device = int(os.environ[PER_DEVICE])
    elif per_device is None and job.batch_size % most == 0:
        per_device = job.batch_size // most
    if rank() == 0:
        report("batch", batch_size=job.batch_size, per_device=per_device or 1)
    try:
        return share_out(job.batch_size, per_device, processes, job.unit)
    except ValueError as error:
        if not _torchruns_most():
            raise
        usable = usable_processes(job.batch_size, per_device, most, processes_per_host())
        numbers = " or ".join(str(number // processes_per_host()) for number in usable) or "no number"
        if rank() == 0:
            print(
                f"{plural(hosts(), 'host')} can't share the batch: waiting up to {job.timeout_s} s for"
                f" another number of hosts ({numbers})",
                flush=True,
            )
        time.sleep(job.timeout_s)  # torchrun ends this process when a host joins or leaves
        raise ValueError(f"{error}; of the hosts {numbers} can train") from None


def replacement_problem() -> str | None:
    """Why no replaced or added host can join this torchrun job; None if one can, or on one host.

    torch 2.15 shares the agent's store: in a later round new agents do not learn the address of rank 0, wait
    for 60 s, and fail (torch.distributed.elastic.rendezvous.dynamic_rendezvous).
    """
    by_torchrun = os.environ.get("TORCHELASTIC_RUN_ID", "none") != "none"
    shares_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not (by_torchrun and shares_store and (hosts() > 1 or most_hosts() > 1)):
        return None
    return f"no other host can join this job after a fault: set {SHARED_STORE}=1 before torchrun on each host"


def _torchruns_most() -> str | None:
    """MAX of torchrun's --nnodes=MIN:MAX, as text, from the agent's command line; None without it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    found = re.fullmatch(r"(\d+):(\d+)", os.environ.get("PET_NNODES", ""))
    with contextlib.suppress(psutil.Error):  # the agent has just ended
        found = RUN_NODES.search(" ".join(psutil.Process(os.getppid()).cmdline())) or found
    return found[2] if found else None
