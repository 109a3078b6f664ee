"""Render the templates of pages. All text is escaped, so that no text can break a table or insert HTML.

In templates/*.md.j2, a value is plain text unless a filter in this file has converted it to Markdown.
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
    """Render a template as a page. Empty parts of the template leave no blank lines."""
    return re.sub(r"\n{3,}", "\n\n", _environment().get_template(template).render(values)).strip() + "\n"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES, "ascii"),
        autoescape=True,  # the Markdown that finalize returns is not escaped
        finalize=text,
        undefined=StrictUndefined,
    )
    filters = (block, bullets, columns, each, folded, formatted, known, link, plural, url)
    environment.filters |= {function.__name__: function for function in filters}
    environment.filters |= {"code": code_span, "table": markdown_table}
    return environment


def text(value: object) -> Markup:
    """Escape plain text and join its lines. None becomes `-`. Underscores inside words are not escaped."""
    if isinstance(value, Markup):
        return value
    line = "-" if value is None else _line(value)
    return Markup(re.sub(r"[\\`*\[\]<>&~$|]|(?<!\w)_|_(?!\w)", r"\\\g<0>", line))


def code_span(value: object, in_table: bool = True) -> Markup:
    """Return an inline code span. In a table, bars need a backslash, which readers do not see."""
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
    """Format a number, for example with `{:,.1f} s`. Return None, text and Markdown unchanged."""
    return value if value is None or isinstance(value, str) else form.format(value)


def markdown_table(
    rows: Iterable[Sequence[object]], head: Sequence[object] = ("", ""), numbers: bool = True
) -> Markup:
    """Return the rows as a Markdown table, or an empty string if there are none.

    Args:
        rows: cells of each row.
        head: titles of the columns.
        numbers: True to align all columns except the first to the right.
    """
    lines = [head, [Markup("---"), *[Markup("---:" if numbers else "---")] * (len(head) - 1)], *rows]
    texts = [f"| {' | '.join(map(text, line))} |" for line in lines]
    return Markup("\n".join(texts) if len(texts) > 2 else "")


def known(rows: Iterable[tuple[object, str, Any]]) -> list[list[object]]:
    """Format the values of all rows, and drop rows without a value.

    Args:
        rows: (label, format, value or list of values).
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
    """Return a table with one row per item and one column per key that any item contains.

    Args:
        items: values by key.
        labels: label and format of each key.
    """
    keys = [key for key in labels if any(item.get(key) is not None for item in items)]
    rows = [[formatted(item.get(key), labels[key][1]) for key in keys] for item in items]
    return markdown_table(rows, [labels[key][0] for key in keys])


def folded(content: str, summary: str) -> Markup:
    """Return Markdown content as a folded section. The summary is plain text."""
    return Markup(f"<details><summary>{html.escape(_line(summary))}</summary>\n\n{content}\n\n</details>")


def link(label: object, path: str) -> Markup:
    return Markup(f"[{text(label)}]({url(path, safe='/:#?=&%@')})")


def url(path: str, safe: str = "/") -> Markup:
    return Markup(quote(path.encode(errors="surrogateescape"), safe=safe))


def _line(value: object) -> str:
    return printable(" ".join(str(value).split()))


def _fence(content: str, least: int) -> str:
    """Return a fence that is longer than any sequence of backticks in the content."""
    return "`" * max(least, 1 + max(map(len, re.findall("`+", content)), default=0))
