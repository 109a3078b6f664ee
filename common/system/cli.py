"""How a command begins and ends, whatever its caller left it: closed streams, no home, no working folder."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from common.system.env import STATUS_FILE
from common.system.text import printable_lines


def run_command(main: Callable[[], int]) -> int:
    """Calls a command's main(). A mistake is one line and exit status 1, Ctrl-C 130."""
    let_nobody_else_write()
    open_streams()
    try:
        check_working_folder()
        return main()
    except (ValueError, OSError) as error:
        print(f"error: {printable_lines(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def let_nobody_else_write() -> None:
    """Takes the permission of all others to write from every file and folder that this process will make.
    That of the group is left to the umask: weights are shared."""
    os.umask(os.umask(0o077) | 0o002)


def open_streams() -> None:
    """Opens /dev/null in the place of each standard stream that is closed.

    Otherwise the next file would get its number, and with it what is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115
    with contextlib.suppress(AttributeError):  # a stream that is not a file
        sys.stdout.reconfigure(errors="backslashreplace")  # names that are not UTF-8 end no command


def report_status(status: int) -> None:
    """Tells the agent of launch.py how this process ends: of several processes' statuses torchrun makes 1."""
    if file := os.environ.get(STATUS_FILE):
        with contextlib.suppress(OSError), open(file, "a") as statuses:
            statuses.write(f"{status}\n")


def tell_torchrun(message: str) -> None:
    """The message that torchrun shows where it reports that this process failed."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        about = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps({"message": about}))


def check_working_folder() -> None:
    """ValueError when the folder that the command was started in is gone."""
    try:
        os.getcwd()
    except OSError:
        raise ValueError("the working folder was removed: change to another folder and start again") from None


def expand_home(path: Path | str, instead: str) -> Path:
    """The path with `~` expanded. ValueError, which names what to give instead, for a user without a home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(
            f"{path}: HOME is not set, and user {os.getuid()} has no home folder: {instead}"
        ) from None


def working_folder() -> str | None:
    """None where it was removed."""
    with contextlib.suppress(OSError):
        return os.getcwd()
    return None
