"""Agent that starts and stops a job's processes on one host, and leaves no process behind.

launch.py starts an agent on each host, over SSH or locally. The agent first sends an event that describes the
host, and then accepts the requests `start`, `stop`, `kill` and `beat` (a heartbeat). The agent forwards the
processes' output and the events that they report (onecurve/system/env.py). If the input ends, or if no
heartbeat arrives for SILENCE_TIMEOUT_S, launch.py has ended or the connection is lost. In both cases, the
agent stops the processes as it does on a `stop` request.
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
from functools import partial
from pathlib import Path
from typing import IO, Any

import psutil

from onecurve.system import processes
from onecurve.system.env import EVENTS_FILE_VARIABLE, JOB_VARIABLE, PREEMPTED_STATUS, EventReader
from tools.launch.hosts import connection_addresses, event_line, read_requests

LAUNCHER_HEARTBEAT_S = 5  # seconds between heartbeats from launch.py
AGENT_HEARTBEAT_S = 2  # seconds between the agent's heartbeats; they reveal a lost host earlier than ssh does
SILENCE_TIMEOUT_S = 45  # seconds without a heartbeat after which the agent stops the processes
FENCE_TIMEOUT_S = 15  # seconds without a heartbeat after which an elastic job's agent kills the processes
KILL_DELAY_S = 40  # seconds from `stop` to SIGKILL; launchers kill their processes 30 s after SIGTERM
SUSPENDED = "is suspended by a signal (SIGSTOP or a debugger), and the other ranks waited for this process"

# Names and arguments of requests, with a `signal` entry for each signal that this process receives
RequestQueue = queue.SimpleQueue[tuple[str, dict[str, Any]]]

_stdout_lock = threading.Lock()  # held by the thread that writes a line to launch.py


def main() -> None:
    """Wait for the `start` request from launch.py, run the job on this host, and exit with the job's status.

    Exit without running a job on any other request or signal, or without heartbeats for SILENCE_TIMEOUT_S.
    """
    processes.adopt_orphans()
    request_queue: RequestQueue = queue.SimpleQueue()
    for signal_number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(signal_number, lambda *_: request_queue.put(("signal", {})))
    threading.Thread(target=_receive_requests, args=(request_queue,), daemon=True).start()
    threading.Thread(target=_send_hello_and_heartbeats, daemon=True).start()
    request_name = "beat"
    while request_name == "beat":
        try:
            request_name, arguments = request_queue.get(timeout=SILENCE_TIMEOUT_S)
        except queue.Empty:
            return  # launch.py is silent
    if request_name != "start":
        sys.exit(request_name == "signal")  # status 1 if a signal makes the host leave before the job starts
    with tempfile.TemporaryDirectory(prefix="launch-", ignore_cleanup_errors=True) as events_folder:
        sys.exit(_run_job(arguments, EventReader(Path(events_folder) / "events"), request_queue))


def _run_job(start_request: dict[str, Any], event_reader: EventReader, request_queue: RequestQueue) -> int:
    """Run the job's processes on this host, and return the launcher's exit status.

    Args:
        start_request: Arguments of the `start` request: job, command, env, is_first_host, and master (address
            and port of the first host, or None in a job on one host).
        event_reader: Reader of events reported by the processes.
        request_queue: Queue of later requests and signals.
    """
    is_job_elastic = bool(start_request["job"])
    start_request["env"][EVENTS_FILE_VARIABLE] = str(event_reader.file)
    if is_job_elastic:
        start_request["env"][JOB_VARIABLE] = start_request["job"]
    try:
        job_launcher = _start_job_launcher(start_request)
    except (ValueError, OSError) as launch_error:
        print(f"error: {launch_error}", flush=True)
        return 1
    assert job_launcher.stdout
    forwarding_thread = threading.Thread(target=_forward_output, args=(job_launcher.stdout,), daemon=True)
    forwarding_thread.start()
    reported_statuses: set[int] = set()  # exit statuses that the processes report
    send_new_events = partial(_send_new_events, event_reader, reported_statuses)
    launcher_status = _wait_for_job_end(job_launcher, request_queue, send_new_events, is_job_elastic)
    forwarding_thread.join(timeout=5)  # the thread forwards the last lines
    send_new_events()
    # Launchers replace most exit statuses of their processes with 1.
    was_preempted = PREEMPTED_STATUS in reported_statuses and reported_statuses <= {0, PREEMPTED_STATUS}
    if launcher_status != 0 and was_preempted:
        return PREEMPTED_STATUS
    was_launcher_killed = launcher_status < 0  # Popen reports signal N as -N, and shells report it as 128 + N
    return 128 - launcher_status if was_launcher_killed else launcher_status


def _send_new_events(event_reader: EventReader, reported_statuses: set[int]) -> None:
    """Send the processes' new events to launch.py, except for `exit` events.

    Add the exit statuses in `exit` events to `reported_statuses`.
    """
    for reported_event in event_reader.read_new_events():
        if reported_event["event"] == "exit":
            reported_statuses.add(reported_event["status"])
        else:
            _send_line(event_line(**reported_event))


def _receive_requests(request_queue: RequestQueue) -> None:
    """Put requests from launch.py into the queue, and a `stop` request after the connection has ended."""
    for request_and_arguments in read_requests():
        request_queue.put(request_and_arguments)
    request_queue.put(("stop", {}))  # launch.py has closed the connection


def _send_hello_and_heartbeats() -> None:
    """Send launch.py a `hello` event that describes this host, and then send heartbeats forever."""
    host_has_gpus = any(Path("/dev").glob("nvidia[0-9]*")) and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    hostname = socket.gethostname()
    _send_line(event_line("hello", hostname=hostname, has_gpus=host_has_gpus, **connection_addresses()))
    while True:
        time.sleep(AGENT_HEARTBEAT_S)
        _send_line(event_line("alive"))


def _start_job_launcher(start_request: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start the job's launcher on this host, usually `accelerate launch`.

    In an elastic job, first kill all processes from the job's previous round. In a job on several hosts, make
    gloo and NCCL use the network interface on the route to the first host.

    Raises:
        ValueError: If this host can't reach the first host, or if a port on this host is in use.
        OSError: If the launcher can't be started.
    """
    if start_request["job"]:
        _kill_previous_round(start_request["job"])
    executable_search_path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    launcher_env = os.environ | {"PATH": executable_search_path} | start_request["env"]
    if start_request["master"]:
        first_host_address, rendezvous_port = start_request["master"]
        network_interface, local_address = processes.interface_to(first_host_address)
        if local_address.startswith("127."):
            ip_problem = f"the first host's address {first_host_address} is a loopback address on this host"
            raise ValueError(f"{ip_problem}. Pass --master_addr with an address that all hosts can reach.")
        launcher_env = processes.use_interface(network_interface) | launcher_env
        if start_request["is_first_host"]:
            _check_port_is_free(rendezvous_port)
    return subprocess.Popen(
        start_request["command"],
        env=launcher_env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=processes.end_with_parent,
    )


