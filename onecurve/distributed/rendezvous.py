"""Connects a job's processes, and chooses the network interface and elastic batch sizes."""

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
    MOST_HOSTS_VARIABLE,
    PER_DEVICE_VARIABLE,
    PROCESSES_VARIABLE,
    is_on,
    processes_per_host,
    rank,
    report_to_launcher,
    world_size,
)
from onecurve.system.output import log
from onecurve.system.processes import ancestors, interface_problem, interface_to
from onecurve.system.text import plural

OWN_STORE_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # 1 stops torchrun from sharing its agent's store


def choose_gloo_interface() -> None:
    """Set GLOO_SOCKET_IFNAME, if unset, to loopback (one host) or the interface that routes to the master.

    Without GLOO_SOCKET_IFNAME, gloo listens at the address to which the host's name resolves. Other machines
    may be able to reach this address. This is a security risk, because ranks exchange objects as pickles. On
    Debian, the address is 127.0.1.1, which does not work for multi-host jobs. gloo transfers the messages
    about signals in NCCL jobs, and all data in rehearsals.

    Raises:
        ValueError: If GLOO_SOCKET_IFNAME or NCCL's variable refers to an interface that does not exist.
    """
    if world_size() == 1 or "MASTER_ADDR" not in os.environ:
        return
    interface_error = interface_problem(os.environ, backend() == "nccl")
    if interface_error:
        raise ValueError(interface_error)
    is_one_host = world_size() == processes_per_host()
    with contextlib.suppress(ValueError):  # without a route, the variable stays unset
        interface_name, own_address = interface_to("127.0.0.1" if is_one_host else os.environ["MASTER_ADDR"])
        # On the master itself, its name may resolve to a loopback address. In this case, the variable stays
        # unset, and gloo chooses an interface.
        if is_one_host or not own_address.startswith("127."):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_name)


