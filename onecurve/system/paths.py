"""The folder of the checkout, and commands and paths in the form in which they are printed."""

import os
import shlex
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # the checkout; site-packages, where the package is installed


def python_command(*words: object) -> str:
    """A command for the running Python, as `python` on the PATH may be another."""
    python = "python" if shutil.which("python") == sys.executable else shortest(sys.executable)
    return shlex.join([python, *map(str, words)])


def shortest(path: Path | str) -> str:
    """The path, relative if it is below the working folder."""
    return os.fspath(path).removeprefix(f"{os.getcwd()}{os.sep}")


def public_path(path: Path | str) -> str:
    """The path for publication: relative to the project, or to the home folder as `~`."""
    text, home = str(path), f"{os.path.expanduser('~')}{os.sep}"
    inside = text.removeprefix(f"{ROOT}{os.sep}")
    return f"~/{inside.removeprefix(home)}" if inside.startswith(home) else inside
