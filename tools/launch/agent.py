"""Agent that starts and stops a job's processes on one host, and leaves no process behind.

launch.py starts an agent on each host, over SSH or locally. The agent first sends an event that describes the
host, and then accepts the requests `start`, `stop`, `kill` and `beat` (a heartbeat). The agent forwards the
processes' output and the events that they report (onecurve/system/env.py). If the input ends, or if no
heartbeat arrives for SILENCE_S, launch.py has ended or the connection is lost. In both cases, the agent stops
the processes as it does on a `stop` request.
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
from onecurve.system.env import EVENTS_FILE_VARIABLE, JOB_VARIABLE, PREEMPTED_STATUS, EventReader
from tools.launch.hosts import connection_addresses, event_line, requests

BEAT_S = 5  # seconds between heartbeats from launch.py
ALIVE_S = 2  # seconds between heartbeats from the agent, which reveal a lost host earlier than ssh does
SILENCE_S = 45  # seconds without a heartbeat after which the agent stops the processes
FENCE_S = 15  # seconds without a heartbeat after which an elastic job's agent kills the processes
GRACE_S = 40  # seconds from `stop` to SIGKILL; launchers kill their processes 30 s after SIGTERM
SUSPENDED = "is suspended by a signal (SIGSTOP or a debugger), and the other ranks waited for this process"

# Queue of requests, with a `signal` entry for each signal that this process receives
Inbox = queue.SimpleQueue[tuple[str, dict[str, Any]]]

_writing = threading.Lock()  # held by the thread that writes a line to launch.py


def main() -> None:
    processes.adopt_orphans()
    received: Inbox = queue.SimpleQueue()
    for signal_number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(signal_number, lambda *_: received.put(("signal", {})))
    threading.Thread(target=_receive_requests, args=(received,), daemon=True).start()
    threading.Thread(target=_send_heartbeats, daemon=True).start()
    request = "beat"
    while request == "beat":
        try:
            request, arguments = received.get(timeout=SILENCE_S)
        except queue.Empty:
            return
    if request != "start":
        sys.exit(request == "signal")  # the host leaves the job before it starts
    with tempfile.TemporaryDirectory(prefix="launch-", ignore_cleanup_errors=True) as folder:
        sys.exit(_run_job(arguments, EventReader(Path(folder) / "events"), received))


def _run_job(arguments: dict[str, Any], events: EventReader, received: Inbox) -> int:
    """Run the job's processes on this host, and return the launcher's exit status.

    Args:
        arguments: Arguments of the `start` request: job, words, env, first, and master (address and port of
            the first host, or None in a job on one host).
        events: Reader of events reported by the processes.
        received: Queue of later requests and signals.
    """
    is_elastic = bool(arguments["job"])
    arguments["env"][EVENTS_FILE_VARIABLE] = str(events.file)
    if is_elastic:
        arguments["env"][JOB_VARIABLE] = arguments["job"]
    try:
        launcher = _start_launcher(arguments)
    except (ValueError, OSError) as error:
        print(f"error: {error}", flush=True)
        return 1
    assert launcher.stdout
    output_thread = threading.Thread(target=_forward_output, args=(launcher.stdout,), daemon=True)
    output_thread.start()
    statuses: set[int] = set()  # exit statuses that the processes report
    exit_status = _wait_for_end(launcher, received, lambda: _send_new_events(events, statuses), is_elastic)
    output_thread.join(5)
    _send_new_events(events, statuses)
    # Launchers replace most exit statuses of their processes with 1.
    if exit_status != 0 and PREEMPTED_STATUS in statuses <= {0, PREEMPTED_STATUS}:
        return PREEMPTED_STATUS
    return 128 - exit_status if exit_status < 0 else exit_status


def _send_new_events(events: EventReader, statuses: set[int]) -> None:
    """Send new events to launch.py, and add the processes' reported exit statuses to `statuses`."""
    for event in events.new():
        if event["event"] == "exit":
            statuses.add(event["status"])
        else:
            _send_line(event_line(**event))


