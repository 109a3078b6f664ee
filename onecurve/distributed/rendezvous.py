"""Rendezvous of a job's processes: the interface, the agent's store, and the batch of an elastic job."""

import contextlib
import os
import re
import time
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist

from onecurve.flags.recipe import Batch, Job, share_out, usable_processes
from onecurve.system.env import (
    MOST_HOSTS,
    PER_DEVICE,
    PROCESSES,
    is_on,
    processes_per_host,
    rank,
    report,
    world_size,
)
from onecurve.system.output import log
from onecurve.system.processes import interface_problem, interface_to, parents
from onecurve.system.text import plural

SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def name_interface() -> None:
    """Sets GLOO_SOCKET_IFNAME, unless it is set: to loopback on one host, else to the route to the master.

    gloo would listen at the address of the host's name: on one host that may be one that others reach, and
    objects between ranks are pickles; on several it is 127.0.1.1 on Debian. gloo carries the messages about
    signals beside NCCL, and everything in a rehearsal. ValueError for a name that no interface has.
    """
    if world_size() == 1 or "MASTER_ADDR" not in os.environ:
        return
    if problem := interface_problem(os.environ, backend() == "nccl"):
        raise ValueError(problem)
    is_one_host = world_size() == processes_per_host()
    with contextlib.suppress(ValueError):
        name, mine = interface_to("127.0.0.1" if is_one_host else os.environ["MASTER_ADDR"])
        # On the master its own name may be a loopback address; without the variable gloo finds another.
        if is_one_host or not mine.startswith("127."):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def backend() -> str:
    """The backend of the process group: NCCL between GPUs, else gloo."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def join_agents_store(timeout_s: int) -> None:
    """Creates the process group in the store of torchrun's agent, below a prefix for this attempt.

    torch 2.15 keeps that store over restarts, with the addresses of dead processes (pytorch #167302). Each
    agent counts restarts by itself, and the counts may differ (#135712). So rank 0 names the attempt, in a
    handshake with each rank.
    """
    if world_size() == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    timeout = timedelta(seconds=timeout_s)
    store, number, processes = next(dist.rendezvous("env://", timeout=timeout))
    name = _name_attempt(store, processes) if number == 0 else _learn_attempt(store, number, timeout_s)
    store = dist.PrefixStore(name, store)
    offloads = is_on("FSDP_OFFLOAD_PARAMS") and backend() == "nccl"  # gloo adds the norm of gradients there
    kind = "cuda:nccl,cpu:gloo" if offloads else backend()
    dist.init_process_group(kind, store=store, rank=number, world_size=processes, timeout=timeout)


def _name_attempt(store: dist.Store, processes: int) -> str:
    """Rank 0's part of the handshake: sets a new name, and answers each rank that has read it."""
    name = uuid.uuid4().hex
    store.set("attempt", name)
    for number in range(1, processes):
        store.set(f"{name}/heard/{store.get(f'{name}/{number}').decode()}", "")
    return name


def _learn_attempt(store: dist.Store, number: int, timeout_s: int) -> str:
    """Another rank's part: returns the name once rank 0 answers. An earlier attempt's name gets no answer."""
    own, deadline = uuid.uuid4().hex, time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        name = store.get("attempt").decode()
        store.set(f"{name}/{number}", own)
        while time.monotonic() < deadline:
            if store.check([f"{name}/heard/{own}"]):
                return name
            if store.get("attempt").decode() != name:
                break
            time.sleep(0.02)
    raise ValueError(f"rank 0 did not answer within {timeout_s} s: see its output, or give more --timeout_s")


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
    """torchrun's agents, or DeepSpeed's: hosts may have unequal numbers of processes."""
    told = os.environ.get("GROUP_WORLD_SIZE") or os.environ.get("CROSS_SIZE")
    return int(told) if told else max(1, world_size() // processes_per_host())


def most_hosts() -> int:
    """The number of hosts of an elastic job, including those that are away; of other jobs their hosts.

    It comes from launch.py's LAUNCH_MOST_HOSTS, or from torchrun's --nnodes=MIN:MAX.
    """
    told = os.environ.get(MOST_HOSTS)  # of the first round: the run's name keeps it when further hosts join
    return int(told) if told else max(hosts(), int(_torchruns_most() or 0))


def most_processes() -> int:
    """The number of processes with most_hosts(), which have equal numbers of them where hosts may be away."""
    return most_hosts() * world_size() // hosts()


def elastic_batch(job: Job) -> Batch:
    """The arithmetic of the batch, with the same micro-batch for any number of hosts.

    Unless --per_device_batch_size is given, the micro-batch is that with all hosts: with fewer hosts each
    process accumulates more of them. If this number of hosts does not divide the batch, torchrun's round
    waits job.timeout_s for another number. ValueError with the numbers that can train.
    """
    processes, most = world_size(), most_processes()
    per_device = job.per_device_batch_size
    if per_device is None and PER_DEVICE in os.environ:
        per_device = int(os.environ[PER_DEVICE])
    elif per_device is None and job.batch_size % most == 0:
        per_device = job.batch_size // most
    try:
        batch = share_out(job.batch_size, per_device, processes, job.unit)
        _report_batch(job, batch.per_device)
        return batch
    except ValueError as error:
        _report_batch(job, per_device or 1)
        if not _torchruns_most():
            raise
        usable = usable_processes(job.batch_size, per_device, most, processes_per_host())
        numbers = " or ".join(str(number // processes_per_host()) for number in usable) or "no number"
        if rank() == 0:
            log.info(
                f"{plural(hosts(), 'host')} can't share the batch: waiting up to {job.timeout_s} s for"
                f" another number of hosts ({numbers})"
            )
        time.sleep(job.timeout_s)  # torchrun ends this process when a host joins or leaves
        raise ValueError(f"{error}; of the hosts {numbers} can train") from None


def _report_batch(job: Job, per_device: int) -> None:
    """Tells launch.py the micro-batch, which all rounds keep, and which decides how many hosts can train."""
    if rank() == 0:
        report("batch", batch_size=job.batch_size, per_device=per_device)


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
    found = re.fullmatch(r"\d+:(\d+)", parents()[0].flag("nnodes") or os.environ.get("PET_NNODES", ""))
    return found[1] if found else None
