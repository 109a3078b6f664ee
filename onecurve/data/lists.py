"""Readers for lists of image files and labels in CSV, TSV and JSON Lines files, such as metadata.jsonl."""

import csv
import json
import os
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

from onecurve.data.class_folders import VAL_NAMES, folder_names
from onecurve.data.decode import EXTENSIONS
from onecurve.data.tables import MULTI_LABEL, Columns, chosen_column
from onecurve.system.text import printable

FILE_COLUMNS = ("file", "filename", "file_name", "path", "filepath", "image")
LABEL_COLUMNS = ("label", "labels", "class", "category", "target")
CSV_DELIMITERS = ",;\t"


class ListedImage(NamedTuple):
    """Row of an image list."""

    where: str  # row's position as shown in messages
    split: str
    label: str
    file: str  # absolute path, or path relative to the list's folder


def read_list(path: Path, columns: Columns, split: str = "train") -> list[ListedImage]:
    """Read the rows of an image list, in file order.

    For each listed path, the function tries the path as written, and then with slashes instead of
    backslashes, in Unicode NFC and NFD.

    Args:
        path: Path of the list file.
        columns: Columns that the flags specify.
        split: Split of the rows that do not specify a split. For "test", a list without a label column yields
            no rows.

    Raises:
        ValueError: If the list can't be used. The message names the first invalid line.
    """
    try:
        rows = list(_parse_rows(path, columns, split))
    except UnicodeDecodeError:
        raise ValueError(f"--data {path} is not encoded in UTF-8. Save the list in UTF-8") from None
    except csv.Error as error:
        raise ValueError(f"--data {path} is not a valid CSV file: {error}") from None
    if not rows and split == "test":
        return []
    if not rows:
        raise ValueError(f"--data {path} lists no images")
    prefix, suffix = _prefix_and_suffix(path.parent, rows[0].file)
    rows = [row._replace(file=_stored_path(path.parent, f"{prefix}{row.file}{suffix}")) for row in rows]
    if missing := [row for row in rows if not (path.parent / row.file).is_file()]:
        raise ValueError(
            f"{missing[0].where}: {path.parent / missing[0].file} does not exist (rows with missing files:"
            f" {len(missing):,}). Paths in the list are relative to the list's folder. To add a folder and an"
            " extension to each path, use --image_column 'train/{id}.jpg'"
        )
    _refuse_files_with_several_labels(rows)
    return rows


def _refuse_files_with_several_labels(rows: list[ListedImage]) -> None:
    """Raise ValueError if two rows assign different labels to the same file."""
    first_rows: dict[str, ListedImage] = {}
    for row in rows:
        earlier = first_rows.setdefault(os.path.normpath(row.file), row)
        if earlier.label != row.label:
            raise ValueError(
                f"{row.where}: {printable(row.file)} has the label {printable(row.label)}, but"
                f"{earlier.where.rpartition(',')[2]} specifies {printable(earlier.label)}. {MULTI_LABEL}"
            )


def _parse_rows(path: Path, columns: Columns, split: str) -> Iterator[ListedImage]:
    placeholder = re.fullmatch(r"(.*)\{(.+)\}(.*)", columns.image or "")
    prefix, column, suffix = placeholder.groups() if placeholder else ("", columns.image or "", "")
    first_line = f"--data {path}: the first line"
    with open(path, newline="", encoding="utf-8-sig") as file:
        is_json = path.suffix.lower() == ".jsonl"
        names, lines = _json_lines(path, file) if is_json else _csv_lines(file)
        if split == "test" and {*names}.isdisjoint((*LABEL_COLUMNS, (columns.label or "").lower())):
            return
        image_column = chosen_column(names, "image", column.lower(), FILE_COLUMNS, [], first_line)
        chosen_label = (columns.label or "").lower()
        label_column = chosen_column(names, "label", chosen_label, LABEL_COLUMNS, [], first_line)
        for line_number, row in lines:
            where = f"--data {path}, line {line_number}"
            image, label = row.get(image_column), row.get(label_column)
            if not image or not label:
                raise ValueError(
                    f"{where} contains no value for column {label_column if image else image_column}"
                )
            if is_json and label.startswith("["):
                raise ValueError(f"{where}: the value of column {label_column} is a list. {MULTI_LABEL}")
            row_split = (row.get("split", split) or "").strip().lower()
            if row_split not in ("train", *VAL_NAMES):
                raise ValueError(
                    f"{where}: the split is {printable(row_split) or 'empty'}. Valid splits are train,"
                    f" {', '.join(VAL_NAMES)}"
                )
            yield ListedImage(where, row_split, label.strip(), f"{prefix}{image.strip()}{suffix}")


# Pairs of a line number and a mapping from column names to values
NumberedRows = Iterator[tuple[int, dict[str, str]]]


def _csv_lines(file: TextIO) -> tuple[list[str], NumberedRows]:
    header = file.readline()
    file.seek(0)
    reader = csv.DictReader(file, delimiter=max(CSV_DELIMITERS, key=header.count))
    reader.fieldnames = [name.strip().lower() for name in reader.fieldnames or []]
    return list(reader.fieldnames), ((reader.line_num, row) for row in reader)


def _json_lines(path: Path, file: TextIO) -> tuple[list[str], NumberedRows]:
    """Parse a JSON Lines file into column names and rows. Values other than strings become JSON text."""
    rows = []
    for line_number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = {name.lower(): value for name, value in json.loads(line).items() if value is not None}
            texts = {
                name: value if isinstance(value, str) else json.dumps(value) for name, value in row.items()
            }
        except (ValueError, AttributeError):
            raise ValueError(f"--data {path}, line {line_number} is not a JSON object") from None
        rows.append((line_number, texts))
    return list(dict.fromkeys(name for _, texts in rows for name in texts)), iter(rows)


def _prefix_and_suffix(root: Path, file: str) -> tuple[str, str]:
    """Return the folder prefix and the extension that turn a listed path into the path of an existing file.

    Both strings are empty if the path exists as written, or if zero or several of the completed paths exist.
    `root` is the list's folder.
    """
    if (root / _stored_path(root, file)).is_file():
        return "", ""
    prefixes = ["", *(f"{name}/" for name in folder_names(root))]
    matches = [
        (prefix, suffix)
        for prefix in prefixes
        for suffix in ("", *EXTENSIONS)
        if (root / _stored_path(root, f"{prefix}{file}{suffix}")).is_file()
    ]
    return matches[0] if len(matches) == 1 else ("", "")


def _stored_path(root: Path, file: str) -> str:
    """Return the spelling of a path that exists on disk, or the unchanged path if no such file exists.

    Spellings differ because Windows paths contain backslashes and macOS may store accents separately from
    letters.
    """
    slashes = file.replace("\\", "/")
    spellings = (file, *(unicodedata.normalize(form, slashes) for form in ("NFC", "NFD")))
    return next((path for path in spellings if (root / path).is_file()), file)
