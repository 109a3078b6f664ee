"""Agent on each host of a job. It starts and stops the host's part and leaves no process behind.

launch.py starts the agent over ssh or locally. The agent first sends an event that describes its host. Then
the agent accepts the requests `start`, `stop`, `kill` and `beat` (a heartbeat). It forwards the job's output
and the events of the job's processes (onecurve/system/env.py). When the input ends, or no heartbeat arrives
for SILENCE_S, launch.py has ended or the connection is lost. The agent then stops its part as for `stop`.
"""

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import psutil

from onecurve.system import processes
from onecurve.system.env import EVENTS_FILE, JOB, PREEMPTED, EventReader
from tools.launch.hosts import connection_addresses, event_line, requests

BEAT_S = 5  # interval of launch.py's heartbeats
ALIVE_S = 2  # interval of the agent's heartbeats, which reveal a lost host sooner than ssh does
SILENCE_S = 45  # time without a heartbeat after which the agent stops its host's part
FENCE_S = 15  # the same in an elastic job, where the agent kills its part because other hosts continue
GRACE_S = 40  # time from `stop` to SIGKILL; launchers kill their processes 30 s after SIGTERM
SUSPENDED = "is suspended by a signal (SIGSTOP or a debugger), and the other ranks waited for it"

Queue = queue.SimpleQueue[tuple[str, dict[str, Any]]]  # requests, and `signal` when this process receives one

_writing = threading.Lock()  # held while a line is written to launch.py


def main() -> None:
    processes.adopt_orphans()
    received: Queue = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: received.put(("signal", {})))
    threading.Thread(target=_receive, args=(received,), daemon=True).start()
    threading.Thread(target=_send_heartbeats, daemon=True).start()
    name = "beat"
    while name == "beat":
        try:
            name, part = received.get(timeout=SILENCE_S)
        except queue.Empty:
            return
    if name != "start":
        sys.exit(name == "signal")  # the host leaves the job before the job has started
    with tempfile.TemporaryDirectory(prefix="launch-", ignore_cleanup_errors=True) as folder:
        sys.exit(_run(part, EventReader(Path(folder) / "events"), received))


def _run(part: dict[str, Any], events: EventReader, received: Queue) -> int:
    """Run this host's part of the job and return its exit status.

    Args:
        part: Arguments of the `start` request, which are job, words, env, first and master (the master's
            address and port, or None in a job on one host).
    """
    part["env"] |= {EVENTS_FILE: str(events.file)} | ({JOB: part["job"]} if part["job"] else {})
    try:
        child = _start(part)
    except (ValueError, OSError) as error:
        print(f"error: {error}", flush=True)
        return 1
    assert child.stdout
    relay = threading.Thread(target=_relay, args=(child.stdout,), daemon=True)
    relay.start()
    statuses: set[int] = set()  # statuses reported by the job's processes; launchers turn most into 1
    status = _wait(child, received, lambda: _pass_on(events, statuses), is_elastic=bool(part["job"]))
    relay.join(5)
    _pass_on(events, statuses)
    if status != 0 and PREEMPTED in statuses <= {0, PREEMPTED}:
        return PREEMPTED
    return 128 - status if status < 0 else status


def _pass_on(events: EventReader, statuses: set[int]) -> None:
    """Send new events to launch.py, and add the exit statuses of the job's processes to `statuses`."""
    for event in events.new():
        if event["event"] == "exit":
            statuses.add(event["status"])
        else:
            _send(event_line(**event))


def _receive(received: Queue) -> None:
    for request in requests():
        received.put(request)
    received.put(("stop", {}))


def _send_heartbeats() -> None:
    """Send an event that describes this host, then heartbeats."""
    has_gpus = any(Path("/dev").glob("nvidia[0-9]*")) and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    _send(event_line("hello", hostname=socket.gethostname(), has_gpus=has_gpus, **connection_addresses()))
    while True:
        time.sleep(ALIVE_S)
        _send(event_line("alive"))


def _start(part: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start this host's launcher, usually `accelerate launch`."""
    if part["job"]:
        _end_leftovers(part["job"])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path} | part["env"]
    if part["master"]:
        address, port = part["master"]
        interface, local_address = processes.interface_to(address)
        if local_address.startswith("127."):
            raise ValueError(
                f"the first host's address {address} is a loopback address on this host. Pass --master_addr"
                " with an address that all hosts can reach."
            )
        env = processes.use_interface(interface) | env
        if part["first"]:
            _check_port(port)
    return subprocess.Popen(
        part["words"],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=processes.end_with_parent,
    )


def _end_leftovers(job: str) -> None:
    """Kill the processes of this job's previous round, whose agent may still be running."""
    candidates = psutil.process_iter(["environ"])
    processes.kill([process for process in candidates if (process.info["environ"] or {}).get(JOB) == job])


def _relay(output: IO[bytes]) -> None:
    """Forward the job's output line by line.

    After launch.py has ended, output is dropped, so that print() does not fail in a process that is saving.
    """
    for line in output:
        _write(line)


def _check_port(port: int) -> None:
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        reason = f"{os.strerror(error.errno or 0)}{processes.listening_process(port)}"
        raise ValueError(f"port {port}: {reason}. Pass another --port.") from None


def _wait(child: subprocess.Popen[bytes], received: Queue, poll: Callable[[], None], is_elastic: bool) -> int:
    """Wait until the child and all its descendants have ended. Return the child's exit status.

    Calls poll() several times a second.
    """
    received_at, stop, deadline = time.monotonic(), False, None
    while child.poll() is None or processes.running_descendants([child.pid]):
        poll()
        with contextlib.suppress(queue.Empty):
            name, _ = received.get(timeout=0.2)
            received_at = time.monotonic()
            stop = stop or name in ("stop", "signal")
            if name == "signal":
                _send(event_line("leaving", why="a signal to its agent"))
            deadline = 0.0 if name == "kill" else deadline
        now = time.monotonic()
        silence_s = FENCE_S if is_elastic else SILENCE_S
        if not stop and now - received_at > silence_s:
            stop, deadline = True, 0.0 if is_elastic else None
            _send(f"stopping: no heartbeat from launch.py for {silence_s} s")
        if deadline is None and (stop or child.returncode is not None):
            _name_suspended()
            child.send_signal(signal.SIGTERM)
            deadline = now + GRACE_S
        if deadline is not None and now > deadline:
            child.kill()
            processes.kill(processes.running_descendants([child.pid]))
    return child.returncode


def _name_suspended() -> None:
    """Report suspended processes before they are killed. Waiting for them made the other hosts fail."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_STOPPED:
                name = f"rank {process.environ()['RANK']}" if "RANK" in process.environ() else process.name()
                _send(f"error: {name}, process {process.pid}, {SUSPENDED}")


def _send(text: str) -> None:
    _write(f"{text}\n".encode())


def _write(data: bytes) -> None:
    with _writing, contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), data)


if __name__ == "__main__":
    main()
