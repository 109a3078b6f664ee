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

from onecurve.distributed.channel import STORE_POLL_INTERVAL_S, Channel, ExitReason
from onecurve.distributed.watch import Preempted, watch
from onecurve.system.env import local_rank
from onecurve.system.phase import in_phase

Work = Callable[[Callable[[], None]], Any]  # function work(heartbeat) that returns a JSON value
HEARTBEAT_INTERVAL_S = 1  # minimum number of seconds between a worker's heartbeats
STOP_TIMEOUT_S = 240  # seconds to wait for a worker after a signal, because one S3 request may take this long


def agree(accelerator: Accelerator, values: dict[str, Any]) -> None:
    """Check that the values are the same in all processes. This function is collective.

    Args:
        accelerator: The started Accelerator.
        values: JSON-serialisable values to compare, by name.

    Raises:
        ValueError: If a value differs between processes. Every process raises the error, and its message
            lists the deviating ranks and their values.
    """
    own_json_by_name = {
        name: json.dumps(value, sort_keys=True, default=str) for name, value in values.items()
    }
    host_and_json_by_rank = gather_object([(socket.gethostname(), own_json_by_name)])
    for value_name in own_json_by_name:
        json_by_rank = [json_by_name.get(value_name) for _, json_by_name in host_and_json_by_rank]
        [(common_json, _)] = Counter(json_by_rank).most_common(1)
        outlier_ranks = [rank for rank, rank_json in enumerate(json_by_rank) if rank_json != common_json]
        if outlier_ranks:
            outlier_host, _ = host_and_json_by_rank[outlier_ranks[0]]
            outlier_json = json_by_rank[outlier_ranks[0]]
            raise ValueError(
                f"the processes do not agree: {value_name} is {_format_difference(outlier_json, common_json)}"
                f" on rank {', '.join(map(str, outlier_ranks))} (host {outlier_host}),"
                f" but {_format_difference(common_json, outlier_json)} on the other ranks."
                " Start all processes with the same code, flags, packages and data."
            )


def once(accelerator: Accelerator, topic: str, work: Work, timeout_s: int, *, per_host: bool = False) -> Any:
    """Run work(heartbeat) in one process, and return its JSON result in all processes.

    No process waits in a collective, so the work may take hours. If the work raises ValueError or OSError,
    all processes raise ValueError with the same message. If any process receives a signal, the work stops and
    all processes raise Preempted.

    The worker and the other processes exchange the following keys in torch's store:

        once/<topic>/<rank>      [ExitReason, message or result] of this worker, which all processes wait for
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
    this_rank = accelerator.process_index
    channel = Channel()
    key_prefix = f"once/{topic}"
    worker_rank = this_rank - local_rank() if per_host else 0  # rank whose result this process returns
    worker_ranks = set(gather_object([worker_rank]))
    if this_rank == worker_rank:
        try:
            with in_phase(f"preparing the {topic}"):
                own_outcome = (ExitReason.NONE, work(_make_heartbeat(channel, key_prefix)))
        except (ValueError, OSError) as error:
            own_outcome = (ExitReason.PROBLEM, f"{error} (on host {socket.gethostname()})")
        except Preempted:
            own_outcome = (ExitReason.STOP, None)
        channel.post(f"{key_prefix}/{this_rank}", own_outcome)
    with in_phase(f"waiting for the {topic}"):
        outcome_by_rank: dict[int, Any] = {}
        heartbeat_count, heartbeat_at = -1, time.monotonic()  # last count seen, and when it changed
        stop_posted_at = 0.0
        while pending_ranks := worker_ranks - outcome_by_rank.keys():
            new_outcome_by_rank = {rank: channel.read(f"{key_prefix}/{rank}") for rank in pending_ranks}
            if any(new_outcome_by_rank.values()):
                outcome_by_rank |= {
                    rank: new_outcome for rank, new_outcome in new_outcome_by_rank.items() if new_outcome
                }
                continue
            if channel.store_error:
                raise channel.store_error
            if watch.wanted():
                # The processes still wait for all workers' outcomes
                channel.post(f"{key_prefix}/stop", True)
                stop_posted_at = stop_posted_at or time.monotonic()
                if time.monotonic() - stop_posted_at > STOP_TIMEOUT_S:
                    raise Preempted  # the worker has died, and the launcher will stop this process
            latest_heartbeat_count = channel.add_to_counter(f"{key_prefix}/heartbeats", 0)  # only reads
            if latest_heartbeat_count != heartbeat_count:
                heartbeat_count, heartbeat_at = latest_heartbeat_count, time.monotonic()
            elif time.monotonic() - heartbeat_at > timeout_s:
                watch.report_hang()
                raise ValueError(
                    f"rank {', '.join(map(str, sorted(pending_ranks)))} sent no heartbeat for {timeout_s} s"
                    f" while preparing the {topic}. Check the rank's host, or increase --timeout_s."
                )
            time.sleep(STORE_POLL_INTERVAL_S)
    worker_outcomes = [outcome_by_rank[rank] for rank in sorted(worker_ranks)]
    exit_reason, message_or_result = max(worker_outcomes, key=itemgetter(0))  # the largest reason wins
    if exit_reason == ExitReason.PROBLEM:
        raise ValueError(message_or_result)
    if exit_reason == ExitReason.STOP:
        raise Preempted
    _, worker_result = outcome_by_rank[worker_rank]
    return worker_result


def _make_heartbeat(channel: Channel, key_prefix: str) -> Callable[[], None]:
    """Return a function heartbeat() that reports progress to all processes, at most once per second.

    heartbeat() raises Preempted after any process has received a stop signal.
    """
    heartbeat_sent_at = 0.0

    def heartbeat() -> None:
        nonlocal heartbeat_sent_at
        _raise_if_stopping()
        if time.monotonic() - heartbeat_sent_at > HEARTBEAT_INTERVAL_S:
            heartbeat_sent_at = time.monotonic()
            channel.add_to_counter(f"{key_prefix}/heartbeats", 1)
            if channel.read(f"{key_prefix}/stop"):
                raise Preempted
            if channel.store_error:
                raise channel.store_error

    return heartbeat


def _raise_if_stopping() -> None:
    """Raise Preempted if this process received a stop signal or its launcher has exited."""
    if watch.wanted():
        raise Preempted


def _format_difference(first_json: str | None, other_json: str | None) -> str:
    """Return the first JSON value as text. If both values are objects, include only entries that differ."""
    first_value, other_value = json.loads(first_json or "null"), json.loads(other_json or "null")
    if isinstance(first_value, dict) and isinstance(other_value, dict):
        return ", ".join(
            f"{field}={entry}" for field, entry in first_value.items() if other_value.get(field) != entry
        )
    return str(first_value)
