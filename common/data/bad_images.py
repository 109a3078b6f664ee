"""Images that this process could not decode and skipped: reported once each, and counted."""

import sys

from common.system.text import printable

_seen: set[int] = set()


def note(broken: dict[int, str]) -> None:
    """Reports broken images; broken: their errors by sample id."""
    for i, what in broken.items():
        if i not in _seen:
            _seen.add(i)
            print(f"skipped: {printable(what)}", file=sys.stderr, flush=True)


def seen() -> list[int]:
    """The sample ids of all skipped images."""
    return sorted(_seen)
