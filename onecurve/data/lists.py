"""Lists of image files with their labels: CSV and TSV files, and JSON lines as the hub's metadata.jsonl."""

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
DELIMITERS = ",;\t"


class Listed(NamedTuple):
    """A row of a list."""

    where: str  # for messages
    split: str
    label: str
    file: str  # its path below the folder of the list, or an absolute one


def read_list(path: Path, columns: Columns, split: str = "train") -> list[Listed]:
    """The rows of a list, in their order. split: of rows without one. Those of a test list without labels are
    left out.

    Paths are tried as they are written, with / for a backslash, and in both Unicode forms. Raises ValueError
    that names the first wrong line.
    """
    try:
        rows = list(_parse(path, columns, split))
    except UnicodeDecodeError:
        raise ValueError(f"--data {path}: it is not in UTF-8") from None
    except csv.Error as error:
        raise ValueError(f"--data {path}: it is no CSV file: {error}") from None
    if not rows and split == "test":
        return []
    if not rows:
        raise ValueError(f"--data {path}: it lists no images")
    before, after = _place(path.parent, rows[0].file)
    rows = [row._replace(file=_as_stored(path.parent, f"{before}{row.file}{after}")) for row in rows]
    if missing := [row for row in rows if not (path.parent / row.file).is_file()]:
        raise ValueError(
            f"{missing[0].where}: there is no file {path.parent / missing[0].file} ({len(missing):,} such"
            " rows): paths are relative to the list's folder. A folder and an ending are given as"
            " --image_column 'train/{id}.jpg'"
        )
    _refuse_several_labels(rows)
    return rows


def _refuse_several_labels(rows: list[Listed]) -> None:
    """Raises ValueError for a file that several rows give different labels."""
    first: dict[str, Listed] = {}
    for row in rows:
        earlier = first.setdefault(os.path.normpath(row.file), row)
        if earlier.label != row.label:
            raise ValueError(
                f"{row.where}: {printable(row.file)} is {printable(row.label)} here and"
                f" {printable(earlier.label)} in{earlier.where.rpartition(',')[2]}. {MULTI_LABEL}"
            )


def _parse(path: Path, columns: Columns, split: str) -> Iterator[Listed]:
    match = re.fullmatch(r"(.*)\{(.+)\}(.*)", columns.image or "")
    before, column, after = match.groups() if match else ("", columns.image or "", "")
    first = f"--data {path}: its first line"
    with open(path, newline="", encoding="utf-8-sig") as file:
        is_json = path.suffix.lower() == ".jsonl"
        names, lines = _json_lines(path, file) if is_json else _csv_lines(file)
        if split == "test" and {*names}.isdisjoint((*LABEL_COLUMNS, (columns.label or "").lower())):
            return
        image = chosen_column(names, "image", column.lower(), FILE_COLUMNS, [], first)
        label = chosen_column(names, "label", (columns.label or "").lower(), LABEL_COLUMNS, [], first)
        for number, row in lines:
            where, place, its_label = f"--data {path}, line {number}", row.get(image), row.get(label)
            if not place or not its_label:
                raise ValueError(f"{where}: it has no {label if place else image}")
            if is_json and its_label.startswith("["):
                raise ValueError(f"{where}: its {label} is a list. {MULTI_LABEL}")
            its_split = (row.get("split", split) or "").strip().lower()
            if its_split not in ("train", *VAL_NAMES):
                raise ValueError(
                    f"{where}: its split is {printable(its_split) or 'empty'}: choose among train,"
                    f" {', '.join(VAL_NAMES)}"
                )
            yield Listed(where, its_split, its_label.strip(), f"{before}{place.strip()}{after}")


Lines = Iterator[tuple[int, dict[str, str]]]  # the number of a line, and its values by column


def _csv_lines(file: TextIO) -> tuple[list[str], Lines]:
    first = file.readline()
    file.seek(0)
    reader = csv.DictReader(file, delimiter=max(DELIMITERS, key=first.count))
    reader.fieldnames = [name.strip().lower() for name in reader.fieldnames or []]
    return list(reader.fieldnames), ((reader.line_num, row) for row in reader)


def _json_lines(path: Path, file: TextIO) -> tuple[list[str], Lines]:
    """Values that are no texts, as numbers and true, as JSON has them."""
    rows = []
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = {k.lower(): v for k, v in json.loads(line).items() if v is not None}
            values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()}
        except (ValueError, AttributeError):
            raise ValueError(f"--data {path}, line {number}: it is no JSON object") from None
        rows.append((number, values))
    return list(dict.fromkeys(name for _, values in rows for name in values)), iter(rows)


def _place(root: Path, file: str) -> tuple[str, str]:
    """The folder beside a list, and the ending, that make the path of a file which is not there without."""
    if (root / _as_stored(root, file)).is_file():
        return "", ""
    before = ["", *(f"{name}/" for name in folder_names(root))]
    pairs = ((b, a) for b in before for a in ("", *EXTENSIONS))
    places = [(b, a) for b, a in pairs if (root / _as_stored(root, f"{b}{file}{a}")).is_file()]
    return places[0] if len(places) == 1 else ("", "")


def _as_stored(root: Path, file: str) -> str:
    """The path as the disk has it: Windows writes other separators, a Mac takes letters and accents apart."""
    slashes = file.replace("\\", "/")
    forms = (file, *(unicodedata.normalize(form, slashes) for form in ("NFC", "NFD")))
    return next((path for path in forms if (root / path).is_file()), file)
