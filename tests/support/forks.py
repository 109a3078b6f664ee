"""Python processes that are forked from a server with torch already imported.

Starting torch and accelerate takes 5 s of CPU time, and a launch with two ranks takes 13 s. A fork takes 0.1
s. Popen replaces subprocess.Popen. A process that Popen forks is a child of the caller. The forked process
has the same command line, environment, working directory, session, standard streams, signals and processor
affinity as a newly started process. Forked processes also fork their children. For example, a launcher forks
its ranks from another server.

Popen starts commands that can't be forked: other programs, `python -c`, and commands whose environment
affects an import. The server runs no torch operation and has no threads.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import io
import multiprocessing.process
import os
import pickle
import resource
import runpy
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PRELOADED = (
    *("torch._dynamo", "torch._inductor", "torch.distributed.run", "torch.distributed.fsdp"),
    *("torch.distributed.checkpoint.state_dict", "torch.utils.tensorboard", "torch.utils.checkpoint"),
    *("torchvision.transforms.v2.functional", "torchcodec.decoders", "PIL.Image", "safetensors.torch"),
    *("accelerate", "accelerate.commands.launch", "accelerate.tracking", "accelerate.utils", "yaml", "tqdm"),
    *("sklearn.datasets", "matplotlib.figure", "matplotlib.backends.backend_agg", "psutil"),
)
OF_DEEPSPEED = ("deepspeed", "transformers.integrations", "setuptools")
# Prefixes of variables that the interpreter or a preloaded package reads at startup. A command can be forked
# only if the server's environment contains the same values of these variables.
READ_AT_START = ("HF_", "HUGGING", "HOME", "LANG", "LC_", "LD_", "MALLOC_", "MPL", "PYTHON", "XDG_")
READ_AT_START += ("TORCHDYNAMO_", "TORCH_LOGS", "TORCH_TRACE", "TORCH_COMPILE", "TRITON_")
HANDLED = ("PYTHONPATH", "PYTHONWARNINGS", "PYTHONUNBUFFERED", "HF_TOKEN")
# Commands that start no process that can be forked, or that wait until all their child processes have ended
WITHOUT_SERVER = ("train_", "validate", "prep_", "tools.launch.agent")
LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_AS)
PR_SET_MM, PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER, PR_SET_MM_MAP = 35, 36, 37, 14

_libc = ctypes.CDLL(None)
_start_process = subprocess.Popen._execute_child  # type: ignore[attr-defined]  # private, of CPython


class Server:
    """Client end of the socket to a server process."""

    def __init__(self, channel: socket.socket, environment: dict[str, str]):
        self.channel = channel
        self.environment = environment
        self.lock = threading.Lock()

    def fork(self, request: dict[str, Any], streams: list[int]) -> int:
        """Fork a process that becomes a child of this process, and return its pid."""
        with self.lock, _adopting_orphans():
            self.send(request, streams)
            return struct.unpack("!i", _receive(self.channel, 4))[0]

    def send(self, request: dict[str, Any], streams: list[int]) -> None:
        body = pickle.dumps(request)
        socket.send_fds(self.channel, [struct.pack("!I", len(body))], streams)
        self.channel.sendall(body)


class Popen(subprocess.Popen):
    """Replacement for subprocess.Popen that forks Python processes where possible."""

    def _execute_child(self, args, *rest):
        packages = "deepspeed" if any("zero" in str(w) or "deepspeed" in str(w) for w in args) else "torch"
        _execute(self, lambda: _server(packages), args, *rest)


RESET = {signal.SIGINT, signal.SIGHUP}


def reset_signals() -> None:
    """Restore the default handling of SIGINT and SIGHUP, which nohup and a shell's background jobs ignore.

    Callers may pass this function as Popen's `preexec_fn` argument.
    """
    for number in RESET:
        signal.signal(number, signal.SIG_DFL)


def _execute(self, server, *values):
    """Fork the process if possible, and otherwise call the original Popen._execute_child."""
    arguments = inspect.signature(_start_process).bind(self, *values).arguments
    args, cwd, preexec_fn = arguments["args"], arguments["cwd"], arguments["preexec_fn"]
    env = os.environ if arguments["env"] is None else arguments["env"]
    env = {os.fsdecode(name): os.fsdecode(value) for name, value in env.items()}
    # A process can be forked only if the caller sets no Popen options other than the program, streams,
    # working directory, environment and session.
    is_plain = preexec_fn in (None, reset_signals) and not (arguments["shell"] or arguments["pass_fds"])
    python_words = _python_words(args, env) if is_plain and isinstance(args, (list, tuple)) else None
    fork_server = server() if python_words else None
    if fork_server is None or _read_at_start(env) != _read_at_start(fork_server.environment):
        _start_process(self, *values)
        return
    reset = RESET if preexec_fn else set()
    os.umask(umask := os.umask(0o22))
    request = {
        "words": python_words,
        "cmdline": [sys.executable, *python_words],
        "env": env,
        "cwd": os.path.abspath(os.fsdecode(cwd)) if cwd else os.getcwd(),
        "parent": os.getpid(),
        "new_session": bool(arguments["start_new_session"]),
        "ignored": [n for n in signal.valid_signals() - reset if signal.getsignal(n) is signal.SIG_IGN],
        "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "affinity": sorted(os.sched_getaffinity(0)),
        "umask": umask,
        "limits": {n: resource.getrlimit(n) for n in LIMITS},
    }
    streams = [arguments["p2cread"], arguments["c2pwrite"], arguments["errwrite"]]
    streams = [number if stream == -1 else stream for number, stream in enumerate(streams)]
    try:
        self.pid = fork_server.fork(request, streams)
        self._child_created = True
    finally:
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(arguments[name] for name in pipes))


def _python_words(args: Sequence, env: dict[str, str]) -> list[str] | None:
    """Return the words after `python`, or None if the command uses a different Python or can't be forked."""
    program, *rest = [os.fsdecode(word) for word in args]
    if (program := shutil.which(program, path=env.get("PATH")) or "") and not _is_this_python(program):
        with open(program, "rb") as file:
            interpreter = os.fsdecode(file.readline().removeprefix(b"#!").strip())
        program, rest = interpreter, [program, *rest]
    script = rest[1 if rest[:1] == ["-u"] else 0 :]
    is_script = script and (not script[0].startswith("-") or (script[0] == "-m" and len(script) > 1))
    return rest if is_script and _is_this_python(program) else None


