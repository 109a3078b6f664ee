"""Writes GitHub's Markdown with names escaped: none can break a table or insert HTML."""

import html
import re
from collections.abc import Iterable, Sequence
from urllib.parse import quote

from common.system.text import printable, printable_lines


def text(value: object) -> str:
    """Escapes one line of plain text. Underscores inside words need no escape."""
    line = _line(value)
    return re.sub(r"[\\`*\[\]<>&~$]|(?<!\w)_|_(?!\w)", r"\\\g<0>", line)


def code(value: object) -> str:
    """An inline code span of one line."""
    line = _line(value)
    fence = _fence(line, least=1)
    pad = " " if "`" in line or not line else ""
    return f"{fence}{pad}{line}{pad}{fence}"


def block(content: str, language: str = "") -> str:
    content = printable_lines(content)
    fence = _fence(content, least=3)
    return f"{fence}{language}\n{content.rstrip()}\n{fence}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = True) -> str:
    """Cells are Markdown. numbers: all columns but the first are aligned to the right."""
    lines = [head, ["---", *(["---:" if numbers else "---"] * (len(head) - 1))], *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def folded(summary: str, content: str) -> str:
    """A folded section. summary: its title, plain text."""
    return f"<details><summary>{html.escape(_line(summary))}</summary>\n\n{content}\n\n</details>"


def picture(what: str, path: str) -> str:
    return f"![{text(what)}]({_url(path)})"


def link(what: str, path: str) -> str:
    return f"[{text(what)}]({_url(path, safe='/:#?=&%@')})"


def _line(value: object) -> str:
    return printable(" ".join(str(value).split()))


def _url(path: str, safe: str = "/") -> str:
    return quote(path.encode(errors="surrogateescape"), safe=safe)


def _fence(content: str, least: int) -> str:
    """A fence of more backticks than the longest row of them in the content."""
    return "`" * max(least, 1 + max(map(len, re.findall("`+", content)), default=0))


def _cell(cell: str) -> str:
    """Escapes bars: each one without a backslash would end the cell, in code too."""
    return cell.replace("|", "\\|")
