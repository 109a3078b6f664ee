"""Folder of the checkout, and commands and paths in the form in which messages show them."""

import os
import shlex
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # the checkout, or site-packages if the package is installed


def python_command(*words: object) -> str:
    """Return a command for the running Python, because `python` on the PATH may be another version."""
    python = "python" if shutil.which("python") == sys.executable else shortest(sys.executable)
    return shlex.join([python, *map(str, words)])


def shortest(path: Path | str) -> str:
    """Return the path, relative to the working folder if it is below it."""
    return os.fspath(path).removeprefix(f"{os.getcwd()}{os.sep}")


def public_path(path: Path | str) -> str:
    """Return the path for publication: relative to the project, or to the home folder as `~`."""
    text, home = str(path), f"{os.path.expanduser('~')}{os.sep}"
    relative = text.removeprefix(f"{ROOT}{os.sep}")
    return f"~/{relative.removeprefix(home)}" if relative.startswith(home) else relative
