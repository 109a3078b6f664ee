"""Render the pages' templates. Every text in them is escaped, so that none can break a table or insert HTML.

In templates/*.md.j2 a value is plain text unless a filter of this file has made it Markdown.
"""

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from onecurve.system.text import plural, printable, printable_lines

TEMPLATES = Path(__file__).with_name("templates")


def render(template: str, **values: Any) -> str:
    """The page. Parts of a template that are empty leave no blank lines."""
    return re.sub(r"\n{3,}", "\n\n", _environment().get_template(template).render(values)).strip() + "\n"


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(TEMPLATES, "ascii"),
        autoescape=True,  # leaves alone what finalize has made Markdown
        finalize=text,
        undefined=StrictUndefined,
    )
    filters = (
        block,
        bullets,
        code_span,
        columns,
        each,
        folded,
        formatted,
        known,
        link,
        plural,
        markdown_table,
    )
    made.filters |= {function.__name__: function for function in (*filters, url)}
    return made


def text(value: object) -> Markup:
    """Escape one line of plain text; `-` for None. Underscores inside words need no escape."""
    if isinstance(value, Markup):
        return value
    line = "-" if value is None else _line(value)
    return Markup(re.sub(r"[\\`*\[\]<>&~$|]|(?<!\w)_|_(?!\w)", r"\\\g<0>", line))


def code_span(value: object, in_table: bool = True) -> Markup:
    """An inline code span of one line. Only in a table a bar in it needs a backslash, and hides it."""
    line = _line(value)
    fence = _fence(line, least=1)
    pad = " " if "`" in line or not line else ""
    span = f"{fence}{pad}{line}{pad}{fence}"
    return Markup(span.replace("|", "\\|") if in_table else span)


def block(content: str, language: str = "") -> Markup:
    content = printable_lines(content)
    fence = _fence(content, least=3)
    return Markup(f"{fence}{language}\n{content.rstrip()}\n{fence}")


def bullets(lines: Iterable[object]) -> Markup:
    return Markup("\n".join(f"- {text(line)}" for line in lines))


def formatted(value: float | str | None, form: str = "{:,.1f}") -> str | None:
    """The value in the form of str.format(), as `{:,.1f} s`. None, text and Markdown stay."""
    return value if value is None or isinstance(value, str) else form.format(value)


def markdown_table(
    rows: Iterable[Sequence[object]], head: Sequence[object] = ("", ""), numbers: bool = True
) -> Markup:
    """A table; empty without rows. numbers: all columns but the first are aligned to the right."""
    lines = [head, [Markup("---"), *[Markup("---:" if numbers else "---")] * (len(head) - 1)], *rows]
    shown = [f"| {' | '.join(map(text, line))} |" for line in lines]
    return Markup("\n".join(shown) if len(shown) > 2 else "")


def known(rows: Iterable[tuple[object, str, Any]]) -> list[list[object]]:
    """Rows with their values formatted, without those of which no value is known.

    rows: label, form, and a value or a list of values.
    """
    lists = [(label, form, value if isinstance(value, list) else [value]) for label, form, value in rows]
    return [
        [label, *(formatted(value, form) for value in values)]
        for label, form, values in lists
        if any(value is not None for value in values)
    ]


def each(items: Iterable[Mapping[str, Any]], key: str) -> list[Any]:
    return [item.get(key) for item in items]


def columns(items: Sequence[Mapping[str, Any]], labels: Mapping[str, tuple[str, str]]) -> Markup:
    """A table with a row for each item. labels: {key: (label, form)}; those that no item has are left out."""
    keys = [key for key in labels if any(item.get(key) is not None for item in items)]
    rows = [[formatted(item.get(key), labels[key][1]) for key in keys] for item in items]
    return markdown_table(rows, [labels[key][0] for key in keys])


def folded(content: str, summary: str) -> Markup:
    """A folded section of Markdown. summary: its title, plain text."""
    return Markup(f"<details><summary>{html.escape(_line(summary))}</summary>\n\n{content}\n\n</details>")


def link(what: object, path: str) -> Markup:
    return Markup(f"[{text(what)}]({url(path, safe='/:#?=&%@')})")


def url(path: str, safe: str = "/") -> Markup:
    return Markup(quote(path.encode(errors="surrogateescape"), safe=safe))


def _line(value: object) -> str:
    return printable(" ".join(str(value).split()))


def _fence(content: str, least: int) -> str:
    """A fence of more backticks than the longest row of them in the content."""
    return "`" * max(least, 1 + max(map(len, re.findall("`+", content)), default=0))
