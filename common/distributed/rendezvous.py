"""Rendezvous of a job's processes: the network interface, and the process group after a restart."""

import contextlib
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from common.system.env import processes_per_host, world_size
from common.system.network import interface_to


def name_interface() -> None:
    """Sets GLOO_SOCKET_IFNAME to the interface with the route to the master, unless it is set.

    On several hosts gloo would take the address of the host's name, on Debian 127.0.1.1. gloo carries the
    agreement on signals beside NCCL, and everything in a rehearsal.
    """
    if world_size() == processes_per_host() or "MASTER_ADDR" not in os.environ:
        return
    with contextlib.suppress(ValueError):
        name, mine = interface_to(os.environ["MASTER_ADDR"])
        # The master may know its own name as a loopback address: there gloo finds another.
        if not mine.startswith("127."):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def set_group_timeout(timeout_s: int) -> None:
    """Sets the time-out of the process groups made from here on without one of their own.

    DeepSpeed clones the world, and a DeviceMesh makes groups of its hosts: both with torch's defaults, 600 s
    for NCCL and 1,800 s for gloo, whatever the first group was given.
    """
    c10d = dist.distributed_c10d
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timedelta(seconds=timeout_s)


def join_after_restart(timeout_s: int) -> None:
    """Makes the process group after a restart by torchrun, below a prefix of its own in torchrun's store.

    torch 2.15 keeps the store with the addresses of the dead processes.
    """
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if restarts and world_size() > 1:
        timeout = timedelta(seconds=timeout_s)
        store, rank, processes = next(dist.rendezvous("env://", timeout=timeout))
        store = dist.PrefixStore(f"restart_{restarts}", store)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=processes, timeout=timeout)
