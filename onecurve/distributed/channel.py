"""Messages between a job's processes: in torch's store at any time, and over gloo where all take part."""

import hashlib
import json
import time
from collections.abc import Callable
from datetime import timedelta
from enum import IntEnum
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator

from onecurve.system.env import is_hosts_first
from onecurve.upstream.torch_ import default_store

Answer = TypeVar("Answer")
NONE = b"null"  # JSON


class Reason(IntEnum):
    """Why the processes of a job end together. Of several reasons the largest counts."""

    NONE = 0
    STOP = 1  # a signal, or a launcher's end: all save, and raise Preempted
    PROBLEM = 2  # all raise ValueError with the same message


class Channel:
    """Messages in torch's store, as JSON, for one thread: a connection serves one at a time.

    A store in a stopped process does not answer. When the process that hosts it is gone, `gone` is the error,
    and a channel answers as if this process were alone: there is no message of another one.
    """

    def __init__(self, store: dist.Store | None = None) -> None:
        self.store = store or default_store()
        self.gone: RuntimeError | None = None

    def clone(self) -> "Channel":
        """A channel for another thread. Not for a failure: it would wait long for a host that is gone."""
        return Channel(self.store.clone())

    def post(self, key: str, value: Any) -> None:
        self._ask(lambda: self.store.set(key, json.dumps(value)), None)

    def read(self, key: str) -> Any:
        """The value, or None while there is none."""
        return json.loads(self._ask(lambda: self.store.get(key) if self.store.check([key]) else NONE, NONE))

    def wait(self, key: str) -> Any:
        """The value, once there is one. RuntimeError after the store's time-out."""
        return json.loads(self.store.get(key))

    def first(self, key: str, value: Any) -> Any:
        """Posts the value if there is none. Returns the one that is there then."""
        mine = json.dumps(value)
        return json.loads(self._ask(lambda: self.store.compare_set(key, "", mine), mine.encode()))

    def count(self, key: str, more: int = 0) -> int:
        """The count after adding `more` to it; it begins at 0."""
        return self._ask(lambda: self.store.add(key, more), more)

    def _ask(self, operation: Callable[[], Answer], alone: Answer) -> Answer:
        try:
            return operation()
        except RuntimeError as error:
            self.gone = error
            return alone


def first_to_report(message: str, channel: Channel | None = None) -> bool:
    """True when no other process has printed this message, as most mistakes occur in all processes."""
    if not dist.is_initialized():
        return is_hosts_first()
    return (channel or Channel()).count(f"said/{hashlib.sha256(message.encode()).hexdigest()}", 1) == 1


def let_main_close_first(accelerator: Accelerator, channel: Channel | None = None) -> None:
    """Waits in a failing job until the main process has closed its files, 10 s at most.

    The main process calls it after closing them, the others before they exit, because a launcher kills all
    processes as soon as one has exited. The main process may hang in a collective.
    """
    if not dist.is_initialized():
        return
    channel, until = channel or Channel(), time.monotonic() + 10
    if accelerator.is_main_process:
        channel.post("closed", True)
    while not (channel.read("closed") or channel.gone) and time.monotonic() < until:
        time.sleep(0.05)


class Poll:
    """Asynchronous maxima over all processes: a call returns the maximum of each number of the last call.

    It uses gloo, beside the training's own collectives, so nothing waits for a GPU. The constructor is
    collective.
    """

    def __init__(self, timeout_s: float) -> None:
        self.group: dist.ProcessGroup | None = None
        if dist.is_initialized():
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            assert isinstance(group, dist.ProcessGroup)
            self.group = group
        self.values = torch.zeros(0, dtype=torch.int32)
        self.work: dist.Work | None = None

    def __call__(self, *mine: int) -> list[int]:
        """Returns the last call's maxima, [] in the first call; on one process its own. Collective."""
        if self.group is None:
            return list(mine)
        answer, self.values = self.finish(), torch.tensor(mine, dtype=torch.int32)
        self.work = dist.all_reduce(self.values, dist.ReduceOp.MAX, group=self.group, async_op=True)
        return answer

    def finish(self) -> list[int]:
        """Waits for the last call's answer and returns it; [] when none is in flight."""
        if self.work is None:
            return []
        self.work.wait()
        self.work = None
        return self.values.tolist()

    def gather(self, mine: Any) -> list[Any]:
        """Every process's object, by rank. Collective. (NCCL would need GPU memory for it.)"""
        if self.group is None:
            return [mine]
        everyones = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, mine, group=self.group)
        return everyones

    def collect(self, mine: Any) -> list[Any]:
        """Every process's object, by rank, on the main process; [] on others. Collective.

        For large ones: gather() would send all of them to all.
        """
        if self.group is None:
            return [mine]
        everyones = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(mine, everyones, group=self.group)
        return everyones or []

    def wait_for_main(self, is_main: bool, done: Callable[[float], bool]) -> None:
        """Waits until done(1.0), which waits up to a second, is true on the main process. Collective.

        The main process answers every second, so that no process waits for ever if it is gone.
        """
        while not any(self.gather(is_main and done(1.0))):
            pass
