"""Images of this process that can't be decoded and were skipped: said once each, and counted."""

import sys

from common.system.text import printable

_seen: set[int] = set()


def note(broken: dict[int, str]) -> None:
    """What is wrong with images, by sample id."""
    for i, what in broken.items():
        if i not in _seen:
            _seen.add(i)
            print(f"skipped: {printable(what)}", file=sys.stderr, flush=True)


def seen() -> list[int]:
    """The sample ids of all so far."""
    return sorted(_seen)
