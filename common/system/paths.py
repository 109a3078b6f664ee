"""Commands and paths as they can be copied from what is printed or written down."""

import os
import shlex
import shutil
import sys
from pathlib import Path

from common.system.cli import working_folder

ROOT = Path(__file__).resolve().parents[2]  # the project


def python_command(*words: object) -> str:
    """With the Python that runs now, which need not be the one that `python` finds."""
    python = "python" if shutil.which("python") == sys.executable else shortest(sys.executable)
    return shlex.join([python, *map(str, words)])


def shortest(path: Path | str) -> str:
    """Relative, where it lies below the folder that we are in."""
    return os.fspath(path).removeprefix(f"{working_folder()}{os.sep}")


def place(path: Path | str) -> str:
    """A path as others can read it: relative to the project, or to the home folder as `~`."""
    text, home = str(path), f"{os.path.expanduser('~')}{os.sep}"
    inside = text.removeprefix(f"{ROOT}{os.sep}")
    return f"~/{inside.removeprefix(home)}" if inside.startswith(home) else inside