def _receive_requests(received: Inbox) -> None:
    for request in requests():
        received.put(request)
    received.put(("stop", {}))


def _send_heartbeats() -> None:
    """Send an event that describes this host, and then send heartbeats forever."""
    has_gpus = any(Path("/dev").glob("nvidia[0-9]*")) and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    hostname = socket.gethostname()
    _send_line(event_line("hello", hostname=hostname, has_gpus=has_gpus, **connection_addresses()))
    while True:
        time.sleep(ALIVE_S)
        _send_line(event_line("alive"))


def _start_launcher(arguments: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start the launcher on this host, usually `accelerate launch`."""
    if arguments["job"]:
        _kill_previous_round(arguments["job"])
    search_path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": search_path} | arguments["env"]
    if arguments["master"]:
        address, port = arguments["master"]
        interface, local_address = processes.interface_to(address)
        if local_address.startswith("127."):
            problem = f"the first host's address {address} is a loopback address on this host"
            raise ValueError(f"{problem}. Pass --master_addr with an address that all hosts can reach.")
        env = processes.use_interface(interface) | env
        if arguments["first"]:
            _check_port(port)
    return subprocess.Popen(
        arguments["words"],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=processes.end_with_parent,
    )


def _kill_previous_round(job: str) -> None:
    """Kill the processes from this job's previous round. That round's agent may still be running."""
    candidates = psutil.process_iter(["environ"])
    processes.kill([other for other in candidates if (other.info["environ"] or {}).get(JOB_VARIABLE) == job])


def _forward_output(output: IO[bytes]) -> None:
    """Forward the output of the job's processes line by line.

    If launch.py has ended, drop the output, so that print() does not fail in a process that saves a
    checkpoint.
    """
    for line in output:
        _write_bytes(line)


def _check_port(port: int) -> None:
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        reason = f"{os.strerror(error.errno or 0)}{processes.listening_process(port)}"
        raise ValueError(f"port {port} can't be used: {reason}. Pass a different --port.") from None


def _wait_for_end(
    launcher: subprocess.Popen[bytes], received: Inbox, pass_on_events: Callable[[], None], is_elastic: bool
) -> int:
    """Wait until the child process and all of its descendants have ended, and return the child's exit status.

    This function calls poll() several times per second.
    """
    last_request_s, is_stopping, kill_at = time.monotonic(), False, None
    while launcher.poll() is None or processes.running_descendants([launcher.pid]):
        pass_on_events()
        with contextlib.suppress(queue.Empty):
            request, _ = received.get(timeout=0.2)
            last_request_s = time.monotonic()
            is_stopping = is_stopping or request in ("stop", "signal")
            if request == "signal":
                _send_line(event_line("leaving", why="the agent received a signal"))
            kill_at = 0.0 if request == "kill" else kill_at
        now_s = time.monotonic()
        silence_s = FENCE_S if is_elastic else SILENCE_S
        if not is_stopping and now_s - last_request_s > silence_s:
            is_stopping, kill_at = True, 0.0 if is_elastic else None
            _send_line(f"stopping: launch.py sent no heartbeat for {silence_s} s")
        if kill_at is None and (is_stopping or launcher.returncode is not None):
            _report_suspended_processes()
            launcher.send_signal(signal.SIGTERM)
            kill_at = now_s + GRACE_S
        if kill_at is not None and now_s > kill_at:
            launcher.kill()
            processes.kill(processes.running_descendants([launcher.pid]))
    return launcher.returncode


def _report_suspended_processes() -> None:
    """Report suspended processes, which made the other hosts wait and fail, before the agent kills them."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_STOPPED:
                name = f"rank {process.environ()['RANK']}" if "RANK" in process.environ() else process.name()
                _send_line(f"error: {name}, process {process.pid}, {SUSPENDED}")


def _send_line(text: str) -> None:
    _write_bytes(f"{text}\n".encode())


def _write_bytes(output: bytes) -> None:
    with _writing, contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), output)


if __name__ == "__main__":
    main()
