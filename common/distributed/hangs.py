"""Reports of a job that hangs: each rank's phase, step, stack and last collective.

A thread of each rank polls torch's flight recorder, which records gloo and NCCL. When a collective has waited
for most of the time-out, the thread asks all ranks for their evidence before the time-out ends them (NCCL's
watchdog aborts a process without a message from Python). A stopped rank does not answer.
"""

import contextlib
import faulthandler
import json
import os
import socket
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from types import FrameType
from typing import Any

import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object

from common.system.env import EVENTS_FILE, report
from common.system.hangs import Evidence, hang_table
from common.system.paths import ROOT
from common.system.phase import now

ASK_AT = 0.7  # share of the time-out after which a waiting collective is reported
POLL_S = 0.5
ANSWER_S = 1.0  # for the other ranks to answer
KEPT = 256  # recorded collectives; reading torch's default of 2,000 takes 35 ms or more
BEATS = 5  # heartbeats per time-out

_watch: "_HangWatch | None" = None


def record_collectives() -> None:
    """Makes torch record few collectives, and write no pickles at a time-out. Before the first group."""
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(KEPT))
    for name in ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        os.environ.setdefault(name, "0")


def watch_hangs(accelerator: Accelerator, timeout_s: float) -> None:
    """Starts to look for collectives that wait too long, and to answer other ranks. Collective."""
    global _watch
    if accelerator.num_processes == 1:
        return
    everyones = gather_object([[uuid.uuid4().hex, socket.gethostname()]])
    hosts = [host for _, host in everyones]
    _watch = _HangWatch(accelerator.process_index, hosts, everyones[0][0], timeout_s)
    threading.Thread(target=_watch.look, daemon=True).start()
    threading.Thread(target=_watch.answer, daemon=True).start()


def notice_hang() -> None:
    """Reports this process's evidence and asks the others for theirs, because this process ends soon."""
    if _watch:
        _watch.notice()


def stop_watching() -> None:
    """Stops the threads before this process ends."""
    if _watch:
        _watch.stopped = True


def collectives() -> list[dict[str, Any]]:
    """The collectives in torch's flight recorder, oldest first: op, group, number, age_s and is_done.

    number: in its group; a rank whose last number is smaller is behind.
    """
    entries = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # gloo's, NCCL's
        with contextlib.suppress(AttributeError, RuntimeError, ValueError):
            entries += json.loads(getattr(c10d, name)()).get("entries", [])
    unique = {(e["profiling_name"], e["process_group"][0], e["record_id"]): e for e in entries}
    return [
        {
            "op": e["profiling_name"],
            "group": e["process_group"][0],
            "number": e["collective_seq_id"],
            "age_s": time.time() - e["time_created_ns"] / 1e9,
            "is_done": e["retired"] or e["state"] == "completed",
        }
        for e in sorted(unique.values(), key=lambda e: e["time_created_ns"])
        if not e["is_p2p"]
    ]


