"""Rendezvous of a job's processes, with network interface, torchrun's store, and elastic batch sizes."""

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
    """Set GLOO_SOCKET_IFNAME, if unset, to the loopback interface (one host) or the route to the master.

    Otherwise, gloo listens at the address to which the host's name resolves. Other machines may be able to
    reach this address, which is a risk because ranks exchange objects as pickles. On Debian, the address is
    127.0.1.1, which does not work for several hosts. gloo transfers the messages about signals in NCCL jobs,
    and all data in rehearsals.

    Raises:
        ValueError: GLOO_SOCKET_IFNAME or NCCL's variable refers to an interface that does not exist.
    """
    if world_size() == 1 or "MASTER_ADDR" not in os.environ:
        return
    if problem := interface_problem(os.environ, backend() == "nccl"):
        raise ValueError(problem)
    is_one_host = world_size() == processes_per_host()
    with contextlib.suppress(ValueError):
        name, address = interface_to("127.0.0.1" if is_one_host else os.environ["MASTER_ADDR"])
        # On the master itself, the master's name may resolve to a loopback address. In this case, the
        # variable stays unset, and gloo chooses an interface.
        if is_one_host or not address.startswith("127."):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def backend() -> str:
    """Return the backend of the process group, which is nccl for GPUs and gloo otherwise."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def join_agents_store(timeout_s: int) -> None:
    """Create the process group in the store of torchrun's agent, with a key prefix for this attempt.

    torch 2.15 keeps this store across restarts, including the addresses of dead processes (pytorch #167302).
    Each agent counts restarts separately, and the counts may differ (#135712). Therefore, rank 0 chooses a
    name for the attempt, and passes the name to each rank in a handshake.
    """
    if world_size() == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    timeout = timedelta(seconds=timeout_s)
    store, number, processes = next(dist.rendezvous("env://", timeout=timeout))
    name = _name_attempt(store, processes) if number == 0 else _learn_attempt(store, number, timeout_s)
    store = dist.PrefixStore(name, store)
    offloads = is_on("FSDP_OFFLOAD_PARAMS") and backend() == "nccl"  # gloo sums offloaded shards' norms
    backends = "cuda:nccl,cpu:gloo" if offloads else backend()
    dist.init_process_group(backends, store=store, rank=number, world_size=processes, timeout=timeout)


def _name_attempt(store: dist.Store, processes: int) -> str:
    """Publish a new name as rank 0, and answer each rank that has read the name."""
    name = uuid.uuid4().hex
    store.set("attempt", name)
    for number in range(1, processes):
        store.set(f"{name}/heard/{store.get(f'{name}/{number}').decode()}", "")
    return name


def _learn_attempt(store: dist.Store, number: int, timeout_s: int) -> str:
    """Return the attempt's name on a rank other than 0, after rank 0 has answered.

    Rank 0 does not answer to the name of an earlier attempt.
    """
    token, deadline = uuid.uuid4().hex, time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        name = store.get("attempt").decode()
        store.set(f"{name}/{number}", token)
        while time.monotonic() < deadline:
            if store.check([f"{name}/heard/{token}"]):
                return name
            if store.get("attempt").decode() != name:
                break
            time.sleep(0.02)
    raise ValueError(f"rank 0 did not answer within {timeout_s} s. See its output, or increase --timeout_s.")


def check_processes() -> None:
    """Raise ValueError if the number of processes differs from the number that launch.py started."""
    started, processes = int(os.environ.get(PROCESSES, world_size())), world_size()
    if processes != started:
        size = "alone" if processes == 1 else f"in a job of {processes}"
        raise ValueError(
            f"launch.py started {started} processes for this job, but this process is {size}. Give"
            " --config_file a file of accelerate_configs/ for several processes."
        )


def hosts() -> int:
    """Return the number of hosts that torchrun's or DeepSpeed's launcher reports.

    Hosts may have different numbers of processes.
    """
    hosts_text = os.environ.get("GROUP_WORLD_SIZE") or os.environ.get("CROSS_SIZE")
    return int(hosts_text) if hosts_text else max(1, world_size() // processes_per_host())


def most_hosts() -> int:
    """Return an elastic job's maximum number of hosts, or the number of hosts of any other job.

    The maximum includes absent hosts. It is set by launch.py's LAUNCH_MOST_HOSTS or torchrun's
    --nnodes=MIN:MAX.
    """
    hosts_text = os.environ.get(MOST_HOSTS)  # set in the first round; constant when more hosts join
    return int(hosts_text) if hosts_text else max(hosts(), int(_torchruns_most() or 0))


def most_processes() -> int:
    """Return the number of processes in the job if most_hosts() hosts are present.

    In jobs where hosts may be absent, all hosts have the same number of processes.
    """
    return most_hosts() * world_size() // hosts()


def elastic_batch(job: Job) -> Batch:
    """Return the batch arithmetic. The micro-batch size is the same for any number of hosts.

    The micro-batch size is --per_device_batch_size or, without the flag, one process's share of the batch
    when all hosts are present. With fewer hosts, each process accumulates more micro-batches. If the batch
    does not divide among the current hosts, this function waits job.timeout_s seconds for a host to join or
    leave.

    Raises:
        ValueError: The batch does not divide among the hosts. The message lists the numbers of hosts that can
            train.
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
        numbers = " or ".join(str(number // processes_per_host()) for number in usable) or "none"
        if rank() == 0:
            log.info(
                f"{plural(hosts(), 'host')} can't share the batch: waiting up to {job.timeout_s} s for"
                f" another number of hosts ({numbers})"
            )
        time.sleep(job.timeout_s)  # torchrun ends this process when a host joins or leaves
        raise ValueError(f"{error} (numbers of hosts that can train: {numbers})") from None


def _report_batch(job: Job, per_device: int) -> None:
    """Report the micro-batch size to launch.py.

    The micro-batch size is the same in all rounds, and determines which numbers of hosts can train.
    """
    if rank() == 0:
        report("batch", batch_size=job.batch_size, per_device=per_device)


def replacement_problem() -> str | None:
    """Return the reason why no other host can join this torchrun job later, or None if hosts can join.

    torch 2.15 shares the agent's store. In a later round, new agents do not receive rank 0's address, and
    fail after 60 s (torch.distributed.elastic.rendezvous.dynamic_rendezvous). For a job on a single host, the
    result is None.
    """
    is_torchrun = os.environ.get("TORCHELASTIC_RUN_ID", "none") != "none"
    shares_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not (is_torchrun and shares_store and (hosts() > 1 or most_hosts() > 1)):
        return None
    return (
        f"no other host can join this job after a fault. Set {SHARED_STORE}=1 before torchrun on each host."
    )


def _torchruns_most() -> str | None:
    """Return MAX of torchrun's --nnodes=MIN:MAX in the agent's command line as text, or None without it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    match = re.fullmatch(r"\d+:(\d+)", parents()[0].flag("nnodes") or os.environ.get("PET_NNODES", ""))
    return match[1] if match else None
