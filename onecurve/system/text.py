"""Escapes, shortens and redacts untrusted text for terminals, files and pages."""

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any
from urllib.parse import quote

# Control characters including terminal escapes, line and paragraph separators, marks that change the text
# direction, and lone surrogates, which represent invalid UTF-8 in file names
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# Maximum number of characters in quoted input, and in an entire message
QUOTE_LENGTH, MESSAGE_LENGTH = 200, 10_000
_HIDDEN = "..."
_CREDENTIALS = [  # regular expressions that match credentials, and replacement texts
    # Authorization header up to the end of the line, because the header may contain several words
    (re.compile(r"(authorization[\"']?\s*[:=]\s*).*", re.I), rf"\1{_HIDDEN}"),
    (re.compile(r"\?\S+"), f"?{_HIDDEN}"),  # query string of a URL
    (re.compile(r"(://)[^/\s@]+@"), rf"\1{_HIDDEN}@"),  # user name and password in a URL
    # Access key ids, signatures and tokens after the credential's name
    (
        re.compile(
            r"((?:signature|credential|token|access-?key-?id|secret\w*|password)[\"']?\s*[:=]\s*)[^\s;]+",
            re.I,
        ),
        rf"\1{_HIDDEN}",
    ),
    # Long words of letters and digits, which may be keys, signatures or tokens
    (re.compile(r"(?=[a-z+/=_%-]*\d)(?=[\d+/=_%-]*[a-z])[a-z\d+/=_%-]{16,}", re.I), _HIDDEN),
]


def printable(text: object) -> str:
    r"""Return a text as a single line, with escapes for characters that terminals or fonts can't show.

    For example, the result contains `caf\xe9` for a Latin-1 file name, and `\x1b[31m` for a terminal escape.
    """
    return _UNSAFE.sub(lambda match: _escaped(match[0]), str(text))


def is_printable(text: str) -> bool:
    """Return True if printable() does not escape any characters in a text except for invalid UTF-8."""
    return all("\ud800" <= character[0] <= "\udfff" for character in _UNSAFE.findall(text))


def printable_lines(text: object) -> str:
    """Escape a text like printable(), but keep newlines and tabs."""
    return _UNSAFE.sub(lambda match: match[0] if match[0] in "\n\t" else _escaped(match[0]), str(text))


def message_text(text: object) -> str:
    """Escape an error message like printable_lines(), and shorten very long input in the message.

    Each word, and each component of a path, is shortened to QUOTE_LENGTH characters.
    """
    escaped = printable_lines(shortened(str(text), MESSAGE_LENGTH))
    long_word = rf"[^\s/]{{{QUOTE_LENGTH + 10},}}"  # does not match words that are already shortened
    return re.sub(long_word, lambda match: shortened(match[0]), escaped)


def shortened(text: str, length: int = QUOTE_LENGTH) -> str:
    """Shorten a long text to `length` characters, and append the number of omitted characters."""
    return text if len(text) <= length else f"{text[:length]}... ({len(text) - length:,} more characters)"


def redacted(text: str, secrets: Iterable[str] = (), length: int = 200) -> str:
    """Return the beginning of a server's text as one line, without known secrets and likely credentials."""
    text = " ".join("".join(character if character.isprintable() else " " for character in text).split())
    if len(text) > 4096:  # cut between words, because half of a secret would not be recognized
        text = text[:4096].rpartition(" ")[0]
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        for secret_form in {secret, quote(secret, safe="")}:
            # Replace a short secret such as "test" only if it is a separate word.
            boundaries = ("", "") if len(secret_form) >= 8 else ("(?<![A-Za-z])", "(?![A-Za-z])")
            text = re.sub(re.escape(secret_form).join(boundaries), _HIDDEN, text)
    for pattern, replacement in _CREDENTIALS:
        text = pattern.sub(replacement, text)
    return text if len(text) <= length else text[: length - 3] + "..."


def plural(number: object, word: str) -> str:
    """Return a number and a singular or plural noun, such as `1 process` or `2 processes`."""
    return f"{number} {word}{'' if number == 1 else 'es' if word.endswith('s') else 's'}"


def numbered(name: str) -> Iterator[str]:
    """Yield the infinite sequence `name`, `name-2`, `name-3`, ..."""
    yield name
    yield from (f"{name}-{number}" for number in count(2))


def natural_sort_key(text: object) -> list[Any]:
    """Return a sort key that compares numbers in names by value, so that 128 is sorted after 64."""
    return [[int(part) if part.isdecimal() else 0, part] for part in re.split(r"(\d+)", str(text))]


def some_of(names: Sequence[object], most: int = 10) -> str:
    """Join the first `most` names, escaped by printable(), and add the number of remaining names."""
    more_names = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(printable, names[:most])) + more_names


def text_ending(text: str, length: int) -> str:
    """Return a text of at most `length` characters, or `...` and the end of a longer text."""
    return text if len(text) <= length else f"...{text[3 - length :]}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a suggestion for an unknown word, such as `did you mean epochs?`, or an empty string.

    The suggestion contains the known words that start with `word` if there are one to three such words.
    Otherwise, the suggestion is the most similar known word, if any known word is similar.
    """
    known = list(known)
    completions = [candidate for candidate in known if candidate.startswith(word)]
    if len(completions) in (1, 2, 3):
        matches = completions
    else:
        matches = difflib.get_close_matches(word, known, n=1, cutoff=0.8)
    return f"did you mean {' or '.join(matches)}?" if matches else ""


def _escaped(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # surrogate by which os.fsdecode represents an invalid byte
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