def _is_this_python(program: str) -> bool:
    """Return True if the program is the running Python interpreter, possibly under a different path."""
    path, executable = Path(program), Path(sys.executable)
    return path.name.startswith("python") and path.parent.resolve() == executable.parent.resolve()


def _read_at_start(env: dict[str, str]) -> dict[str, str]:
    return {k: v for k, v in env.items() if k.startswith(READ_AT_START) and k not in HANDLED}


@contextlib.contextmanager
def _adopting_orphans():
    """Make this process adopt the forked process, whose parent process in the server ends immediately."""
    before = ctypes.c_int()
    _libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, before.value)


def _receive(channel: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (part := channel.recv(count - len(data))):
            raise EOFError("the server of forks has ended")
        data += part
    return data


_servers: dict[str, Server | None] = {}


def _server(packages: str) -> Server | None:
    """Return the server with these packages, or None if processes can't change their command line."""
    if packages == "deepspeed" and packages not in _servers and (of_torch := _server("torch")):
        channel, server_channel = socket.socketpair()
        of_torch.send({"import": OF_DEEPSPEED}, [server_channel.fileno()])
        server_channel.close()
        _servers[packages] = Server(channel, of_torch.environment)
    elif packages not in _servers:
        channel, server_channel = socket.socketpair()
        env = {k: v for k, v in os.environ.items() if k not in HANDLED and not k.startswith("WANDB_")}
        env |= {"CUDA_VISIBLE_DEVICES": "", "NETRC": "/nonexistent", "WANDB_CONFIG_DIR": "/nonexistent"}
        words = [sys.executable, __file__, str(server_channel.fileno())]
        subprocess.Popen(
            words, env=env, cwd="/", pass_fds=[server_channel.fileno()], stdin=subprocess.DEVNULL
        )
        server_channel.close()
        can_fork = _receive(channel, 1) == b"+"
        _servers[packages] = Server(channel, env) if can_fork else None
    return _servers[packages]


# --- Code that runs in the server


def _preload() -> None:
    # Restrict the process to one core, so that OpenBLAS and OpenMP don't spawn threads. _start_like_python
    # sets torch's number of threads.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    _import(*PRELOADED)
    # Hide wandb from timm, which would import it. wandb creates temporary folders, and the first forked
    # process to end would remove the folders of all forked processes.
    sys.modules["wandb"] = None  # type: ignore[assignment]  # import then raises ImportError
    _import("timm")
    del sys.modules["wandb"]


def _import(*names: str) -> None:
    gc.disable()
    for name in names:
        importlib.import_module(name)
    tasks = Path("/proc/self/task").iterdir()
    threads = [(task / "comm").read_text().strip() for task in tasks]
    # The background thread of pyarrow's allocator supports forks.
    extra_threads = [name for name in threads if name != "jemalloc_bg_thd"][1:]
    assert not extra_threads, f"a preloaded package has started {extra_threads}"
    gc.collect()
    gc.freeze()
    gc.enable()


def _serve(channel: socket.socket) -> dict[str, Any]:
    """Fork a process for each request, and return the request in the child process.

    A fork that has imported more packages can also act as a server.
    """
    while True:
        try:
            head, streams, _, _ = socket.recv_fds(channel, 4, 3)
            if not head:
                os._exit(0)
            request = pickle.loads(_receive(channel, struct.unpack("!I", head)[0]))
        except (EOFError, ConnectionError):
            os._exit(0)
        if "import" in request:
            if os.fork() == 0:
                channel.close()
                channel = socket.socket(fileno=streams[0])
                _import(*request["import"])
            else:
                os.close(streams[0])
            continue
        if between := os.fork():
            for number in streams:
                os.close(number)
            os.waitpid(between, 0)
            continue
        if os.fork():
            os._exit(0)
        while os.getppid() != request["parent"]:
            time.sleep(0.0005)
        _become(request, streams)
        channel.sendall(struct.pack("!i", os.getpid()))
        channel.close()
        return request


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """Set all process attributes that a newly started process would inherit from its parent."""
    if request["new_session"]:
        os.setsid()
    # The server uses descriptors 0 to 2, so all received descriptors are above 2
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for number, limits in request["limits"].items():
        resource.setrlimit(number, limits)
    os.sched_setaffinity(0, request["affinity"])
    os.umask(request["umask"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if number in request["ignored"] or number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_IGN)
        elif number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        elif signal.getsignal(number) is not None:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    _show_as(request["cmdline"], request["env"])


def _show_as(cmdline: list[str], env: dict[str, str]) -> bool:
    """Show this command line and environment in /proc, where tests read them, or return False on failure.

    prctl(2) with PR_SET_MM_MAP sets all memory boundaries at once. The current boundaries in proc_pid_stat(5)
    are kept, except those of the command line and the environment.
    """
    words = b"".join(os.fsencode(word) + b"\0" for word in cmdline)
    pairs = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
    _shown[:] = [ctypes.create_string_buffer(part, len(part) + 1) for part in (words, pairs)]
    borders = [
        border
        for buffer, part in zip(_shown, (words, pairs), strict=True)
        for border in (ctypes.addressof(buffer), ctypes.addressof(buffer) + len(part))
    ]
    stat = [int(n) for n in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[1:]]
    code, stack, data, heap = stat[22:24], stat[24], stat[41:43], stat[43]
    _libc.sbrk.restype = ctypes.c_void_p
    fields = [*code, *data, heap, _libc.sbrk(0), stack, *borders, 0]
    mm_map = struct.pack(f"{len(fields)}QII", *fields, 0, 2**32 - 1)
    size, zero = ctypes.c_ulong(len(mm_map)), ctypes.c_ulong(0)
    return _libc.prctl(PR_SET_MM, ctypes.c_ulong(PR_SET_MM_MAP), mm_map, size, zero) == 0


_shown: list = []


def _serve_its_children(request: dict[str, Any]) -> socket.socket | None:
    """Fork a server for this process's children.

    Return the channel in the server process, and None in the calling process.
    """
    channel, server_channel = socket.socketpair()
    if os.fork() == 0:
        channel.close()
        _show_as(["server-of-forks"], {})
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        devnull = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):  # Readers of the job's output would otherwise wait for the server to end
            os.dup2(devnull, number)
        return server_channel
    server_channel.close()
    server = Server(channel, BASE)
    subprocess.Popen._execute_child = lambda popen, *rest: _execute(popen, lambda: server, *rest)  # type: ignore
    return None


def _start_like_python(words: list[str], env: dict[str, str]) -> None:
    """Set up the interpreter in the same way as `python WORDS`."""
    import numpy
    import torch

    numpy.random.seed()
    tempfile.tempdir = None
    # A spawned process resolves the relative path of its main script in this folder.
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()
    threads = env.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(threads) if threads.isdigit() else len(os.sched_getaffinity(0)))
    unbuffered = words[:1] == ["-u"] or bool(env.get("PYTHONUNBUFFERED"))
    del words[: words[:1] == ["-u"]]
    for number, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)
        new = io.TextIOWrapper(
            open(number, "wb", buffering=0 if unbuffered else -1, closefd=False),  # noqa: SIM115
            encoding=old.encoding,
            errors=old.errors,
            line_buffering=name == "stderr" or os.isatty(number),
            write_through=unbuffered,
        )
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115  # stays open as long as the process
    sys.orig_argv[:] = [sys.executable, *words]
    first = os.getcwd() if words[0] == "-m" else os.path.dirname(os.path.realpath(words[0]))
    path = [os.path.abspath(entry) for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [first, *path, *BASE_PATH]
    importlib.invalidate_caches()
    if env.get("PYTHONWARNINGS"):
        sys.warnoptions.extend(env["PYTHONWARNINGS"].split(","))
        warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]  # as the interpreter does
    for entry in path:
        if os.path.isfile(os.path.join(entry, "sitecustomize.py")):
            sys.modules.pop("sitecustomize", None)
            importlib.import_module("sitecustomize")
            break


