"""Images that a CSV file lists: the columns `file`, `label` and `split`."""

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from common.data.class_folders import source_of_files
from common.data.decode import SPLITS
from common.data.source import VAL_NAMES, Columns, Source
from common.system.text import printable, some_of

FILE_COLUMNS = ("file", "filename", "file_name", "path", "filepath", "image")
LABEL_COLUMNS = ("label", "labels", "class", "category", "target")
DELIMITERS = ",;\t"


class Row(NamedTuple):
    line: int
    split: str
    label: str
    file: str  # absolute, or relative to the list


def find_csv(path: Path, columns: Columns) -> Source:
    """Lists the files of the rows, in their order. Raises ValueError that names the first wrong line."""
    rows = _read(path, columns)
    counts = Counter(row.split for row in rows)
    names = [split for split in VAL_NAMES if counts[split]]
    if not counts["train"]:
        raise ValueError(f"--data {path}: none of its {len(rows):,} rows is of the split train")
    val = names[0] if names else None
    splits = {
        key: [(row.label, row.file) for row in rows if row.split == split]
        for key, split in (("train", "train"), ("val", val))
        if split
    }
    train, held_out = ({label for label, _ in splits.get(split, ())} for split in SPLITS)
    if unknown := sorted(held_out - train):
        raise ValueError(f"--data {path}: the split {val} has labels that train has not: {some_of(unknown)}")
    if missing := [row for row in rows if not (path.parent / row.file).is_file()]:
        raise ValueError(
            f"--data {path}, line {missing[0].line}: there is no file {path.parent / missing[0].file}"
            f" ({len(missing):,} such rows): paths are relative to the list's folder"
        )
    left_out = ", ".join(f"{counts[name]:,} rows of {name}, as {val} is there" for name in names[1:])
    classes = sorted(train, key=int if all(map(str.isdecimal, train)) else str)
    source = source_of_files(
        path.stem, path.parent, classes, splits, VAL_NAMES[val] if val else None, left_out
    )
    return replace(source, hashes=(repr(splits),), is_table=True)


def _read(path: Path, columns: Columns) -> list[Row]:
    rows = []
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            file.seek(0)
            reader = csv.DictReader(file, delimiter=max(DELIMITERS, key=first.count))
            names = reader.fieldnames or []
            image = _column(path, names, FILE_COLUMNS, columns.image, "image")
            label = _column(path, names, LABEL_COLUMNS, columns.label, "label")
            split_column = _named(names, ("split",))
            for row in reader:
                split = (row[split_column] or "").strip().lower() if split_column else "train"
                line, values = reader.line_num, (row[image], row[label])
                if not all(values):
                    raise ValueError(f"--data {path}, line {line}: it has no {label if values[0] else image}")
                if split not in ("train", *VAL_NAMES):
                    raise ValueError(
                        f"--data {path}, line {line}: its split is {printable(split) or 'empty'}: choose"
                        f" among train, {', '.join(VAL_NAMES)}"
                    )
                rows.append(Row(line, split, values[1].strip(), values[0].strip()))
    except UnicodeDecodeError:
        raise ValueError(f"--data {path}: it is not in UTF-8") from None
    except csv.Error as error:
        raise ValueError(f"--data {path}: it is no CSV file: {error}") from None
    if not rows:
        raise ValueError(f"--data {path}: it lists no images")
    return rows


def _column(path: Path, names: Sequence[str], known: tuple[str, ...], given: str | None, kind: str) -> str:
    """The name of a column, as it is written in the first line."""
    if name := _named(names, (given,) if given else known):
        return name
    wanted = given or " or ".join(known)
    raise ValueError(
        f"--data {path}: its first line has no column {wanted}, only: {some_of(names)}: choose one by"
        f" --{kind}_column"
    )


def _named(names: Sequence[str], known: tuple[str, ...]) -> str | None:
    return next((name for wanted in known for name in names if name.strip().lower() == wanted.lower()), None)
