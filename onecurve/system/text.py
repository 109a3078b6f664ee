"""Escapes and redacts untrusted text for terminals, files and pages."""

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any
from urllib.parse import quote

# Control characters (so also terminal escapes), line and paragraph separators, marks that change the
# direction of writing, and lone surrogates (bytes of a file name that are not UTF-8).
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
QUOTE_LENGTH, MESSAGE_LENGTH = 200, 10_000  # characters of input that a message quotes, and of a message
_HIDDEN = "..."
_CREDENTIALS = [  # and what is shown instead
    # An Authorization header and the rest of its line, as its value may have several words.
    (re.compile(r"(authorization[\"']?\s*[:=]\s*).*", re.I), rf"\1{_HIDDEN}"),
    (re.compile(r"\?\S+"), f"?{_HIDDEN}"),  # a url's query
    (re.compile(r"(://)[^/\s@]+@"), rf"\1{_HIDDEN}@"),  # a url's user
    # Access key ids, signatures and tokens, recognised by the name before them.
    (
        re.compile(
            r"((?:signature|credential|token|access-?key-?id|secret\w*|password)[\"']?\s*[:=]\s*)[^\s;]+",
            re.I,
        ),
        rf"\1{_HIDDEN}",
    ),
    # A long word of letters and digits may be a key, a signature or a token.
    (re.compile(r"(?=[a-z+/=_%-]*\d)(?=[\d+/=_%-]*[a-z])[a-z\d+/=_%-]{16,}", re.I), _HIDDEN),
]


def printable(text: object) -> str:
    r"""The text as one line of characters that any terminal, font and UTF-8 file can show.

    `caf\xe9` for a name in Latin-1, `\x1b[31m` for a terminal escape.
    """
    return _UNSAFE.sub(lambda found: _escaped(found[0]), str(text))


def is_printable(text: str) -> bool:
    """Return whether a text has none of these characters. Bytes that are not UTF-8 count as printable."""
    return all("\ud800" <= character[0] <= "\udfff" for character in _UNSAFE.findall(text))


def printable_lines(text: object) -> str:
    """printable() for several lines: newlines and tabs stay."""
    return _UNSAFE.sub(lambda found: found[0] if found[0] in "\n\t" else _escaped(found[0]), str(text))


def message_text(text: object) -> str:
    """Return printable_lines() of an error message, cut where somebody's input made it endless.

    A word keeps QUOTE_LENGTH characters, a path those that a path may have.
    """
    lines = printable_lines(shortened(str(text), MESSAGE_LENGTH))
    long = rf"[^\s/]{{{QUOTE_LENGTH + 10},}}"  # with the dots of one that is shortened already
    return re.sub(long, lambda word: shortened(word[0]), lines)


def shortened(text: str, length: int = QUOTE_LENGTH) -> str:
    """Return the text, or its beginning and the number of characters left out."""
    return text if len(text) <= length else f"{text[:length]}... ({len(text) - length:,} more characters)"


def redacted(text: str, secrets: Iterable[str] = (), length: int = 200) -> str:
    """The beginning of a store's or server's text as one line, without these secrets and what may be one."""
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    if len(text) > 4096:
        text = text[:4096].rpartition(" ")[0]  # no word may be cut: half a secret is not found
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        for form in {secret, quote(secret, safe="")}:
            # A short secret, as "test", may be part of ordinary words.
            edges = ("", "") if len(form) >= 8 else ("(?<![A-Za-z])", "(?![A-Za-z])")
            text = re.sub(re.escape(form).join(edges), _HIDDEN, text)
    for pattern, instead in _CREDENTIALS:
        text = pattern.sub(instead, text)
    return text if len(text) <= length else text[: length - 3] + "..."


def plural(number: object, word: str) -> str:
    """`1 process`, `2 processes`"""
    return f"{number} {word}{'' if number == 1 else 'es' if word.endswith('s') else 's'}"


def numbered(name: str) -> Iterator[str]:
    """`name`, `name-2`, `name-3`, ... without end."""
    yield name
    yield from (f"{name}-{number}" for number in count(2))


def natural(text: object) -> list[Any]:
    """A sort key by which 128 comes after 64."""
    return [[int(part) if part.isdecimal() else 0, part] for part in re.split(r"(\d+)", str(text))]


def some_of(names: Sequence[object], most: int = 10) -> str:
    """The first names, printable, and how many more there are."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(printable, names[:most])) + rest


def ending(text: str, length: int) -> str:
    """Return the text's last characters, after `...` where it is longer."""
    return text if len(text) <= length else f"...{text[3 - length :]}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`did you mean epochs?` where up to three known words begin so, or one is near; else empty."""
    known = list(known)
    longer = [each for each in known if each.startswith(word)]
    near = longer if len(longer) in (1, 2, 3) else difflib.get_close_matches(word, known, n=1, cutoff=0.8)
    return f"did you mean {' or '.join(near)}?" if near else ""


def _escaped(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte as os.fsdecode encodes it
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
