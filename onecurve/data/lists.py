"""Readers for lists of image files and labels in CSV, TSV and JSON Lines files, such as metadata.jsonl."""

import csv
import itertools
import json
import os
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

from onecurve.data.class_folders import VAL_NAMES, folder_names
from onecurve.data.decode import IMAGE_EXTENSIONS
from onecurve.data.tables import MULTI_LABEL_ADVICE, Columns, choose_column
from onecurve.system.text import printable

FILE_COLUMNS = ("file", "filename", "file_name", "path", "filepath", "image")  # default column names
LABEL_COLUMNS = ("label", "labels", "class", "category", "target")  # default column names
CSV_DELIMITERS = ",;\t"  # possible delimiters; the most frequent one in the header line is used


class ListedImage(NamedTuple):
    """Row of an image list."""

    position: str  # list file and line number, as shown in messages
    split: str  # split name in lower case
    label: str  # class name
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
        listed_images = list(_parse_rows(path, columns, split))
    except UnicodeDecodeError:
        raise ValueError(f"--data {path} is not encoded in UTF-8. Save the list in UTF-8") from None
    except csv.Error as error:
        raise ValueError(f"--data {path} is not a valid CSV file: {error}") from None
    if not listed_images and split == "test":
        return []
    if not listed_images:
        raise ValueError(f"--data {path} lists no images")
    list_folder = path.parent
    prefix, extension = _find_prefix_and_extension(list_folder, listed_images[0].file)
    file_paths = [_stored_path(list_folder, f"{prefix}{image.file}{extension}") for image in listed_images]
    listed_images = [
        image._replace(file=file_path) for image, file_path in zip(listed_images, file_paths, strict=True)
    ]
    if missing_images := [image for image in listed_images if not (list_folder / image.file).is_file()]:
        first_missing = missing_images[0]
        raise ValueError(
            f"{first_missing.position}: {list_folder / first_missing.file} does not exist"
            f" (rows with missing files: {len(missing_images):,})."
            " Paths in the list are relative to the list's folder."
            " To add a folder and an extension to each path, use --image_column 'train/{id}.jpg'"
        )
    _refuse_files_with_several_labels(listed_images)
    return listed_images


def _refuse_files_with_several_labels(listed_images: list[ListedImage]) -> None:
    """Raise ValueError if two rows assign different labels to the same file."""
    first_image_by_file: dict[str, ListedImage] = {}
    for image in listed_images:
        first_image = first_image_by_file.setdefault(os.path.normpath(image.file), image)
        if first_image.label != image.label:
            _, _, first_line_phrase = first_image.position.rpartition(",")  # " line 3", for example
            raise ValueError(
                f"{image.position}: {printable(image.file)} has the label {printable(image.label)},"
                f" but{first_line_phrase} specifies {printable(first_image.label)}. {MULTI_LABEL_ADVICE}"
            )


def _parse_rows(path: Path, flag_columns: Columns, default_split: str) -> Iterator[ListedImage]:
    """Yield the rows of an image list, with paths as written in the list.

    Args:
        path: Path of the list file.
        flag_columns: Columns that the flags specify. The image column may be a pattern such as
            "train/{id}.jpg", which inserts the value of column `id` into a path.
        default_split: Split of the rows that do not specify a split.

    Raises:
        ValueError: If the header or a row is invalid. The message names the line.
    """
    # "train/{id}.jpg" consists of a prefix, the column name and a suffix
    path_prefix, image_header, path_suffix = "", flag_columns.image or "", ""
    if pattern_match := re.fullmatch(r"(.*)\{(.+)\}(.*)", image_header):
        path_prefix, image_header, path_suffix = pattern_match.groups()
    label_header = (flag_columns.label or "").lower()
    header_phrase = f"--data {path}: the first line"  # start of the messages about the header
    with open(path, newline="", encoding="utf-8-sig") as list_file:
        is_json = path.suffix.lower() == ".jsonl"
        column_names, numbered_rows = _read_json_lines(path, list_file) if is_json else _read_csv(list_file)
        if default_split == "test" and {*column_names}.isdisjoint((*LABEL_COLUMNS, label_header)):
            return  # the test images have no labels
        image_column = choose_column(
            column_names, "image", image_header.lower(), FILE_COLUMNS, [], header_phrase
        )
        label_column = choose_column(column_names, "label", label_header, LABEL_COLUMNS, [], header_phrase)
        for line_number, row in numbered_rows:
            row_position = f"--data {path}, line {line_number}"
            image_path, label = row.get(image_column), row.get(label_column)
            if not image_path or not label:
                empty_column = label_column if image_path else image_column
                raise ValueError(f"{row_position} contains no value for column {empty_column}")
            if is_json and label.startswith("["):  # _read_json_lines() converts a list to JSON text
                list_problem = f"the value of column {label_column} is a list"
                raise ValueError(f"{row_position}: {list_problem}. {MULTI_LABEL_ADVICE}")
            split = (row.get("split", default_split) or "").strip().lower()
            if split not in ("train", *VAL_NAMES):
                raise ValueError(
                    f"{row_position}: the split is {printable(split) or 'empty'}."
                    f" Valid splits are train, {', '.join(VAL_NAMES)}"
                )
            completed_path = f"{path_prefix}{image_path.strip()}{path_suffix}"
            yield ListedImage(row_position, split, label.strip(), completed_path)


