"""Checks that a job's processes agree, and runs work once on behalf of all of them."""

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

Work = Callable[[Callable[[], None]], Any]  # function work(heartbeat) that returns a JSON value
UNANSWERED_S = 240  # Seconds to wait for a worker after a signal, because one S3 request may take this long


def agree(accelerator: Accelerator, facts: dict[str, Any]) -> None:
    """Check that the facts are the same in all processes.

    Args:
        accelerator: The started Accelerator.
        facts: JSON-serialisable values to compare, by name.

    Raises:
        ValueError: If a fact differs between processes. Every process raises the error, and its message lists
            the deviating ranks and their values.
    """
    local_facts = {name: json.dumps(value, sort_keys=True, default=str) for name, value in facts.items()}
    facts_by_rank = gather_object([(socket.gethostname(), local_facts)])
    for name in local_facts:
        values = [rank_facts.get(name) for _, rank_facts in facts_by_rank]
        majority = Counter(values).most_common(1)[0][0]
        odd_ranks = [rank for rank, value in enumerate(values) if value != majority]
        if odd_ranks:
            odd_host, odd_value = facts_by_rank[odd_ranks[0]][0], values[odd_ranks[0]]
            raise ValueError(
                f"the processes do not agree: {name} is {_difference(odd_value, majority)} on rank"
                f" {', '.join(map(str, odd_ranks))} (host {odd_host}), but {_difference(majority, odd_value)}"
                " on the other ranks. Start all processes with the same code, flags, packages and data."
            )


def once(accelerator: Accelerator, topic: str, work: Work, timeout_s: int, *, per_host: bool = False) -> Any:
    """Run work(heartbeat) in one process, and return its JSON result in all processes.

    No process waits in a collective, so the work may take hours. If the work raises ValueError or OSError,
    all processes raise ValueError with the same message. If any process receives a signal, the work stops and
    all processes raise Preempted.

    The worker and the other processes exchange the following keys in torch's store:

        once/<topic>/<rank>      [Reason, message or result] of this worker, which all processes wait for
        once/<topic>/heartbeats  counter that every worker increments
        once/<topic>/stop        key that a process sets after a signal, and that workers poll

    Every process reads all workers' outcomes, so either all processes return or all raise the same error.

    Args:
        accelerator: The started Accelerator.
        topic: Unique name of this call, for example `data`.
        work: Function that calls heartbeat() regularly.
        timeout_s: Number of seconds without a heartbeat after which the job ends.
        per_host: True to run the work in one process per host instead of only in the main process.
    """
    if accelerator.num_processes == 1:
        return work(_raise_if_stopping)
    this_rank, key_prefix, channel = accelerator.process_index, f"once/{topic}", Channel()
    worker = this_rank - local_rank() if per_host else 0  # rank whose result this process returns
    workers = set(gather_object([worker]))
    if this_rank == worker:
        try:
            with in_phase(f"preparing the {topic}"):
                outcome = Reason.NONE, work(_make_heartbeat(channel, key_prefix))
        except (ValueError, OSError) as error:
            outcome = Reason.PROBLEM, f"{error} (on host {socket.gethostname()})"
        except Preempted:
            outcome = Reason.STOP, None
        channel.post(f"{key_prefix}/{this_rank}", outcome)
    with in_phase(f"waiting for the {topic}"):
        outcomes: dict[int, Any] = {}
        heartbeat_count, received_at, stopped_at = -1, time.monotonic(), 0.0
        while pending := workers - outcomes.keys():
            answers = {rank: channel.read(f"{key_prefix}/{rank}") for rank in pending}
            if any(answers.values()):
                outcomes |= {rank: answer for rank, answer in answers.items() if answer}
                continue
            if channel.store_error:
                raise channel.store_error
            if watch.wanted():
                # The processes still wait for all workers' outcomes
                channel.post(f"{key_prefix}/stop", True)
                stopped_at = stopped_at or time.monotonic()
                if time.monotonic() - stopped_at > UNANSWERED_S:
                    raise Preempted  # the worker has died, and the launcher will stop this process
            if (latest_heartbeat_count := channel.count(f"{key_prefix}/heartbeats")) != heartbeat_count:
                heartbeat_count, received_at = latest_heartbeat_count, time.monotonic()
            elif time.monotonic() - received_at > timeout_s:
                watch.report_hang()
                raise ValueError(
                    f"rank {', '.join(map(str, sorted(pending)))} sent no heartbeat for {timeout_s} s"
                    f" while preparing the {topic}. Check the rank's host, or increase --timeout_s."
                )
            time.sleep(0.05)
    reason, content = max((outcomes[rank] for rank in sorted(workers)), key=itemgetter(0))
    if reason == Reason.PROBLEM:
        raise ValueError(content)
    if reason == Reason.STOP:
        raise Preempted
    return outcomes[worker][1]


def _make_heartbeat(channel: Channel, key_prefix: str) -> Callable[[], None]:
    """Return a function heartbeat() that reports progress to all processes, at most once per second.

    heartbeat() raises Preempted after any process has received a stop signal.
    """
    sent_at = 0.0

    def heartbeat() -> None:
        nonlocal sent_at
        _raise_if_stopping()
        if time.monotonic() - sent_at > 1:
            sent_at = time.monotonic()
            channel.count(f"{key_prefix}/heartbeats", 1)
            if channel.read(f"{key_prefix}/stop"):
                raise Preempted
            if channel.store_error:
                raise channel.store_error

    return heartbeat


def _raise_if_stopping() -> None:
    if watch.wanted():
        raise Preempted


def _difference(value_json: str | None, other_json: str | None) -> str:
    """Return the first JSON value as text. If both values are objects, include only entries that differ."""
    value, other = json.loads(value_json or "null"), json.loads(other_json or "null")
    if isinstance(value, dict) and isinstance(other, dict):
        return ", ".join(f"{key}={setting}" for key, setting in value.items() if other.get(key) != setting)
    return str(value)