def _run(words: list[str]) -> None:
    """Run `python WORDS` in a new `__main__` module."""
    if words[0] == "-m":
        sys.argv[:] = ["-m", *words[2:]]
        sys.modules["__main__"] = types.ModuleType("__main__")
        sys.modules.pop(words[1], None)  # runpy warns about a module that is already imported
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]  # `python -m` calls it
    else:
        sys.argv[:] = words
        runpy.run_path(words[0], run_name="__main__")


def _end_like_python(words: list[str]) -> None:
    """Run the command and exit like the interpreter, but skip clearing modules, which saves 0.5 s."""
    status = 0
    try:
        _run(words)
    except SystemExit as exit_request:
        if exit_request.code is not None and not isinstance(exit_request.code, int):
            print(exit_request.code, file=sys.stderr)
        status = (
            0
            if exit_request.code is None
            else exit_request.code & 0xFF
            if isinstance(exit_request.code, int)
            else 1
        )
    except BaseException as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            # The process that reads the output has closed the pipe
            status = 120 if stream is sys.stdout else status
    if status < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


if __name__ == "__main__":
    channel = socket.socket(fileno=int(sys.argv[1]))
    BASE, BASE_PATH = dict(os.environ), sys.path[1:]
    sys.modules["forks"] = sys.modules["__main__"]
    sys.path[:] = BASE_PATH
    _preload()
    channel.sendall(b"+" if _show_as(["server-of-forks"], {}) else b"-")
    while True:
        request = _serve(channel)
        child_channel = None
        module = request["words"][1] if request["words"][0] == "-m" else request["words"][0]
        if not os.path.basename(module).startswith(WITHOUT_SERVER):
            child_channel = _serve_its_children(request)
        if child_channel is None:
            break
        channel = child_channel
    _start_like_python(request["words"], request["env"])
    _end_like_python(request["words"])
