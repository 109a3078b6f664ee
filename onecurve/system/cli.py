"""Runs command-line programs, and handles their environment, flags, error messages and exit status."""

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

from onecurve.system.env import rank, report_event
from onecurve.system.paths import ROOT
from onecurve.system.text import message_text

# An empty path must never be interpreted as the working folder or the file system root.
EMPTY_VALUE = "is empty. Check that the shell variable for this value is set."


def run_command(main: Callable[[], int]) -> int:
    """Call a command's main() function and return the command's exit status.

    After a ValueError or OSError, this function prints a one-line message and returns 1. After Ctrl-C, the
    exit status is 130.
    """
    settle_environment()
    if isinstance(
        sys.stdout, io.TextIOWrapper
    ):  # tests may replace sys.stdout with a different type of stream
        sys.stdout.reconfigure(
            errors="backslashreplace"
        )  # print file names with invalid UTF-8 instead of failing
    try:
        status = main()
        sys.stdout.flush()
        return status
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _is_pipe_closed():
            return 0
        message = message_text(_error_text(error))
        tell_launchers(message)
        print(f"error: {message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _is_pipe_closed() -> bool:
    """Return True if the reader of stdout, such as `head`, has closed the pipe.

    If the pipe is closed, also discard all later output.
    """
    with contextlib.suppress(OSError):  # raised if stdout has no file descriptor
        (poll := select.poll()).register(sys.stdout, 0)  # reports a closed pipe even with an empty event mask
        if poll.poll(0):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return True
    return False


def _error_text(error: Exception) -> str:
    """Return an error's message. Messages about files contain neither the errno nor quotation marks."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def config_file(name: str) -> Path:
    """Return the path of an accelerate config, which may be a bare file name in accelerate_configs/."""
    path, bundled_path = Path(name), Path("accelerate_configs", name)
    if not path.exists() and (ROOT / bundled_path).is_file():
        path = bundled_path if bundled_path.exists() else ROOT / bundled_path
    return path.absolute() if path.exists() and Path.cwd() != ROOT else path


def underscores(word: str) -> str:
    """Replace hyphens with underscores in a flag's name, for example --batch-size=8 with --batch_size=8."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


class CommandParser(argparse.ArgumentParser):
    """Argument parser that accepts hyphens and underscores in flag names, and rejects empty flag values."""

    def parse_known_args(self, args=None, namespace=None):
        words = [underscores(word) for word in (sys.argv[1:] if args is None else args)]
        for word, next_word in itertools.pairwise([*words, "-"]):
            if word.startswith("--") and (word.endswith("=") or not next_word):
                self.error(f"{word.rstrip('=')} {EMPTY_VALUE}")
        return super().parse_known_args(words, namespace)


def command_parser(doc: str | None, usage: str | None = None) -> CommandParser:
    """Return an argument parser whose help text contains a docstring.

    The help text shows the first paragraph of the docstring before the flags, and all other paragraphs after
    the flags. The heading "examples:" precedes the second paragraph if this paragraph is indented.
    """
    assert doc
    description, _, paragraphs = doc.partition("\n\n")
    parser = CommandParser(
        description=description,
        epilog=f"examples:\n{paragraphs}" if paragraphs.startswith("    ") else paragraphs,
        usage=usage,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    add_help_flag(parser)
    return parser


def add_help_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-h", "--help", action="help", help="Show this help message and exit.")


def say_loading() -> None:
    """Print "loading PyTorch" on rank 0 before importing torch, which takes seconds."""
    if rank() == 0:
        print("loading PyTorch", file=sys.stderr, flush=True)


def split_at_script(words: list[str]) -> tuple[list[str], list[str]]:
    """Split a command line before the first word that ends in .py."""
    script_indices = (index for index, word in enumerate(words) if word.endswith(".py"))
    first_script = next(script_indices, len(words))
    return words[:first_script], words[first_script:]


def check_positive(parser: argparse.ArgumentParser, flags: argparse.Namespace, *names: str) -> None:
    """End the command with an error unless each named flag is None or a finite number greater than 0."""
    for name in names:
        value = getattr(flags, name, None)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"--{name} {value:g}: the value must be more than 0 and finite")


def settle_environment() -> None:
    """Set a command's umask and environment variables.

    Other users can't write to files created by this process. The group's permissions follow the user's umask,
    because users in a group share weights. This function removes a notebook kernel's matplotlib backend from
    the environment, because matplotlib can't use this backend outside the notebook.
    """
    os.umask(os.umask(0o077) | 0o002)
    os.environ.pop("MPLBACKEND", None)


def tell_launchers(message: str) -> None:
    """Report this process's error message to all launchers as the cause of the job's failure."""
    tell_torchrun(message)
    report_event("failed", message=message)


def tell_torchrun(message: str) -> None:
    """Write the message that torchrun prints when it reports this process's failure."""
    if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        failure = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            Path(error_file).write_text(json.dumps({"message": failure}))
