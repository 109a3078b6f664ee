"""A process that has imported torch and accelerate, and forks itself for each `python` of the tests.

A launch of a launcher and two processes takes 9 s of processor time less: each import of torch is 3 s. The
server has run no torch operation and has no threads, so its forks start as a fresh process does. It imports
nothing of the project: a fork may run a copy that a test has broken on purpose.

    python tests/support/warm_server.py SOCKET [MODULE ...]

It ends with its standard input. A fork whose client is gone is killed.
"""

import array
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

RESET = (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
LAUNCHERS = ("accelerate.commands", "deepspeed", "torch.distributed", "torchrun", "launch.py")


@dataclass
class Request:
    words: list[str]
    folder: str
    env: dict[str, str]
    ignored: list[int]
    python: str
    streams: list[int]


def main() -> None:
    request = serve(sys.argv[1], sys.argv[2:])
    if request:
        start(request)


def serve(address: str, modules: list[str]) -> Request | None:
    """Returns in each fork, with what it shall do; in the server None, when its standard input ends."""
    preload(modules)
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(64)
    print("listening", flush=True)
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    events = selectors.DefaultSelector()
    for source in (listener, reader, 0):
        events.register(source, selectors.EVENT_READ)
    clients: dict[int, socket.socket] = {}  # by process
    while True:
        for key, _ in events.select():
            if key.fileobj is listener:
                client, _ = listener.accept()
                request = receive(client)
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    events.close()
                    for descriptor in (listener, client, *clients.values()):
                        descriptor.close()
                    os.close(reader)
                    os.close(writer)
                    return request
                for stream in request.streams:
                    os.close(stream)
                clients[pid] = client
                events.register(client, selectors.EVENT_READ, pid)
                tell(client, pid)
            elif key.fileobj == 0:
                for pid in clients:
                    os.kill(pid, signal.SIGKILL)
                return None
            elif key.fileobj == reader:
                os.read(reader, 4096)
            elif key.data in clients:  # it has nothing more to say: it is gone
                events.unregister(key.fileobj)
                os.kill(key.data, signal.SIGKILL)
        reap(clients, events)


def preload(modules: list[str]) -> None:
    import torch.distributed.run
    import torch.utils.tensorboard  # noqa: F401

    for name in modules:
        importlib.import_module(name)


def receive(client: socket.socket) -> Request:
    size, control, *_ = client.recvmsg(8, socket.CMSG_SPACE(3 * 4))
    streams = array.array("i")
    streams.frombytes(control[0][2])
    left, data = int.from_bytes(size, "big"), b""
    while len(data) < left:
        data += client.recv(left - len(data))
    return Request(**json.loads(data), streams=list(streams))


def tell(client: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):
        client.sendall(f"{number}\n".encode())


def reap(clients: dict[int, socket.socket], events: selectors.BaseSelector) -> None:
    while clients:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        client = clients.pop(pid)
        with contextlib.suppress(KeyError):
            events.unregister(client)
        tell(client, status)
        client.close()


def start(request: Request) -> None:
    """Becomes what `python WORDS` would be."""
    for stream, descriptor in enumerate(request.streams):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    for number in RESET:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in request.ignored:
        signal.signal(number, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(request.env)
    os.chdir(request.folder)
    words = request.words
    if words[0] == "-u":
        words = words[1:]
        sys.stdout.reconfigure(write_through=True)
    paths = filter(None, request.env.get("PYTHONPATH", "").split(os.pathsep))
    is_module = words[0] == "-m"
    name = words[1] if is_module else Path(words[0]).name
    if name.startswith(LAUNCHERS):
        sys.executable = request.python  # its processes are forked, too
    if "OMP_NUM_THREADS" in os.environ:  # read when torch was imported
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if is_module:
        sys.path[:1] = [os.getcwd(), *paths]
        sys.argv = words[1:]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path[:1] = [str(Path(words[0]).resolve().parent), *paths]
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
