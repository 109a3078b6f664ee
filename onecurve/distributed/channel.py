"""Sends messages between a job's processes, through torch's store or in collectives over gloo."""

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

StoreAnswer = TypeVar("StoreAnswer")
MISSING_VALUE_JSON = b"null"  # JSON value of a missing key
STORE_POLL_INTERVAL_S = 0.05  # seconds between requests to the store while a process waits for a key
MAIN_CLOSE_TIMEOUT_S = 10  # seconds to wait until a failing job's main process has closed its files


class ExitReason(IntEnum):
    """Reason why a job's processes exit together. If several reasons apply, the largest value wins."""

    NONE = 0  # all processes continue
    STOP = 1  # a signal arrived or the launcher exited, so all processes save and raise Preempted
    PROBLEM = 2  # all processes raise ValueError with the same message


class Channel:
    """Channel for JSON messages in torch's store. Each channel may be used by only one thread.

    A connection to the store handles one request at a time. A request blocks while the store's process is
    suspended. If the store's process dies, `store_error` contains the error. From then on, the channel
    behaves as in a single-process job, and returns no messages from other processes.
    """

    def __init__(self, store: dist.Store | None = None) -> None:
        self.store = store or default_store()
        self.store_error: RuntimeError | None = None

    def clone(self) -> "Channel":
        """Return a channel for use in a different thread.

        Don't clone a channel to handle a failure, because connecting to a dead store would block for a long
        time.
        """
        return Channel(self.store.clone())

    def post(self, key: str, value: Any) -> None:
        """Store a JSON-serialisable value under the key, where other processes can read it."""
        self._call_store(lambda: self.store.set(key, json.dumps(value)), None)

    def read(self, key: str) -> Any:
        """Return the key's value, or None if the key does not exist yet."""
        value_json = self._call_store(
            lambda: self.store.get(key) if self.store.check([key]) else MISSING_VALUE_JSON,
            default=MISSING_VALUE_JSON,
        )
        return json.loads(value_json)

    def wait(self, key: str) -> Any:
        """Wait until the key exists, and return its value. After the store's timeout, raise RuntimeError."""
        return json.loads(self.store.get(key))

    def store_if_unset(self, key: str, value: Any) -> Any:
        """Store the value unless the key already exists, and return the stored value."""
        value_json = json.dumps(value)
        # compare_set() with an expected value of "" writes only if the key does not exist
        stored_json = self._call_store(
            lambda: self.store.compare_set(key, "", value_json), default=value_json.encode()
        )
        return json.loads(stored_json)

    def add_to_counter(self, key: str, increment: int) -> int:
        """Add `increment` to a counter that starts at 0, and return the new count.

        If the store has died, the result is `increment`.
        """
        return self._call_store(lambda: self.store.add(key, increment), increment)

    def _call_store(self, store_operation: Callable[[], StoreAnswer], default: StoreAnswer) -> StoreAnswer:
        """Return the operation's result. If the store has died, keep the error and return the default."""
        try:
            return store_operation()
        except RuntimeError as error:
            self.store_error = error
            return default


def claim_report(message: str, channel: Channel | None = None) -> bool:
    """Claim the report of a message, and return True unless another process has claimed it before.

    Most user errors occur in all processes, but only one process should print the error message.
    """
    if not dist.is_initialized():
        return is_hosts_first()
    message_digest = hashlib.sha256(message.encode()).hexdigest()
    report_count = (channel or Channel()).add_to_counter(f"said/{message_digest}", 1)
    return report_count == 1


def let_main_close_first(accelerator: Accelerator, channel: Channel | None = None) -> None:
    """Wait up to 10 s in a failing job until the main process has closed its files.

    The main process calls this function after it has closed its files. The other processes call it before
    they exit, because a launcher kills all processes as soon as one exits. The wait is limited because the
    main process may hang in a collective.
    """
    if not dist.is_initialized():
        return
    channel = channel or Channel()
    close_deadline = time.monotonic() + MAIN_CLOSE_TIMEOUT_S
    if accelerator.is_main_process:
        channel.post("closed", True)
    while not (channel.read("closed") or channel.store_error) and time.monotonic() < close_deadline:
        time.sleep(STORE_POLL_INTERVAL_S)


class GlooExchange:
    """Asynchronous elementwise maximum over all processes. Each call returns the previous call's maxima.

    GlooExchange uses a gloo group separate from the training collectives, so no call waits for a GPU. The
    constructor is collective.
    """

    def __init__(self, timeout_s: float) -> None:
        self.gloo_group: dist.ProcessGroup | None = None
        if dist.is_initialized():
            new_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            assert isinstance(new_group, dist.ProcessGroup)
            self.gloo_group = new_group
        self.exchanged_values = torch.zeros(0, dtype=torch.int32)
        self.pending_reduction: dist.Work | None = None

    def __call__(self, *values: int) -> list[int]:
        """Start the next exchange, and return the maxima of the previous call's arguments.

        All processes must make this call. The first call returns []. In a single-process job, each call
        returns its own arguments.
        """
        if self.gloo_group is None:
            return list(values)
        previous_maxima = self.finish()
        self.exchanged_values = torch.tensor(values, dtype=torch.int32)
        self.pending_reduction = dist.all_reduce(
            self.exchanged_values, dist.ReduceOp.MAX, group=self.gloo_group, async_op=True
        )
        return previous_maxima

    def finish(self) -> list[int]:
        """Wait for the last call's maxima and return them. If no exchange is in progress, return []."""
        if self.pending_reduction is None:
            return []
        self.pending_reduction.wait()
        self.pending_reduction = None
        return self.exchanged_values.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Return all processes' values in rank order. This method is collective.

        The values are exchanged over gloo, because NCCL would need GPU memory.
        """
        if self.gloo_group is None:
            return [value]
        value_by_rank = [None] * dist.get_world_size()
        dist.all_gather_object(value_by_rank, value, group=self.gloo_group)
        return value_by_rank

    def collect(self, value: Any) -> list[Any]:
        """Return all processes' values in rank order in the main process, and [] in all others.

        This method is collective. Use this method for large values, because gather() would send all values to
        all processes.
        """
        if self.gloo_group is None:
            return [value]
        value_by_rank = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(value, value_by_rank, group=self.gloo_group)
        return value_by_rank or []

    def wait_for_main(self, is_main: bool, is_done_within: Callable[[float], bool]) -> None:
        """Wait until is_done_within(1.0) returns True in the main process. This method is collective.

        The main process sends an answer every second, so that other processes don't wait forever if the main
        process dies.

        Args:
            is_main: True in the main process.
            is_done_within: Function that waits up to the given number of seconds and returns True if the work
                is done.
        """
        while not any(self.gather(is_main and is_done_within(1.0))):
            pass
