"""Runs commands, and handles their environment, flags, error messages and exit status."""

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

# An empty value must never refer to the working folder or to the root of the file system.
EMPTY = "is empty. Check that the variable that provides it is set."


def run_command(main: Callable[[], int]) -> int:
    """Call a command's main() and return its exit status.

    After a ValueError or OSError, this function prints one line and returns 1. After Ctrl-C, it returns 130.
    """
    settle_environment()
    if isinstance(sys.stdout, io.TextIOWrapper):  # tests may replace sys.stdout with another stream
        sys.stdout.reconfigure(errors="backslashreplace")  # names with invalid UTF-8 must not end the command
    try:
        status = main()
        sys.stdout.flush()
        return status
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _is_pipe_closed():
            return 0
        message = message_text(_text(error))
        tell_launchers(message)
        print(f"error: {message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _is_pipe_closed() -> bool:
    """Return True if stdout's reader (for example `head`) has closed the pipe. Discard remaining output."""
    with contextlib.suppress(OSError):  # raised if stdout is not a file
        (poll := select.poll()).register(sys.stdout, 0)  # reports a closed pipe even with an empty mask
        if poll.poll(0):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return True
    return False


def _text(error: Exception) -> str:
    """Return the error's message. For file errors, omit the errno and the quotation marks."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def config_file(name: str) -> Path:
    """Return the path of an accelerate config. A bare name may refer to a file in accelerate_configs/."""
    path, bundled = Path(name), Path("accelerate_configs", name)
    if not path.exists() and (ROOT / bundled).is_file():
        path = bundled if bundled.exists() else ROOT / bundled
    return path.absolute() if path.exists() and Path.cwd() != ROOT else path


def underscores(word: str) -> str:
    """Replace hyphens in a flag's name, so that both spellings work: --batch-size=8 -> --batch_size=8."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


class CommandParser(argparse.ArgumentParser):
    """Argument parser that accepts hyphens and underscores in flags, and refuses empty values."""

    def parse_known_args(self, args=None, namespace=None):
        words = [underscores(word) for word in (sys.argv[1:] if args is None else args)]
        for word, following in itertools.pairwise([*words, "-"]):
            if word.startswith("--") and (word.endswith("=") or not following):
                self.error(f"{word.rstrip('=')} {EMPTY}")
        return super().parse_known_args(words, namespace)


def command_parser(doc: str | None, usage: str | None = None) -> CommandParser:
    """Return a parser whose help shows a docstring's first paragraph, the flags, and the other paragraphs.

    If the second paragraph is indented, it gets the heading "examples:".
    """
    assert doc
    description, _, notes = doc.partition("\n\n")
    parser = CommandParser(
        description=description,
        epilog=f"examples:\n{notes}" if notes.startswith("    ") else notes,
        usage=usage,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    add_help_flag(parser)
    return parser


def add_help_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-h", "--help", action="help", help="Show this help, then exit.")


def say_loading() -> None:
    """Print a first line on rank 0 before importing torch, which takes seconds."""
    if rank() == 0:
        print("loading PyTorch", file=sys.stderr, flush=True)


def split_at_script(words: list[str]) -> tuple[list[str], list[str]]:
    """Split a command line at the first word that ends in .py. That word begins the second part."""
    index = next((number for number, word in enumerate(words) if word.endswith(".py")), len(words))
    return words[:index], words[index:]


def check_positive(parser: argparse.ArgumentParser, flags: argparse.Namespace, *names: str) -> None:
    """End the command with an error unless each number is None, or finite and greater than 0."""
    for name in names:
        value = getattr(flags, name, None)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"--{name} {value:g}: must be more than 0 and finite")


def settle_environment() -> None:
    """Set the umask and the environment of a command.

    Files that this process creates are not writable for other users. The group's permission follows the
    user's umask, because weights are shared. A notebook kernel's matplotlib backend is removed from the
    environment, because importing matplotlib would fail with this backend.
    """
    os.umask(os.umask(0o077) | 0o002)
    os.environ.pop("MPLBACKEND", None)


def tell_launchers(message: str) -> None:
    """Report to all launchers that this process's failure caused the job's failure."""
    tell_torchrun(message)
    report("failed", message=message)


def tell_torchrun(message: str) -> None:
    """Write the message that torchrun shows when it reports this process's failure."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        failure = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps({"message": failure}))
