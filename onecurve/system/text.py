"""Escapes, shortens and redacts untrusted text for terminals, files and pages."""

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any
from urllib.parse import quote

# Control characters including terminal escapes, line and paragraph separators, marks that change the text
# direction, and lone surrogates, which represent invalid UTF-8 in file names
_UNSAFE_CHARACTER = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
MAX_QUOTE_LENGTH = 200  # maximum number of characters in quoted input
MAX_MESSAGE_LENGTH = 10_000  # maximum number of characters in an entire message
MAX_REDACTED_LENGTH = 4096  # maximum number of characters in which redacted() looks for credentials
MIN_PART_LENGTH = 8  # minimum length of a secret that redacted() also replaces within a word
_HIDDEN = "..."  # replaces a credential
# Access key ids, signatures and tokens after the credential's name
_NAMED_CREDENTIAL = (
    r"((?:signature|credential|token|access-?key-?id|secret\w*|password)[\"']?\s*[:=]\s*)[^\s;]+"
)
_CREDENTIAL_PATTERNS = [  # regular expressions that match credentials, and replacement texts
    # Authorization header up to the end of the line, because the header may contain several words
    (re.compile(r"(authorization[\"']?\s*[:=]\s*).*", re.I), rf"\1{_HIDDEN}"),
    (re.compile(r"\?\S+"), f"?{_HIDDEN}"),  # query string of a URL
    (re.compile(r"(://)[^/\s@]+@"), rf"\1{_HIDDEN}@"),  # user name and password in a URL
    (re.compile(_NAMED_CREDENTIAL, re.I), rf"\1{_HIDDEN}"),
    # Long words of letters and digits, which may be keys, signatures or tokens
    (re.compile(r"(?=[a-z+/=_%-]*\d)(?=[\d+/=_%-]*[a-z])[a-z\d+/=_%-]{16,}", re.I), _HIDDEN),
]


def printable(text: object) -> str:
    r"""Return a text as a single line, with escapes for characters that terminals or fonts can't show.

    For example, the result contains `caf\xe9` for a Latin-1 file name, and `\x1b[31m` for a terminal escape.
    """
    return _UNSAFE_CHARACTER.sub(_escaped, str(text))


def is_printable(text: str) -> bool:
    """Return True if printable() does not escape any characters in a text except for invalid UTF-8."""
    return all("\ud800" <= character <= "\udfff" for character in _UNSAFE_CHARACTER.findall(text))


def printable_lines(text: object) -> str:
    """Escape a text like printable(), but keep newlines and tabs."""
    return re.sub(r"[^\n\t]+", lambda text_match: printable(text_match[0]), str(text))


def safe_message(message: object) -> str:
    """Escape an error message like printable_lines(), and shorten very long input in the message.

    Each word, and each component of a path, is shortened to MAX_QUOTE_LENGTH characters.
    """
    escaped_message = printable_lines(shortened(str(message), MAX_MESSAGE_LENGTH))
    # The additional 10 characters keep the pattern from matching shortened words, which end in `...`.
    long_word = rf"[^\s/]{{{MAX_QUOTE_LENGTH + 10},}}"
    return re.sub(long_word, lambda word_match: shortened(word_match[0]), escaped_message)


def shortened(text: str, length: int = MAX_QUOTE_LENGTH) -> str:
    """Shorten a long text to `length` characters, and append the number of omitted characters."""
    if len(text) <= length:
        return text
    return f"{text[:length]}... ({len(text) - length:,} more characters)"


def redacted(server_text: str, secrets: Iterable[str] = (), length: int = 200) -> str:
    """Return the beginning of a server's text as one line, without known secrets and likely credentials.

    Args:
        server_text: Untrusted text from a server, such as an error message.
        secrets: Known secrets to remove, in plain and in URL-encoded form.
        length: Maximum number of characters in the result.
    """
    visible_text = "".join(character if character.isprintable() else " " for character in server_text)
    text = " ".join(visible_text.split())
    if len(text) > MAX_REDACTED_LENGTH:  # cut between words, because half of a secret would not be recognized
        text, _, _ = text[:MAX_REDACTED_LENGTH].rpartition(" ")
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        for secret_form in {secret, quote(secret, safe="")}:
            secret_pattern = re.escape(secret_form)
            if len(secret_form) < MIN_PART_LENGTH:
                # Replace a short secret such as "test" only if it is a separate word.
                secret_pattern = f"(?<![A-Za-z]){secret_pattern}(?![A-Za-z])"
            text = re.sub(secret_pattern, _HIDDEN, text)
    for credential_pattern, replacement in _CREDENTIAL_PATTERNS:
        text = credential_pattern.sub(replacement, text)
    return text if len(text) <= length else text[: length - 3] + "..."


def plural(number: object, noun: str) -> str:
    """Return a number and a singular or plural noun, such as `1 process` or `2 processes`."""
    plural_ending = "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{'' if number == 1 else plural_ending}"


def numbered(name: str) -> Iterator[str]:
    """Yield the infinite sequence `name`, `name-2`, `name-3`, ..."""
    yield name
    yield from (f"{name}-{suffix}" for suffix in count(2))


def natural_sort_key(name: object) -> list[Any]:
    """Return a sort key that compares numbers in names by value, so that 128 is sorted after 64."""
    name_parts = re.split(r"(\d+)", str(name))
    return [[int(name_part) if name_part.isdecimal() else 0, name_part] for name_part in name_parts]


def some_of(names: Sequence[object], max_names: int = 10) -> str:
    """Join the first `max_names` names, escaped by printable(), and add the number of remaining names."""
    omitted_names = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return ", ".join(map(printable, names[:max_names])) + omitted_names


def text_ending(text: str, length: int) -> str:
    """Return a text of at most `length` characters, or `...` and the end of a longer text."""
    return text if len(text) <= length else f"...{text[3 - length :]}"


def did_you_mean(word: str, known_words: Iterable[str]) -> str:
    """Return a suggestion for an unknown word, such as `did you mean epochs?`, or an empty string.

    The suggestion contains the known words that start with `word` if there are one to three such words.
    Otherwise, the suggestion is the most similar known word, if any known word is similar.
    """
    known_words = list(known_words)  # an iterator could be read only once
    suggestions = [known_word for known_word in known_words if known_word.startswith(word)]
    if len(suggestions) not in (1, 2, 3):
        suggestions = difflib.get_close_matches(word, known_words, n=1, cutoff=0.8)
    return f"did you mean {' or '.join(suggestions)}?" if suggestions else ""


def _escaped(unsafe_character: re.Match[str]) -> str:
    r"""Return the escape of one unsafe character, for example `\x1b` or `\u200e`."""
    code_point = ord(unsafe_character[0])
    if 0xDC80 <= code_point <= 0xDCFF:  # surrogate by which os.fsdecode represents an invalid byte
        code_point -= 0xDC00
    return f"\\x{code_point:02x}" if code_point < 0x100 else f"\\u{code_point:04x}"
