"""What the processes of a job tell one another: that they agree, that they live, and who prints an error."""

import hashlib
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object


def agree(accelerator: Accelerator, facts: dict[str, Any]) -> None:
    """Compares the facts of all processes. ValueError, on each of them, names the odd ranks and values."""
    mine = {name: json.dumps(value, sort_keys=True, default=str) for name, value in facts.items()}
    everyones = gather_object([(socket.gethostname(), mine)])
    for name in mine:
        values = [theirs.get(name) for _, theirs in everyones]
        usual = Counter(values).most_common(1)[0][0]
        odd = [r for r, value in enumerate(values) if value != usual]
        if odd:
            host, theirs = everyones[odd[0]][0], values[odd[0]]
            raise ValueError(
                f"the processes do not agree: {name} is {_difference(theirs, usual)} on rank"
                f" {', '.join(map(str, odd))} (host {host}), but {_difference(usual, theirs)} on the others."
                " Start all of them with the same code, flags, packages and data"
            )


def once_per_host(
    accelerator: Accelerator, work: Callable[[Callable[[], None]], Path], timeout_s: int
) -> Path:
    """Runs work(beat) in one process per host while the others wait; all of a host get its result.

    Work may take hours: nobody sits in a collective. It calls beat() as it gets on; without any beat for
    timeout_s seconds the job ends. ValueError in work ends all processes with its message.
    """
    if accelerator.num_processes == 1:
        return work(lambda: None)
    me = accelerator.process_index
    host_rank = me - accelerator.local_process_index  # the one process of this host that works
    pending = set(gather_object([host_rank]))
    store = dist.distributed_c10d._get_default_store()
    if me == host_rank:
        try:
            outcome = {"result": str(work(_heart(store)))}
        except ValueError as error:
            outcome = {"error": f"{error} (on host {socket.gethostname()})"}
        store.set(f"{_BOARD}/{me}", json.dumps(outcome))
    beats, heard = -1, time.monotonic()
    while True:
        for worker in [worker for worker in pending if store.check([f"{_BOARD}/{worker}"])]:
            outcome = json.loads(store.get(f"{_BOARD}/{worker}"))
            if "error" in outcome:
                raise ValueError(outcome["error"])
            pending.remove(worker)
        if not pending:
            return Path(json.loads(store.get(f"{_BOARD}/{host_rank}"))["result"])
        if (latest := store.add(f"{_BOARD}/beats", 0)) != beats:
            beats, heard = latest, time.monotonic()
        elif time.monotonic() - heard > timeout_s:
            raise ValueError(
                f"rank {', '.join(map(str, sorted(pending)))} gave no sign of life for {timeout_s} s while it"
                " prepared the data: look at its host, or give a larger --timeout_s"
            )
        time.sleep(0.1)


_BOARD = "once_per_host"  # a corner of the process group's key-value store


def _heart(store: dist.Store) -> Callable[[], None]:
    """beat(): tells all processes, at most once a second, that the work gets on."""
    beaten = 0.0

    def beat() -> None:
        nonlocal beaten
        if time.monotonic() - beaten > 1:
            beaten = time.monotonic()
            store.add(f"{_BOARD}/beats", 1)

    return beat


def first_to_say(message: str) -> bool:
    """Whether no other process has printed this message: most mistakes are found by all of them at once."""
    if not dist.is_initialized():
        return is_hosts_first()
    key = f"said/{hashlib.sha256(message.encode()).hexdigest()}"
    try:
        return dist.distributed_c10d._get_default_store().add(key, 1) == 1
    except RuntimeError:  # the process that kept the store is gone
        return True


def let_main_close_first(accelerator: Accelerator) -> None:
    """Where a job fails: the main process calls it when its files are closed, the others before they end.

    A launcher kills all processes as soon as one has ended. The others wait 10 s at most: the main process
    may be in a collective, and know of nothing.
    """
    if not dist.is_initialized():
        return
    try:
        store = dist.distributed_c10d._get_default_store()
        if accelerator.is_main_process:
            store.set("closed", "yes")
        until = time.monotonic() + 10
        while not store.check(["closed"]) and time.monotonic() < until:
            time.sleep(0.05)
    except RuntimeError:  # the process that kept the store is gone
        return


def is_hosts_first() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _difference(ours: str | None, theirs: str | None) -> str:
    """ours; of two objects only what differs."""
    ours, theirs = json.loads(ours or "null"), json.loads(theirs or "null")
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ", ".join(f"{key}={value}" for key, value in ours.items() if theirs.get(key) != value)
    return str(ours)