def _kill_previous_round(job_id: str) -> None:
    """Kill the processes from this job's previous round. That round's agent may still be running."""

    def belongs_to_job(running_process: psutil.Process) -> bool:
        return (running_process.info["environ"] or {}).get(JOB_VARIABLE) == job_id

    processes.kill(list(filter(belongs_to_job, psutil.process_iter(["environ"]))))


def _forward_output(launcher_output: IO[bytes]) -> None:
    """Forward the output of the job's processes line by line.

    If launch.py has ended, drop the output, so that print() does not fail in a process that saves a
    checkpoint.
    """
    for line_bytes in launcher_output:
        _write_to_stdout(line_bytes)


def _check_port_is_free(port: int) -> None:
    """Bind a port on this host for a moment. Raise ValueError if another process uses the port."""
    try:
        socket.create_server(("", port)).close()
    except OSError as bind_error:
        port_problem = f"{os.strerror(bind_error.errno or 0)}{processes.describe_listener(port)}"
        raise ValueError(f"port {port} can't be used: {port_problem}. Pass a different --port.") from None


def _wait_for_job_end(
    job_launcher: subprocess.Popen[bytes],
    request_queue: RequestQueue,
    send_new_events: Callable[[], None],
    is_job_elastic: bool,
) -> int:
    """Wait until the job's launcher and all of its descendants have ended, and return its exit status.

    On a `stop` request, a signal, or silence of launch.py, send SIGTERM to the launcher. Kill all processes
    KILL_DELAY_S later, or at once on a `kill` request and when launch.py is silent in an elastic job.

    Args:
        job_launcher: Process of the job's launcher.
        request_queue: Queue of requests and signals.
        send_new_events: Function that forwards the processes' events; called several times per second.
        is_job_elastic: True if the job is elastic.
    """
    silence_timeout_s = FENCE_TIMEOUT_S if is_job_elastic else SILENCE_TIMEOUT_S
    is_job_stopping = False
    last_request_s = time.monotonic()
    kill_job_at_s: float | None = None  # time.monotonic() at which the processes are killed, or None
    while job_launcher.poll() is None or processes.running_descendants([job_launcher.pid]):
        send_new_events()
        with contextlib.suppress(queue.Empty):
            request_name, _ = request_queue.get(timeout=0.2)
            last_request_s = time.monotonic()
            is_job_stopping = is_job_stopping or request_name in ("stop", "signal")
            if request_name == "signal":
                _send_line(event_line("leaving", why="the agent received a signal"))
            if request_name == "kill":
                kill_job_at_s = 0.0  # at once
        now_s = time.monotonic()
        if not is_job_stopping and now_s - last_request_s > silence_timeout_s:
            is_job_stopping = True
            kill_job_at_s = 0.0 if is_job_elastic else None
            _send_line(f"stopping: launch.py sent no heartbeat for {silence_timeout_s} s")
        has_launcher_ended = job_launcher.returncode is not None
        if kill_job_at_s is None and (is_job_stopping or has_launcher_ended):
            _report_suspended_processes()
            job_launcher.send_signal(signal.SIGTERM)
            kill_job_at_s = now_s + KILL_DELAY_S
        if kill_job_at_s is not None and now_s > kill_job_at_s:
            job_launcher.kill()
            processes.kill(processes.running_descendants([job_launcher.pid]))
    return job_launcher.returncode


def _report_suspended_processes() -> None:
    """Report suspended processes to launch.py, because they made the other hosts wait and fail."""
    for job_process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if job_process.status() == psutil.STATUS_STOPPED:
                process_rank = job_process.environ().get("RANK")
                process_name = f"rank {process_rank}" if process_rank else job_process.name()
                _send_line(f"error: {process_name}, process {job_process.pid}, {SUSPENDED}")


def _send_line(line_text: str) -> None:
    """Send a line of output or an event to launch.py, which reads this process's stdout."""
    _write_to_stdout(f"{line_text}\n".encode())


def _write_to_stdout(line_bytes: bytes) -> None:
    """Write a whole line to stdout, which several threads use. Ignore errors if launch.py has ended."""
    with _stdout_lock, contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), line_bytes)


if __name__ == "__main__":
    main()
