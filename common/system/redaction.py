"""Redacts text from a store or a web server to one bounded line without secrets."""

import re
from collections.abc import Iterable
from urllib.parse import quote

LENGTH = 200
INPUT_LENGTH = 2**12  # searched characters
HIDDEN = "..."
# An Authorization header and the rest of its line, as its value may have several words.
AUTHORIZATION = re.compile(r"(authorization[\"']?\s*[:=]\s*).*", re.I)
QUERY = re.compile(r"\?\S+")
USER_IN_URL = re.compile(r"(://)[^/\s@]+@")
# Access key ids, signatures and tokens, recognised by the name before them.
NAMED = re.compile(
    r"((?:signature|credential|token|access-?key-?id|secret\w*|password)[\"']?\s*[:=]\s*)[^\s;]+", re.I
)
# A long word of letters and digits may be a key, a signature or a token.
LONG = re.compile(r"(?=[a-z+/=_%-]*\d)(?=[\d+/=_%-]*[a-z])[a-z\d+/=_%-]{16,}", re.I)


def redacted(text: str, secrets: Iterable[str] = ()) -> str:
    """The beginning of the text, without these secrets and anything like a credential."""
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    if len(text) > INPUT_LENGTH:
        text = text[:INPUT_LENGTH].rpartition(" ")[0]  # no word may be cut: half a secret is not found
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        for form in {secret, quote(secret, safe="")}:
            # A short secret, as "test", may be part of ordinary words.
            edges = ("", "") if len(form) >= 8 else ("(?<![A-Za-z])", "(?![A-Za-z])")
            text = re.sub(re.escape(form).join(edges), HIDDEN, text)
    text = QUERY.sub("?" + HIDDEN, AUTHORIZATION.sub(rf"\1{HIDDEN}", text))
    text = NAMED.sub(rf"\1{HIDDEN}", USER_IN_URL.sub(rf"\1{HIDDEN}@", text))
    text = LONG.sub(HIDDEN, text)
    return text if len(text) <= LENGTH else text[: LENGTH - 3] + "..."
