"""Locates the checkout, and formats commands and paths for messages."""

import os
import shlex
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # the checkout, or site-packages if the package is installed


def python_command(*words: object) -> str:
    """Return a command that runs the current Python, because `python` on the PATH may be another version."""
    python = "python" if shutil.which("python") == sys.executable else shortest(sys.executable)
    return shlex.join([python, *map(str, words)])


def shortest(path: Path | str) -> str:
    """Return the path. A path inside the working folder becomes relative to this folder."""
    return os.fspath(path).removeprefix(f"{os.getcwd()}{os.sep}")


def public_path(path: Path | str) -> str:
    """Return the path in a form for publication: relative to the project, or with `~` for the home folder."""
    text, home = str(path), f"{os.path.expanduser('~')}{os.sep}"
    relative = text.removeprefix(f"{ROOT}{os.sep}")
    return f"~/{relative.removeprefix(home)}" if relative.startswith(home) else relative
