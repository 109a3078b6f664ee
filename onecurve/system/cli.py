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

from onecurve.system.env import rank, report_to_launcher
from onecurve.system.paths import ROOT
from onecurve.system.text import safe_message

# An empty path must never be interpreted as the working folder or the file system root.
EMPTY_VALUE = "is empty. Check that the shell variable for this value is set."  # follows a flag's name
INTERRUPTED_STATUS = 130  # exit status after Ctrl-C


def run_command(main: Callable[[], int]) -> int:
    """Call a command's main() function and return the command's exit status.

    After a ValueError or OSError, this function prints a one-line message and returns 1. After Ctrl-C, the
    exit status is 130.
    """
    settle_environment()
    # Tests may replace sys.stdout with a different type of stream
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Print file names with invalid UTF-8 instead of failing
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        exit_status = main()
        sys.stdout.flush()
        return exit_status
    except (ValueError, OSError) as command_error:
        if isinstance(command_error, BrokenPipeError) and _discard_output_if_pipe_closed():
            return 0  # not a failure of this command
        error_message = safe_message(_error_text(command_error))
        tell_launchers(error_message)
        print(f"error: {error_message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED_STATUS


def _discard_output_if_pipe_closed() -> bool:
    """Discard all later output if the reader of stdout, such as `head`, has closed the pipe.

    Returns:
        True if the pipe is closed.
    """
    with contextlib.suppress(OSError):  # raised if stdout has no file descriptor
        stdout_poll = select.poll()
        stdout_poll.register(sys.stdout, 0)  # reports a closed pipe even with an empty event mask
        if stdout_poll.poll(0):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return True
    return False


def _error_text(error: Exception) -> str:
    """Return an error's message. Messages about files contain neither the errno nor quotation marks."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def config_file(config_name: str) -> Path:
    """Return the path of an accelerate config, which may be a bare file name in accelerate_configs/."""
    config_path, bundled_path = Path(config_name), Path("accelerate_configs", config_name)
    if not config_path.exists() and (ROOT / bundled_path).is_file():
        config_path = bundled_path if bundled_path.exists() else ROOT / bundled_path
    # Jobs run in ROOT, where a path relative to another folder would be wrong.
    is_outside_root = config_path.exists() and Path.cwd() != ROOT
    return config_path.absolute() if is_outside_root else config_path


def underscores(word: str) -> str:
    """Replace hyphens with underscores in a flag's name, for example --batch-size=8 with --batch_size=8."""
    if not word.startswith("--"):
        return word
    flag_name, equals_sign, flag_value = word.removeprefix("--").partition("=")
    return f"--{flag_name.replace('-', '_')}{equals_sign}{flag_value}"


class CommandParser(argparse.ArgumentParser):
    """Argument parser that accepts hyphens and underscores in flag names, and rejects empty flag values."""

    def parse_known_args(self, args=None, namespace=None):
        """Parse a command line, with underscores instead of hyphens in flag names.

        End the command with an error if the value of a flag is empty.
        """
        command_words = [underscores(raw_word) for raw_word in (sys.argv[1:] if args is None else args)]
        # "-" follows the last word, because an empty next word would be an error.
        for command_word, next_word in itertools.pairwise([*command_words, "-"]):
            if command_word.startswith("--") and (command_word.endswith("=") or not next_word):
                self.error(f"{command_word.rstrip('=')} {EMPTY_VALUE}")
        return super().parse_known_args(command_words, namespace)


def command_parser(docstring: str | None, usage: str | None = None) -> CommandParser:
    """Return an argument parser whose help text contains a docstring.

    The help text shows the first paragraph of the docstring before the flags, and all other paragraphs after
    the flags. The heading "examples:" precedes the second paragraph if this paragraph is indented.
    """
    assert docstring
    first_paragraph, _, other_paragraphs = docstring.partition("\n\n")
    has_examples = other_paragraphs.startswith("    ")
    parser = CommandParser(
        description=first_paragraph,
        epilog=f"examples:\n{other_paragraphs}" if has_examples else other_paragraphs,
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


def split_at_script(command_words: list[str]) -> tuple[list[str], list[str]]:
    """Split a command line before the first word that ends in .py."""
    script_indices = (word_index for word_index, word in enumerate(command_words) if word.endswith(".py"))
    script_index = next(script_indices, len(command_words))
    return command_words[:script_index], command_words[script_index:]


def check_positive(parser: argparse.ArgumentParser, flags: argparse.Namespace, *flag_names: str) -> None:
    """End the command with an error unless each named flag is None or a finite number greater than 0."""
    for flag_name in flag_names:
        flag_value = getattr(flags, flag_name, None)
        if flag_value is not None and not 0 < flag_value < math.inf:
            parser.error(f"--{flag_name} {flag_value:g}: the value must be more than 0 and finite")


def settle_environment() -> None:
    """Set a command's umask and environment variables.

    Other users can't write to files created by this process. The group's permissions follow the user's umask,
    because users in a group share weights. This function removes a notebook kernel's matplotlib backend from
    the environment, because matplotlib can't use this backend outside the notebook.
    """
    user_umask = os.umask(0o077)  # the umask can be read only by setting a temporary one
    os.umask(user_umask | 0o002)
    os.environ.pop("MPLBACKEND", None)  # a notebook kernel's backend


def tell_launchers(message: str) -> None:
    """Report this process's error message to torchrun and launch.py as the cause of the job's failure."""
    tell_torchrun(message)
    report_to_launcher("failed", message=message)


def tell_torchrun(message: str) -> None:
    """Write a message to torchrun's error file, from which torchrun reports this process's failure."""
    if torchrun_error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # torchrun expects this nesting and these keys.
        failure_record = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            Path(torchrun_error_file).write_text(json.dumps({"message": failure_record}))
