"""Locates the repository checkout, and formats commands and paths for messages."""

import os
import shlex
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # root of the checkout, or site-packages if onecurve is installed


def python_command(*words: object) -> str:
    """Return a command line that runs this Python, which may differ from `python` on the PATH."""
    python = "python" if shutil.which("python") == sys.executable else shortest(sys.executable)
    return shlex.join([python, *map(str, words)])


def shortest(path: Path | str) -> str:
    """Return a path relative to the working folder if the path is in it, otherwise unchanged."""
    return os.fspath(path).removeprefix(f"{os.getcwd()}{os.sep}")


def public_path(path: Path | str) -> str:
    """Return a path without private parts: relative to the project, or with `~` for the home folder."""
    text, home = str(path), f"{os.path.expanduser('~')}{os.sep}"
    relative = text.removeprefix(f"{ROOT}{os.sep}")
    return f"~/{relative.removeprefix(home)}" if relative.startswith(home) else relative
