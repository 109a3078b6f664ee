"""Locates the repository checkout, and formats commands and paths for messages."""

import os
import shlex
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # root of the checkout, or site-packages if onecurve is installed


def python_command(*arguments: object) -> str:
    """Return a command line that runs this Python, which may differ from `python` on the PATH."""
    is_on_path = shutil.which("python") == sys.executable
    python_name = "python" if is_on_path else shortest(sys.executable)
    return shlex.join([python_name, *map(str, arguments)])


def shortest(path: Path | str) -> str:
    """Return a path relative to the working folder if the path is in it, otherwise unchanged."""
    return os.fspath(path).removeprefix(f"{os.getcwd()}{os.sep}")


def public_path(path: Path | str) -> str:
    """Return a path without private parts: relative to the project, or with `~` for the home folder."""
    home_prefix = f"{os.path.expanduser('~')}{os.sep}"
    path_text = str(path).removeprefix(f"{ROOT}{os.sep}")
    return f"~/{path_text.removeprefix(home_prefix)}" if path_text.startswith(home_prefix) else path_text
