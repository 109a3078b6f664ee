"""Start and end of a command, and its flags."""

import argparse
import contextlib
import io
import itertools
import json
import math
import os
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path

from onecurve.system.env import rank, report
from onecurve.system.paths import ROOT
from onecurve.system.text import message_text

# Never the working folder, nor the root of the file system.
EMPTY = "is empty. Is the variable set from which it comes?"


def run_command(main: Callable[[], int]) -> int:
    """Calls a command's main(). After a mistake it prints one line and returns 1, after Ctrl-C 130."""
    settle_environment()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a test may have put another stream there
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that is not UTF-8 must not end the command
    try:
        status = main()
        sys.stdout.flush()
        return status
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _has_lost_its_reader():
            return 0
        message = message_text(_text(error))
        tell_launchers(message)
        print(f"error: {message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _has_lost_its_reader() -> bool:
    """True when stdout's reader, as `head`, has what it wants. What is left is thrown away."""
    with contextlib.suppress(OSError):  # of a stdout that is no file
        (poll := select.poll()).register(sys.stdout, 0)  # also without a wish it tells of a pipe's end
        if poll.poll(0):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return True
    return False


def _text(error: Exception) -> str:
    """The error's message; for an error of a file without Python's number and quotes."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def config_file(name: str) -> Path:
    """Return the path of an accelerate config; a bare name may be a file of accelerate_configs/."""
    path, ours = Path(name), Path("accelerate_configs", name)
    if not path.exists() and (ROOT / ours).is_file():
        path = ours if ours.exists() else ROOT / ours
    return path.absolute() if path.exists() and Path.cwd() != ROOT else path


def underscores(word: str) -> str:
    """--batch-size=8 -> --batch_size=8: both spellings are accepted."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


class CommandParser(argparse.ArgumentParser):
    """Takes flags in both spellings."""

    def parse_known_args(self, args=None, namespace=None):
        words = [underscores(word) for word in (sys.argv[1:] if args is None else args)]
        for word, following in itertools.pairwise([*words, "-"]):
            if word.startswith("--") and (word.endswith("=") or not following):
                self.error(f"{word.rstrip('=')} {EMPTY}")
        return super().parse_known_args(words, namespace)


def command_parser(doc: str | None, usage: str | None = None) -> CommandParser:
    """A parser whose help shows a script's docstring: its first paragraph, the flags, the rest."""
    assert doc
    description, _, epilog = doc.partition("\n\n")
    return CommandParser(
        description=description,
        epilog=epilog,
        usage=usage,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def say_loading() -> None:
    """Print a first line from rank 0, before the imports of torch, which take seconds."""
    if rank() == 0:
        print("loading PyTorch", file=sys.stderr, flush=True)


def split_at_script(words: list[str]) -> tuple[list[str], list[str]]:
    """The words before the first that ends in .py, and those from there on: a script and its flags."""
    at = next((number for number, word in enumerate(words) if word.endswith(".py")), len(words))
    return words[:at], words[at:]


def check_positive(parser: argparse.ArgumentParser, flags: argparse.Namespace, *names: str) -> None:
    """Ends the command where one of these numbers is given, and is not finite and more than 0."""
    for name in names:
        value = getattr(flags, name, None)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"--{name} {value:g}: must be more than 0 and finite")


def settle_environment() -> None:
    """Denies others the write permission for files and folders that this process creates.

    The group's permission follows the user's umask, as weights are shared. And matplotlib's import would fail
    with the backend of a notebook's kernel, which pictures here do not need.
    """
    os.umask(os.umask(0o077) | 0o002)
    os.environ.pop("MPLBACKEND", None)


def tell_launchers(message: str) -> None:
    """Write the message of this process's failure, which is the cause of the job's, for all launchers."""
    tell_torchrun(message)
    report("failed", message=message)


def tell_torchrun(message: str) -> None:
    """Write the message that torchrun shows when it reports the failure of this process."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        about = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps({"message": about}))
