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
# Characters that Markdown interprets. An underscore inside a word has no effect.
SPECIAL_CHARACTERS = re.compile(r"[\\`*\[\]<>&~$|]|(?<!\w)_|_(?!\w)")


def render(template: str, **values: Any) -> str:
    """Render a template as a Markdown page, and collapse blank lines left by empty sections."""
    return re.sub(r"\n{3,}", "\n\n", _environment().get_template(template).render(values)).strip() + "\n"


@cache
def _environment() -> Environment:
    """Return the Jinja environment for the templates, with this file's functions as filters."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES, "ascii"),
        autoescape=True,  # does not escape the Markdown that finalize returns
        finalize=text,  # escapes each value in a template unless it is already Markdown (Markup)
        undefined=StrictUndefined,
    )
    helpers = (bullets, code_block, folded, formatted, item_table, known_rows, link, plural, url, values_of)
    environment.filters |= {helper.__name__: helper for helper in helpers}
    environment.filters |= {"code": code_span, "table": markdown_table}
    return environment


def text(content: object) -> Markup:
    """Escape plain text as Markdown and join its lines. Convert None to `-`. Return Markdown unchanged."""
    if isinstance(content, Markup):
        return content
    plain_text = "-" if content is None else _single_line(content)
    return Markup(SPECIAL_CHARACTERS.sub(r"\\\g<0>", plain_text))


def code_span(content: object, in_table: bool = True) -> Markup:
    """Return an inline code span. In a table, escape bars with backslashes, which are not displayed."""
    code = _single_line(content)
    fence = _fence(code, min_backticks=1)
    padding = " " if "`" in code or not code else ""  # separates the fence from backticks in the code
    span = f"{fence}{padding}{code}{padding}{fence}"
    return Markup(span.replace("|", "\\|") if in_table else span)


def code_block(content: str, language: str = "") -> Markup:
    """Return a fenced code block. `language` selects the syntax highlighting."""
    code = printable_lines(content)
    fence = _fence(code, min_backticks=3)
    return Markup(f"{fence}{language}\n{code.rstrip()}\n{fence}")


def bullets(items: Iterable[object]) -> Markup:
    """Return a bulleted list."""
    return Markup("\n".join(f"- {text(item)}" for item in items))


def formatted(number: float | str | None, format_string: str = "{:,.1f}") -> str | None:
    """Format a number with a format string such as `{:,.1f} s`. Return None, text and Markdown unchanged."""
    return number if number is None or isinstance(number, str) else format_string.format(number)


def markdown_table(
    rows: Iterable[Sequence[object]], headings: Sequence[object] = ("", ""), numbers: bool = True
) -> Markup:
    """Return the rows as a Markdown table, or an empty string if there are no rows.

    Args:
        rows: Cells of each row.
        headings: Column titles.
        numbers: True to right-align all columns except the first column.
    """
    cell_alignment = Markup("---:" if numbers else "---")
    separator_row = [Markup("---"), *[cell_alignment] * (len(headings) - 1)]
    table_rows = [headings, separator_row, *rows]
    table_lines = [f"| {' | '.join(map(text, row_cells))} |" for row_cells in table_rows]
    return Markup("\n".join(table_lines) if len(table_lines) > 2 else "")  # 2 lines above the rows


def known_rows(rows: Iterable[tuple[object, str, Any]]) -> list[list[object]]:
    """Format the values in all rows, and drop rows in which all values are None.

    Args:
        rows: Tuples of label, format string, and a value or a list of values.
    """
    formatted_rows: list[list[object]] = []
    for row_label, format_string, value_or_values in rows:
        row_values = value_or_values if isinstance(value_or_values, list) else [value_or_values]
        if any(value is not None for value in row_values):
            formatted_rows.append([row_label, *(formatted(value, format_string) for value in row_values)])
    return formatted_rows


def values_of(items: Iterable[Mapping[str, Any]], key: str) -> list[Any]:
    """Return each item's value of a key, or None for items without the key."""
    return [item.get(key) for item in items]


def item_table(
    items: Sequence[Mapping[str, Any]], labels_and_formats: Mapping[str, tuple[str, str]]
) -> Markup:
    """Return a table with one row per item and one column for each key that occurs in an item.

    Args:
        items: Values by key, for each row.
        labels_and_formats: Label and format string of each key.
    """
    shown_keys = [key for key in labels_and_formats if any(item.get(key) is not None for item in items)]
    shown_columns = [(key, *labels_and_formats[key]) for key in shown_keys]
    table_rows = [
        [formatted(item.get(key), number_format) for key, _, number_format in shown_columns] for item in items
    ]
    return markdown_table(table_rows, [column_label for _, column_label, _ in shown_columns])


def folded(content: str, summary: str) -> Markup:
    """Return Markdown content as a folded section with a plain-text summary."""
    escaped_summary = html.escape(_single_line(summary))
    return Markup(f"<details><summary>{escaped_summary}</summary>\n\n{content}\n\n</details>")


def link(label: object, path: str) -> Markup:
    """Return a link to a page or to a web address."""
    return Markup(f"[{text(label)}]({url(path, safe_characters='/:#?=&%@')})")


def url(path: str, safe_characters: str = "/") -> Markup:
    """Percent-encode all characters of a path that could end a link, except `safe_characters`."""
    return Markup(quote(path.encode(errors="surrogateescape"), safe=safe_characters))


def _single_line(content: object) -> str:
    """Replace all white space by single spaces, and escape unprintable characters."""
    return printable(" ".join(str(content).split()))


def _fence(code_text: str, min_backticks: int) -> str:
    """Return a row of backticks that is longer than any row of backticks in the code."""
    longest_run = max(map(len, re.findall("`+", code_text)), default=0)
    return "`" * max(min_backticks, longest_run + 1)
