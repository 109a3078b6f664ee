"""Render pages from templates. Escape all text, so that no text can break a table or insert HTML.

In templates/*.md.j2, a value is plain text unless a filter in this file has converted the value to Markdown.
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
    """Render a template as a Markdown page, and collapse blank lines left by empty sections."""
    return re.sub(r"\n{3,}", "\n\n", _environment().get_template(template).render(values)).strip() + "\n"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES, "ascii"),
        autoescape=True,  # does not escape the Markdown that finalize returns
        finalize=text,
        undefined=StrictUndefined,
    )
    filters = (block, bullets, columns, each, folded, formatted, known, link, plural, url)
    environment.filters |= {function.__name__: function for function in filters}
    environment.filters |= {"code": code_span, "table": markdown_table}
    return environment


def text(value: object) -> Markup:
    """Escape plain text and join its lines. Convert None to `-`. Keep underscores inside words."""
    if isinstance(value, Markup):
        return value
    line = "-" if value is None else _single_line(value)
    return Markup(re.sub(r"[\\`*\[\]<>&~$|]|(?<!\w)_|_(?!\w)", r"\\\g<0>", line))


def code_span(value: object, in_table: bool = True) -> Markup:
    """Return an inline code span. In a table, escape bars with backslashes, which are not displayed."""
    line = _single_line(value)
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


def formatted(value: float | str | None, format_string: str = "{:,.1f}") -> str | None:
    """Format a number with a format string such as `{:,.1f} s`. Return None, text and Markdown unchanged."""
    return value if value is None or isinstance(value, str) else format_string.format(value)


def markdown_table(
    rows: Iterable[Sequence[object]], head: Sequence[object] = ("", ""), numbers: bool = True
) -> Markup:
    """Return the rows as a Markdown table, or an empty string if there are no rows.

    Args:
        rows: Cells of each row.
        head: Column titles.
        numbers: True to right-align all columns except the first column.
    """
    lines = [head, [Markup("---"), *[Markup("---:" if numbers else "---")] * (len(head) - 1)], *rows]
    texts = [f"| {' | '.join(map(text, line))} |" for line in lines]
    return Markup("\n".join(texts) if len(texts) > 2 else "")


def known(rows: Iterable[tuple[object, str, Any]]) -> list[list[object]]:
    """Format the values in all rows, and drop rows in which all values are None.

    Args:
        rows: Tuples of label, format string, and a value or a list of values.
    """
    formatted_rows: list[list[object]] = []
    for label, format_string, value in rows:
        values = value if isinstance(value, list) else [value]
        if any(value is not None for value in values):
            formatted_rows.append([label, *(formatted(value, format_string) for value in values)])
    return formatted_rows


def each(items: Iterable[Mapping[str, Any]], key: str) -> list[Any]:
    return [item.get(key) for item in items]


def columns(items: Sequence[Mapping[str, Any]], labels: Mapping[str, tuple[str, str]]) -> Markup:
    """Return a table with one row per item and one column for each key that occurs in an item.

    Args:
        items: Values by key, for each row.
        labels: Label and format string of each key.
    """
    keys = [key for key in labels if any(item.get(key) is not None for item in items)]
    rows = [[formatted(item.get(key), labels[key][1]) for key in keys] for item in items]
    return markdown_table(rows, [labels[key][0] for key in keys])


def folded(content: str, summary: str) -> Markup:
    """Return Markdown content as a folded section with a plain-text summary."""
    escaped_summary = html.escape(_single_line(summary))
    return Markup(f"<details><summary>{escaped_summary}</summary>\n\n{content}\n\n</details>")


def link(label: object, path: str) -> Markup:
    return Markup(f"[{text(label)}]({url(path, safe='/:#?=&%@')})")


def url(path: str, safe: str = "/") -> Markup:
    return Markup(quote(path.encode(errors="surrogateescape"), safe=safe))


def _single_line(value: object) -> str:
    return printable(" ".join(str(value).split()))


def _fence(content: str, least: int) -> str:
    """Return a fence that is longer than any run of backticks in the content."""
    return "`" * max(least, 1 + max(map(len, re.findall("`+", content)), default=0))
