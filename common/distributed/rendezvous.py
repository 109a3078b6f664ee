"""Rendezvous of a job's processes: the network interface, and the process group in an agent's store."""

import contextlib
import os
import time
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist

from common.system.env import processes_per_host, world_size
from common.system.network import interface_to


def name_interface() -> None:
    """Sets GLOO_SOCKET_IFNAME, unless it is set: to loopback on one host, else to the route to the master.

    gloo would listen at the address of the host's name: on one host that may be one that others reach, and
    objects between ranks are pickles; on several it is 127.0.1.1 on Debian. gloo carries the messages about
    signals beside NCCL, and everything in a rehearsal.
    """
    if world_size() == 1 or "MASTER_ADDR" not in os.environ:
        return
    is_one_host = world_size() == processes_per_host()
    with contextlib.suppress(ValueError):
        name, mine = interface_to("127.0.0.1" if is_one_host else os.environ["MASTER_ADDR"])
        # On the master its own name may be a loopback address; without the variable gloo finds another.
        if is_one_host or not mine.startswith("127."):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def set_group_timeout(timeout_s: int) -> None:
    """Sets the default time-out of process groups created from here on.

    DeepSpeed clones the world group, and a DeviceMesh makes groups of its hosts, both with torch's defaults:
    600 s for NCCL and 1,800 s for gloo, whatever the first group was given.
    """
    c10d = dist.distributed_c10d
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timedelta(seconds=timeout_s)


def backend() -> str:
    """The backend of the process group: NCCL between GPUs, else gloo."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def join_agents_store(timeout_s: int) -> None:
    """Creates the process group in the store of torchrun's agent, below a prefix for this attempt.

    torch 2.15 keeps that store over restarts, with the addresses of dead processes. Each agent counts
    restarts by itself, and the counts may differ. So rank 0 names the attempt, in a handshake with each rank.
    """
    if world_size() == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    timeout = timedelta(seconds=timeout_s)
    store, rank, processes = next(dist.rendezvous("env://", timeout=timeout))
    name = _name_attempt(store, processes) if rank == 0 else _learn_attempt(store, rank, timeout_s)
    store = dist.PrefixStore(name, store)
    dist.init_process_group(backend(), store=store, rank=rank, world_size=processes, timeout=timeout)


def _name_attempt(store: dist.Store, processes: int) -> str:
    """Rank 0's part of the handshake: sets a new name, and answers each rank that has read it."""
    name = uuid.uuid4().hex
    store.set("attempt", name)
    for rank in range(1, processes):
        store.set(f"{name}/heard/{store.get(f'{name}/{rank}').decode()}", "")
    return name


def _learn_attempt(store: dist.Store, rank: int, timeout_s: int) -> str:
    """Another rank's part: returns the name once rank 0 answers. An earlier attempt's name gets no answer."""
    own, deadline = uuid.uuid4().hex, time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        name = store.get("attempt").decode()
        store.set(f"{name}/{rank}", own)
        while time.monotonic() < deadline:
            if store.check([f"{name}/heard/{own}"]):
                return name
            if store.get("attempt").decode() != name:
                break
            time.sleep(0.02)
    raise ValueError(f"rank 0 did not answer within {timeout_s} s: see its output, or give more --timeout_s")
