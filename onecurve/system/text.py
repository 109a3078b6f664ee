"""Escapes, shortens and redacts untrusted text for terminals, files and pages."""

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any
from urllib.parse import quote

# Control characters (including terminal escapes), line and paragraph separators, marks that change the text
# direction, and lone surrogates (bytes of a file name that are not UTF-8)
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# Maximum number of characters of quoted input, and of a whole message
QUOTE_LENGTH, MESSAGE_LENGTH = 200, 10_000
_HIDDEN = "..."
_CREDENTIALS = [  # patterns of credentials and their replacements
    # An Authorization header and the rest of its line, because its value may contain several words
    (re.compile(r"(authorization[\"']?\s*[:=]\s*).*", re.I), rf"\1{_HIDDEN}"),
    (re.compile(r"\?\S+"), f"?{_HIDDEN}"),  # query of a URL
    (re.compile(r"(://)[^/\s@]+@"), rf"\1{_HIDDEN}@"),  # user of a URL
    # Access key ids, signatures and tokens, recognized by the name that precedes the value
    (
        re.compile(
            r"((?:signature|credential|token|access-?key-?id|secret\w*|password)[\"']?\s*[:=]\s*)[^\s;]+",
            re.I,
        ),
        rf"\1{_HIDDEN}",
    ),
    # A long word of letters and digits, which may be a key, a signature or a token
    (re.compile(r"(?=[a-z+/=_%-]*\d)(?=[\d+/=_%-]*[a-z])[a-z\d+/=_%-]{16,}", re.I), _HIDDEN),
]


def printable(text: object) -> str:
    r"""Return the text as one line of characters that any terminal, font and UTF-8 file can show.

    For example, a Latin-1 file name becomes `caf\xe9`, and a terminal escape becomes `\x1b[31m`.
    """
    return _UNSAFE.sub(lambda match: _escaped(match[0]), str(text))


def is_printable(text: str) -> bool:
    """Return True if printable() escapes no characters except for bytes that are not UTF-8."""
    return all("\ud800" <= character[0] <= "\udfff" for character in _UNSAFE.findall(text))


def printable_lines(text: object) -> str:
    """Escape the text like printable(), but keep newlines and tabs."""
    return _UNSAFE.sub(lambda match: match[0] if match[0] in "\n\t" else _escaped(match[0]), str(text))


def message_text(text: object) -> str:
    """Return printable_lines() of an error message. Very long quoted input is shortened.

    Each word, and each part of a path, is shortened to QUOTE_LENGTH characters.
    """
    lines = printable_lines(shortened(str(text), MESSAGE_LENGTH))
    long_word = rf"[^\s/]{{{QUOTE_LENGTH + 10},}}"  # longer than words that are already shortened
    return re.sub(long_word, lambda match: shortened(match[0]), lines)


def shortened(text: str, length: int = QUOTE_LENGTH) -> str:
    """Return the text, or its beginning and the number of omitted characters."""
    return text if len(text) <= length else f"{text[:length]}... ({len(text) - length:,} more characters)"


def redacted(text: str, secrets: Iterable[str] = (), length: int = 200) -> str:
    """Return the start of a server's text as one line, without known secrets and possible credentials."""
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    if len(text) > 4096:  # cut the text between words, because half of a secret would not be recognized
        text = text[:4096].rpartition(" ")[0]
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        for form in {secret, quote(secret, safe="")}:
            # A short secret such as "test" may be part of ordinary words.
            edges = ("", "") if len(form) >= 8 else ("(?<![A-Za-z])", "(?![A-Za-z])")
            text = re.sub(re.escape(form).join(edges), _HIDDEN, text)
    for pattern, replacement in _CREDENTIALS:
        text = pattern.sub(replacement, text)
    return text if len(text) <= length else text[: length - 3] + "..."


def plural(number: object, word: str) -> str:
    """Return a count with a noun, for example `1 process` or `2 processes`."""
    return f"{number} {word}{'' if number == 1 else 'es' if word.endswith('s') else 's'}"


def numbered(name: str) -> Iterator[str]:
    """Yield `name`, `name-2`, `name-3`, ... without end."""
    yield name
    yield from (f"{name}-{number}" for number in count(2))


def natural(text: object) -> list[Any]:
    """Return a sort key that compares numbers in names by value: 128 after 64."""
    return [[int(part) if part.isdecimal() else 0, part] for part in re.split(r"(\d+)", str(text))]


def some_of(names: Sequence[object], most: int = 10) -> str:
    """Return the first names in printable form, and the number of remaining names."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(printable, names[:most])) + rest


def ending(text: str, length: int) -> str:
    """Return the end of the text. If the text is longer, `...` precedes the end."""
    return text if len(text) <= length else f"...{text[3 - length :]}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Suggest known words that start with the word, for example as `did you mean epochs?`.

    At most three words are suggested. If none or more than three start with the word, suggest the most
    similar known word instead. Without a similar word, return an empty string.
    """
    known = list(known)
    longer = [candidate for candidate in known if candidate.startswith(word)]
    matches = longer if len(longer) in (1, 2, 3) else difflib.get_close_matches(word, known, n=1, cutoff=0.8)
    return f"did you mean {' or '.join(matches)}?" if matches else ""


def _escaped(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that os.fsdecode encoded
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