class _HangWatch:
    def __init__(self, rank: int, hosts: list[str], job: str, timeout_s: float):
        self.rank, self.hosts, self.job, self.timeout_s = rank, hosts, job, timeout_s
        self.store = dist.distributed_c10d._get_default_store().clone()  # for the answering thread
        self.asking = dist.distributed_c10d._get_default_store().clone()
        self.lock = threading.Lock()
        self.stopped = self.noticed = self.answered = False
        self.first = True  # False once another rank is known to have noticed first

    def look(self) -> None:
        """Looks for a collective that waits too long, without the store, which may hang, too."""
        every_s = max(POLL_S, self.timeout_s / 40)
        while not (self.stopped or self.noticed):
            time.sleep(every_s)
            ages_s = [c["age_s"] for c in collectives() if not c["is_done"]]
            if max(ages_s, default=0.0) > ASK_AT * self.timeout_s and not self.stopped:
                self.notice()

    def answer(self) -> None:
        """Writes heartbeats into the store, and evidence when a rank asks for it."""
        beaten = 0.0
        with contextlib.suppress(RuntimeError):  # the process that hosts the store is gone
            while not self.stopped:
                if time.monotonic() - beaten > self.timeout_s / BEATS:
                    beaten = time.monotonic()
                    self.store.set(f"{self.job}/alive/{self.rank}", str(time.time()))
                if self.store.check([f"{self.job}/hang"]):
                    mine = self.leave()
                    self.store.set(f"{self.job}/hang/{self.rank}", json.dumps(mine))
                    return
                time.sleep(POLL_S)

    def notice(self) -> None:
        with self.lock:
            if self.noticed:
                return
            self.noticed = True
        mine = self.leave()
        others: dict[int, Evidence] = {}
        # In a thread, as a store in a stopped process does not answer.
        asking = threading.Thread(target=self._ask, args=(mine, others), daemon=True)
        asking.start()
        asking.join(2 * ANSWER_S)
        report("hang", **mine)  # again, with the last heartbeats of silent ranks
        if EVENTS_FILE not in os.environ and self.first:
            found = {**others, self.rank: mine}
            lines = hang_table(list(found.values()))
            lines.append(f"the stacks of all threads: {Path(mine['file']).parent}, on each host")
            print("\n".join(lines), file=sys.stderr, flush=True)

    def _ask(self, mine: Evidence, others: dict[int, Evidence]) -> None:
        with contextlib.suppress(RuntimeError):
            store = self.asking
            self.first = store.compare_set(f"{self.job}/hang", "", str(self.rank)) == str(self.rank).encode()
            missing = set(range(len(self.hosts))) - {self.rank}
            until = time.monotonic() + ANSWER_S
            while missing and time.monotonic() < until:
                for rank in sorted(missing):
                    if store.check([key := f"{self.job}/hang/{rank}"]):
                        others[rank] = json.loads(store.get(key))
                missing -= others.keys()
                time.sleep(0.1)
            for rank in missing:
                if store.check([key := f"{self.job}/alive/{rank}"]):
                    mine["silent_s"][rank] = time.time() - float(store.get(key))

    def leave(self) -> Evidence:
        """Reports this process's evidence to launch.py or in a file, and returns it."""
        mine = evidence(self.rank, self.hosts)
        if EVENTS_FILE not in os.environ:
            mine["file"] = _write(self.job, self.rank, mine.pop("stacks"))
        with self.lock:
            if not self.answered:
                self.answered = True
                report("hang", **mine)
        mine.pop("stacks", None)
        return mine


def evidence(rank: int, hosts: list[str]) -> Evidence:
    """This process's evidence for JSON: names of files, lines and functions, but no values."""
    found = collectives()
    sequence: dict[str, int] = {}
    for one in found:
        sequence[one["group"]] = max(one["number"], sequence.get(one["group"], 0))
    return {
        "rank": rank,
        "host": hosts[rank],
        "hosts": hosts,
        "pid": os.getpid(),
        "phase": now.phase,
        "step": now.step,
        "where": _where(sys._current_frames().get(threading.main_thread().ident or 0)),
        "waits": [one for one in found if not one["is_done"]],
        "last": found[-1] if found else None,
        "sequence": sequence,
        "silent_s": {},
        "stacks": _stacks(),
    }


def _where(frame: FrameType | None) -> str:
    """The innermost line of the stack in the project or beside the script."""
    roots = (ROOT, Path(sys.argv[0]).resolve().parent)
    while frame:
        file = Path(frame.f_code.co_filename).absolute()
        root = next((root for root in roots if file.is_relative_to(root)), None)
        if root and "site-packages" not in file.parts and file != Path(__file__):
            return f"{file.relative_to(root)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "-"


def _stacks() -> str:
    with contextlib.suppress(OSError), tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
    return ""


def _write(job: str, rank: int, stacks: str) -> str:
    folder = Path(tempfile.gettempdir()) / f"hang-{job[:8]}"
    file = folder / f"rank_{rank}.txt"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        file.write_text(stacks)
    return str(file)
