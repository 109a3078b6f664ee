"""Agreement between the processes of a job: equal settings, and work by one of them."""

import json
import socket
import time
from collections import Counter
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from onecurve.distributed.channel import Channel, Reason
from onecurve.distributed.watch import Preempted, watch
from onecurve.system.env import local_rank
from onecurve.system.phase import in_phase

Work = Callable[[Callable[[], None]], Any]  # work(heartbeat)
UNANSWERED_S = 240  # wait for a working process after a signal: a request to S3 may take that long


def agree(accelerator: Accelerator, facts: dict[str, Any]) -> None:
    """Compares the facts of all processes. On a difference all raise ValueError with ranks and values."""
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


def once(accelerator: Accelerator, topic: str, work: Work, timeout_s: int, *, per_host: bool = False) -> Any:
    """Runs work(heartbeat) in the main process, or in one per host; returns its result, as JSON, on all.

    The work may take hours, as no process waits in a collective. It calls heartbeat(); without one for
    timeout_s seconds the job ends. A ValueError in the work ends all processes with its message. A signal to
    any process ends the work, and all raise Preempted. topic: a unique name of this call, such as `data`.

    Keys in the store:  once/<topic>/<rank>       [Reason, message or result] of that worker; all wait for it
                        once/<topic>/heartbeats   a count, raised by all workers
                        once/<topic>/stop         set by a process that got a signal; workers look for it
    All read the outcomes of all workers, not of their own alone, so all return, or all raise the same.
    """
    if accelerator.num_processes == 1:
        return work(_stop_if_wanted)
    me, board, channel = accelerator.process_index, f"once/{topic}", Channel()
    my_worker = me - local_rank() if per_host else 0  # whose result this process returns
    workers = set(gather_object([my_worker]))
    if me == my_worker:
        try:
            with in_phase(f"preparing the {topic}"):
                outcome = Reason.NONE, work(_heartbeat(channel, board))
        except (ValueError, OSError) as error:
            outcome = Reason.PROBLEM, f"{error} (on host {socket.gethostname()})"
        except Preempted:
            outcome = Reason.STOP, None
        channel.post(f"{board}/{me}", outcome)
    with in_phase(f"waiting for the {topic}"):
        outcomes: dict[int, Any] = {}
        received, received_at, stopped_at = -1, time.monotonic(), 0.0
        while pending := workers - outcomes.keys():
            if found := {rank: told for rank in pending if (told := channel.read(f"{board}/{rank}"))}:
                outcomes |= found
                continue
            if channel.gone:
                raise channel.gone
            if watch.wanted():
                channel.post(f"{board}/stop", True)  # the workers' outcomes decide: they are the same for all
                stopped_at = stopped_at or time.monotonic()
                if time.monotonic() - stopped_at > UNANSWERED_S:
                    raise Preempted  # the worker is dead, and its launcher stops this process
            if (latest := channel.count(f"{board}/heartbeats")) != received:
                received, received_at = latest, time.monotonic()
            elif time.monotonic() - received_at > timeout_s:
                watch.report_hang()
                raise ValueError(
                    f"rank {', '.join(map(str, sorted(pending)))} gave no sign of life for {timeout_s} s"
                    f" while it prepared the {topic}: look at its host, or give a larger --timeout_s"
                )
            time.sleep(0.05)
    reason, message = max((outcomes[rank] for rank in sorted(workers)), key=itemgetter(0))
    if reason == Reason.PROBLEM:
        raise ValueError(message)
    if reason == Reason.STOP:
        raise Preempted
    return outcomes[my_worker][1]


def _heartbeat(channel: Channel, board: str) -> Callable[[], None]:
    """Returns heartbeat(), which tells all processes, at most once a second, that this one makes progress.

    It raises Preempted when one of them was told to stop.
    """
    sent_at = 0.0

    def heartbeat() -> None:
        nonlocal sent_at
        _stop_if_wanted()
        if time.monotonic() - sent_at > 1:
            sent_at = time.monotonic()
            channel.count(f"{board}/heartbeats", 1)
            if channel.read(f"{board}/stop"):
                raise Preempted
            if channel.gone:
                raise channel.gone

    return heartbeat


def _stop_if_wanted() -> None:
    if watch.wanted():
        raise Preempted


def _difference(ours: str | None, theirs: str | None) -> str:
    """`ours` as text; if both are objects, only the entries that differ."""
    ours, theirs = json.loads(ours or "null"), json.loads(theirs or "null")
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ", ".join(f"{key}={value}" for key, value in ours.items() if theirs.get(key) != value)
    return str(ours)
