"""Faults at a chosen file operation of a process, injected through Python's audit events.

Every Python process first imports the module `sitecustomize` from its path. HOOK is a `sitecustomize` module
that counts the operations on paths that contain WATCHED, and injects the fault before the selected operation.
A mark file ensures that the fault occurs only once.
"""

import errno
import os
import pickle
import stat
from collections.abc import Callable
from pathlib import Path

HOOK = """
import os, signal, sys

WATCHED, AT, MARK, FILL = (os.environ[name] for name in ("WATCHED", "AT", "MARK", "FILL"))
EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "shutil.rmtree"}
seen = []

def hook(event, args):
    if event not in EVENTS or isinstance(args[0], int):
        return
    if event == "open" and "WRITES" in os.environ and not args[2] & (os.O_WRONLY | os.O_RDWR):
        return
    path = os.fsdecode(args[0])
    if WATCHED not in path or os.path.exists(MARK):
        return
    seen.append(f"{event} {path}")
    what = f"{len(seen)} {event} {os.path.basename(path)}"
    if AT == "list":
        with open(MARK + ".list", "a") as file:
            file.write(what + "\\n")
    elif AT == str(len(seen)) or AT == f"{event} {os.path.basename(path)}":
        with open(MARK, "w") as file:
            file.write(what)
        if not FILL:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            with open(os.path.join(FILL, "filler"), "ab", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        except OSError:
            pass

sys.addaudithook(hook)
"""


def at_file_operation(tmp_path: Path, watched: str, at: int | str, fill: Path | None = None) -> dict:
    """Return environment variables that make a process inject a fault before one of its file operations.

    Args:
        tmp_path: Folder for the hook and the mark file.
        watched: Text that the watched paths contain.
        at: Number of the operation, starting at 1, or an event and a file name, for example "os.rename
            step_00000008". With "list", no fault is injected, and all operations are written to <mark>.list.
        fill: Folder whose disk the fault fills. By default, the fault kills the process.
    """
    fault = {"WATCHED": watched, "AT": str(at), "MARK": str(mark(tmp_path)), "FILL": str(fill or "")}
    return _imported_first(tmp_path, HOOK) | fault


def called_first(tmp_path: Path, function: Callable[[], None]) -> dict[str, str]:
    """Return environment variables that make a process call this function before its script."""
    code = f"import os, pickle\ndel os.environ['PYTHONPATH']\npickle.loads({pickle.dumps(function)!r})()\n"
    return _imported_first(tmp_path, code)


def without_folders() -> None:
    """Replace os.fsync with a function that fails for folders, as os.fsync does on some file systems."""
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        sync(descriptor)

    os.fsync = fsync


def _imported_first(tmp_path: Path, code: str) -> dict[str, str]:
    folder = tmp_path / "hook"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": f"{folder}{os.pathsep}{Path(__file__).parents[2]}"}


def mark(tmp_path: Path) -> Path:
    """Return the path of the mark file, which names the operation after the fault has occurred."""
    return tmp_path / "happened"


def operations(tmp_path: Path) -> list[str]:
    """Return the operations that `at="list"` recorded, in the form "<number> <event> <file>"."""
    return Path(f"{mark(tmp_path)}.list").read_text().splitlines()