NumberedRows = Iterator[tuple[int, dict[str, str]]]  # line number, and values by column name


def _read_csv(list_file: TextIO) -> tuple[list[str], NumberedRows]:
    """Return the lower-case column names and the rows of a CSV or TSV file.

    The rows are read from `list_file` when the caller iterates over them.
    """
    header_line = list_file.readline()
    list_file.seek(0)
    csv_reader = csv.DictReader(list_file, delimiter=max(CSV_DELIMITERS, key=header_line.count))
    csv_reader.fieldnames = [column_name.strip().lower() for column_name in csv_reader.fieldnames or []]
    return list(csv_reader.fieldnames), ((csv_reader.line_num, row) for row in csv_reader)


def _read_json_lines(list_path: Path, list_file: TextIO) -> tuple[list[str], NumberedRows]:
    """Return the lower-case column names and the rows of a JSON Lines file.

    Values other than strings become JSON text, and null values are left out.
    """
    numbered_rows = []
    for line_number, json_line in enumerate(list_file, 1):
        if not json_line.strip():
            continue
        try:
            row = {}
            for column_name, cell in json.loads(json_line).items():
                if cell is not None:
                    row[column_name.lower()] = cell if isinstance(cell, str) else json.dumps(cell)
        except (ValueError, AttributeError):
            raise ValueError(f"--data {list_path}, line {line_number} is not a JSON object") from None
        numbered_rows.append((line_number, row))
    # A dict keeps the distinct names in the order of their first occurrence
    column_names = dict.fromkeys(column_name for _line, row in numbered_rows for column_name in row)
    return list(column_names), iter(numbered_rows)


def _find_prefix_and_extension(list_folder: Path, listed_path: str) -> tuple[str, str]:
    """Return the folder prefix and the extension that turn a listed path into the path of an existing file.

    Both strings are empty if the path exists as written, or if zero or several of the completed paths exist.
    """

    def exists(image_path: str) -> bool:
        return (list_folder / _stored_path(list_folder, image_path)).is_file()

    if exists(listed_path):
        return "", ""
    # Only the folders next to the list and the usual file extensions are tried
    folder_prefixes = ["", *(f"{folder_name}/" for folder_name in folder_names(list_folder))]
    candidates = itertools.product(folder_prefixes, ("", *IMAGE_EXTENSIONS))
    affixes = [(prefix, ending) for prefix, ending in candidates if exists(f"{prefix}{listed_path}{ending}")]
    return affixes[0] if len(affixes) == 1 else ("", "")


def _stored_path(list_folder: Path, listed_path: str) -> str:
    """Return the spelling of a path that exists on disk, or the unchanged path if no such file exists.

    Spellings differ because Windows paths contain backslashes and macOS may store accents separately from
    letters.
    """
    path_with_slashes = listed_path.replace("\\", "/")
    normalised_paths = (unicodedata.normalize(form, path_with_slashes) for form in ("NFC", "NFD"))
    path_spellings = (listed_path, *normalised_paths)
    return next((spelling for spelling in path_spellings if (list_folder / spelling).is_file()), listed_path)