def backend() -> str:
    """Return the process group's backend: nccl for GPUs, otherwise gloo."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def create_group_in_agents_store(timeout_s: int) -> None:
    """Create the process group in the torchrun agent's store, with a key prefix for this attempt.

    If torchrun does not share its agent's store or the job has one process, this function does nothing.

    torch 2.15 keeps the agent's store across restarts, including the addresses of dead processes (pytorch
    #167302). Each agent counts restarts separately, and the counts may differ (pytorch #135712). Therefore,
    rank 0 chooses a name for the attempt and passes it to each rank in a handshake.
    """
    if world_size() == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    timeout = timedelta(seconds=timeout_s)
    store, own_rank, process_count = next(dist.rendezvous("env://", timeout=timeout))
    if own_rank == 0:
        attempt_name = _publish_attempt_name(store, process_count)
    else:
        attempt_name = _receive_attempt_name(store, own_rank, timeout_s)
    store = dist.PrefixStore(attempt_name, store)
    # gloo sums the norms of shards that are offloaded to the CPU
    offloads_from_gpu = is_on("FSDP_OFFLOAD_PARAMS") and backend() == "nccl"
    backends = "cuda:nccl,cpu:gloo" if offloads_from_gpu else backend()
    dist.init_process_group(backends, store=store, rank=own_rank, world_size=process_count, timeout=timeout)


def _publish_attempt_name(store: dist.Store, process_count: int) -> str:
    """Publish a new attempt's name as rank 0, and answer each rank that has read it.

    This function waits for all ranks. Each rank's answer is named after the rank's random token.
    """
    attempt_name = uuid.uuid4().hex
    store.set("attempt", attempt_name)
    for other_rank in range(1, process_count):
        handshake_token = store.get(f"{attempt_name}/{other_rank}").decode()
        store.set(f"{attempt_name}/heard/{handshake_token}", "")
    return attempt_name


def _receive_attempt_name(store: dist.Store, own_rank: int, timeout_s: int) -> str:
    """Wait for rank 0's answer on another rank, and return the attempt's name.

    Rank 0 does not answer ranks that have read an earlier attempt's name.
    """
    handshake_token = uuid.uuid4().hex
    answer_deadline = time.monotonic() + timeout_s
    while time.monotonic() < answer_deadline:
        attempt_name = store.get("attempt").decode()
        store.set(f"{attempt_name}/{own_rank}", handshake_token)
        while time.monotonic() < answer_deadline:
            if store.check([f"{attempt_name}/heard/{handshake_token}"]):
                return attempt_name
            if store.get("attempt").decode() != attempt_name:
                break  # the name was an earlier attempt's
            time.sleep(0.02)
    raise ValueError(
        f"rank 0 did not answer within {timeout_s} s. Check the output of rank 0, or increase --timeout_s."
    )


def check_process_count() -> None:
    """Raise ValueError unless the job has as many processes as launch.py started."""
    started_process_count = int(os.environ.get(PROCESSES_VARIABLE, world_size()))
    process_count = world_size()
    if process_count != started_process_count:
        raise ValueError(
            f"launch.py started {started_process_count} processes for this job,"
            f" but WORLD_SIZE is {process_count} in this process."
            " Set --config_file to a file in accelerate_configs/ that starts several processes."
        )


def current_host_count() -> int:
    """Return the number of hosts that torchrun's or DeepSpeed's launcher reports.

    Hosts may run different numbers of processes.
    """
    # Environment variables of torchrun and of DeepSpeed's launcher
    host_count_text = os.environ.get("GROUP_WORLD_SIZE") or os.environ.get("CROSS_SIZE")
    return int(host_count_text) if host_count_text else max(1, world_size() // processes_per_host())


def max_host_count() -> int:
    """Return an elastic job's maximum number of hosts, or any other job's number of hosts.

    The maximum includes absent hosts. launch.py's LAUNCH_MOST_HOSTS or torchrun's --nnodes=MIN:MAX sets the
    maximum.
    """
    # The first round sets the variable, which stays constant when more hosts join
    max_host_count_text = os.environ.get(MOST_HOSTS_VARIABLE)
    if max_host_count_text:
        return int(max_host_count_text)
    return max(current_host_count(), int(_torchrun_max_hosts() or 0))


def max_process_count() -> int:
    """Return the number of processes in the job if max_host_count() hosts are present.

    In a job whose hosts may be absent, all hosts run the same number of processes.
    """
    return max_host_count() * world_size() // current_host_count()


def elastic_batch(job: Job) -> Batch:
    """Return the batch arithmetic, with the same micro-batch size regardless of the number of hosts.

    Rank 0 also reports the micro-batch size to launch.py.

    The micro-batch size is --per_device_batch_size or, without the flag, one process's share of the batch
    when all hosts are present. With fewer hosts, each process accumulates more micro-batches. If the current
    hosts can't divide the batch evenly, this function waits job.timeout_s seconds for a host to join or
    leave.

    Raises:
        ValueError: If the hosts can't divide the batch evenly. The error message lists the host counts that
            can train.
    """
    process_count, full_process_count = world_size(), max_process_count()
    per_device_batch_size = job.per_device_batch_size
    if per_device_batch_size is None and PER_DEVICE_VARIABLE in os.environ:
        per_device_batch_size = int(os.environ[PER_DEVICE_VARIABLE])
    elif per_device_batch_size is None and job.batch_size % full_process_count == 0:
        per_device_batch_size = job.batch_size // full_process_count
    try:
        batch = share_out(job.batch_size, per_device_batch_size, process_count, job.unit)
        _report_micro_batch_size(job, batch.per_device)
        return batch
    except ValueError as error:
        # With size 1, launch.py accepts every number of processes that divides the batch
        _report_micro_batch_size(job, per_device_batch_size or 1)
        if not _torchrun_max_hosts():
            raise
        usable_process_counts = usable_processes(
            job.batch_size, per_device_batch_size, full_process_count, processes_per_host()
        )
        usable_host_counts = [str(count // processes_per_host()) for count in usable_process_counts]
        host_counts_text = " or ".join(usable_host_counts) or "none"
        if rank() == 0:
            log.info(
                f"the batch does not divide among {plural(current_host_count(), 'host')}."
                f" Waiting up to {job.timeout_s} s for a different number of hosts ({host_counts_text})"
            )
        time.sleep(job.timeout_s)  # torchrun ends this process as soon as a host joins or leaves
        raise ValueError(f"{error} (numbers of hosts that can train: {host_counts_text})") from None


def _report_micro_batch_size(job: Job, micro_batch_size: int) -> None:
    """Report the micro-batch size from rank 0 to launch.py.

    The micro-batch size is the same in all rounds of an elastic job, and determines which host counts can
    train.
    """
    if rank() == 0:
        report_to_launcher("batch", batch_size=job.batch_size, per_device=micro_batch_size)


def replacement_problem() -> str | None:
    """Return the reason why no other host can join this torchrun job later, or None if hosts can join.

    torch 2.15 shares the agent's store. In a later round, new agents do not receive rank 0's address, and
    fail after 60 s (torch.distributed.elastic.rendezvous.dynamic_rendezvous). For a single-host job, the
    result is None.
    """
    is_torchrun_job = os.environ.get("TORCHELASTIC_RUN_ID", "none") != "none"
    shares_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not (is_torchrun_job and shares_agent_store and (current_host_count() > 1 or max_host_count() > 1)):
        return None
    return (
        "no other host can join this job after a host fails."
        f" To allow replacement hosts, set {OWN_STORE_VARIABLE}=1 in torchrun's environment on each host."
    )


def _torchrun_max_hosts() -> str | None:
    """Return MAX from torchrun's --nnodes=MIN:MAX in the agent's command line, or None without a maximum."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    agent_process, *_ = ancestors()  # the torchrun agent is this process's parent
    host_range = agent_process.flag_value("nnodes") or os.environ.get("PET_NNODES", "")
    host_range_match = re.fullmatch(r"\d+:(?P<max>\d+)", host_range)
    return host_range_match["max"] if host_range_match else None
