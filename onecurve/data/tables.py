"""Readers for image tables in parquet files, in folders saved by `datasets`, and on the Hugging Face Hub.

Local files are read in place with pyarrow. `datasets` is used only for the Hub, because it copies files to a
separate cache, interprets `[`, `*` and `::` in folder names as patterns and URLs, and takes 3 s to import.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from onecurve.data.class_folders import VAL_NAMES, folder_names, refuse_unknown_classes, split_folders
from onecurve.data.encoded import save_images, save_labels
from onecurve.data.names import save_names_of
from onecurve.system.env import hub_problem
from onecurve.system.files import lfs_pointer_problem
from onecurve.system.text import printable, some_of
from onecurve.system.threads import Heartbeat, run_with_heartbeat

if TYPE_CHECKING:
    import pyarrow

HUB_DATA_SET = re.compile(r"hub:(\w[\w.-]*/\w[\w.-]*)(?::([\w.-]+))?", re.ASCII)
# Usual names of image and label columns, in order of preference. A column with a different name is used only
# if no column has a usual name.
IMAGE_COLUMNS, LABEL_COLUMNS = ("img", "image"), ("label", "fine_label")
OTHER_LABEL_COLUMNS = ("labels", "class", "category", "target")
IMAGE_ROWS, LABEL_ROWS = 256, 1_000_000  # rows read per chunk
MULTI_LABEL = (
    "Multi-label data is not supported, because the scripts train classifiers with one class per image. Keep"
    " only one label for each image"
)


class Columns(NamedTuple):
    """Columns that --image_column and --label_column specify. None detects a column by type and name."""

    image: str | None = None
    label: str | None = None


DEFAULT_COLUMNS = Columns()


class Table(NamedTuple):
    """Image table in a parquet file, in an Arrow stream (.arrow), or loaded by `datasets`."""

    where: str  # table name shown in error messages
    content: "Path | pyarrow.Table"

    @contextmanager
    def open(self) -> "Iterator[tuple[pyarrow.Schema, Callable[..., Iterator[pyarrow.Array]]]]":
        """Provide the schema, and a function `read(column, n)` that yields a column in chunks of n values.

        Raises:
            ValueError: If pyarrow can't read the table. The message contains the table's name.
        """
        import pyarrow as pa
        import pyarrow.parquet

        try:
            if isinstance(self.content, Path) and self.content.suffix != ".arrow":
                # The file is opened here, because pyarrow rejects file names that are not UTF-8
                with open(self.content, "rb") as stream:
                    file = pa.parquet.ParquetFile(stream)

                    def read_file(name: str, chunk_rows: int) -> "Iterator[pyarrow.Array]":
                        return (batch.column(0) for batch in file.iter_batches(chunk_rows, columns=[name]))

                    yield file.schema_arrow, read_file
                return
            rows = self.content
            if isinstance(rows, Path):
                with open(rows, "rb") as stream:
                    rows = pa.ipc.open_stream(stream).read_all()

            def read_rows(name: str, chunk_rows: int) -> "Iterator[pyarrow.Array]":
                return (batch.column(0) for batch in rows.select([name]).to_batches(chunk_rows))

            yield rows.schema, read_rows
        except (pa.ArrowException, OSError) as error:
            reason = (
                f"{str(error).splitlines()[0].rstrip('.')}. The file may be incomplete. Download the file"
                " again"
            )
            if isinstance(self.content, Path):
                reason = lfs_pointer_problem(self.content) or reason
            raise ValueError(f"{self.where} cannot be read: {reason}") from None
        except UnicodeDecodeError:
            raise ValueError(f"{self.where} contains a name or label that is not encoded in UTF-8") from None


# Finding tables


def parquet_files(root: Path) -> dict[str, list[Path]] | None:
    """Return the parquet files of each split, in `root` or in one subfolder, or None without training files.

    A file's split is determined by its name (train-*.parquet, val-*.parquet, validation-*.parquet,
    valid-*.parquet or test-*.parquet) or by its folder (for example train/*.parquet).
    """
    candidates = [root, *(root / name for name in folder_names(root))]
    for files_of in (_named_files, _files_in_folders):
        if folders := [folder for folder in candidates if files_of(folder, "train")]:
            break
    else:
        return None
    if len(folders) > 1 and folders[0] != root:
        names = [folder.name for folder in folders]
        raise ValueError(
            f"--data {root} contains several data sets ({some_of(names)}). Pass the folder of one data set"
        )
    return {split: files for split in ("train", *VAL_NAMES) if (files := files_of(folders[0], split))}


def is_named(file: Path, split: str) -> bool:
    return re.fullmatch(rf"{split}([-.].*)?\.parquet", file.name) is not None


def _named_files(folder: Path, split: str) -> list[Path]:
    return sorted(file for file in folder.iterdir() if is_named(file, split))


def _files_in_folders(folder: Path, split: str) -> list[Path]:
    """Return the parquet files in a split's folder, or [] if it contains subfolders.

    A folder with subfolders is ignored, because it may consist of class folders and an unrelated parquet
    file.
    """
    name = split_folders(folder).get(split)
    return sorted((folder / name).glob("[!.]*.parquet")) if name and not folder_names(folder / name) else []


def saved_files(root: Path) -> dict[str, list[Path]] | None:
    """Return each split's data files if the folder was saved by `datasets.save_to_disk`, otherwise None."""
    if (root / "state.json").is_file() and (root / "dataset_info.json").is_file():
        folders = {"train": root}
    elif (root / "dataset_dict.json").is_file():
        folders = {split: root / name for split, name in split_folders(root).items()}
    else:
        return None
    files = {}
    for split, folder in folders.items():
        if (state_file := folder / "state.json").is_file():
            try:
                entries = json.loads(state_file.read_bytes())["_data_files"]
                files[split] = [folder / Path(entry["filename"]).name for entry in entries]
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"{state_file} does not list data files in the format that `datasets` writes"
                ) from None
    return files


def load_from_hub(data: str, beat: Heartbeat) -> dict[str, Any]:
    """Load `cifar10` or `hub:OWNER/NAME[:CONFIG]`, and return a `datasets.Dataset` for each split.

    The data is downloaded only once, because `datasets` keeps a copy in its own cache.

    Raises:
        ValueError: If the name is invalid, or the data can't be loaded.
    """
    match = HUB_DATA_SET.fullmatch("hub:uoft-cs/cifar10" if data == "cifar10" else data)
    if not match:
        raise ValueError(f"--data {data} is invalid. Use hub:OWNER/NAME or hub:OWNER/NAME:CONFIG")

    hub_problems = list[str]()

    def load():
        hub_problems.append(hub_problem())  # may enable the offline mode, which `datasets` checks on import
        import datasets

        return datasets.load_dataset(*match.groups())

    try:
        return run_with_heartbeat(load, beat)
    except Exception as error:  # `datasets` raises many exception types, for example for a full disk
        reason = " ".join(next(filter(None, (*hub_problems, str(error), type(error).__name__))).split())
        ellipsis = " ..." if len(reason) > 300 else ""
        raise ValueError(
            f"--data {data}: {match[1]} could not be loaded from the hub"
            f" ({printable(reason[:300])}{ellipsis}). Without network access, use --data digits, or --data"
            " FOLDER with the hub's train-*.parquet and test-*.parquet files in FOLDER"
        ) from error


# Reading tables


def write_tables(
    splits: dict[str, list[Table]], columns: Columns, folder: Path, beat: Heartbeat
) -> tuple[str, ...]:
    """Store the labels and encoded images of all splits in a cache folder, and return the class names.

    All labels are checked before any image is read. A test split without labels is not stored. Memory use is
    limited to all labels and one row group of images.
    """
    classes, labels = read_labels(splits, columns, beat)
    for split, (numbers, rows) in labels.items():
        save_labels(folder, split, numbers)
        images = read_images(splits[split], columns, beat)
        save_images(folder, split, save_names_of(images, folder, split), tables=rows)
    return classes


class TableLabels(NamedTuple):
    """Labels of one split, with the row counts of its tables."""

    numbers: np.ndarray  # class indices, int64 [N]
    rows: list[tuple[str, int]]  # name and row count of each table


def read_labels(
    splits: dict[str, list[Table]], chosen: Columns, beat: Heartbeat
) -> tuple[tuple[str, ...], dict[str, TableLabels]]:
    """Read the class names and each split's labels.

    If the files contain no class names, the classes are the sorted distinct labels in the training split. A
    test split is ignored if all of its labels are -1 or null, because data sets on the Hub hide test labels
    in this way.

    Raises:
        ValueError: If a label belongs to no class, or if label types or class names differ between splits.
    """
    columns, names, rows = dict[str, _LabelColumn](), {}, {}
    with (first_table := splits["train"][0]).open() as (
        schema,
        _,
    ):  # all tables must use the same label column
        chosen = chosen._replace(label=label_column(schema, chosen, first_table.where))
    for split, tables in splits.items():
        column, split_classes, counts = _read_split(split, tables, chosen, beat)
        if split != "test" or column.values != [-1]:
            columns[split], names[split], rows[split] = column, split_classes, counts
    types = {type(value) for column in columns.values() for value in column.values}
    if len(types) > 1 or (names["train"] and str in types):
        where = some_of([table.where for split in splits.values() for table in split], 3)
        raise ValueError(
            f"the labels in {where} must be either all numbers, or all names in columns without the"
            " ClassLabel feature"
        )
    classes = {split: names[split] or tuple(sorted(column.values)) for split, column in columns.items()}
    train = classes["train"]
    label_of = {name: label for label, name in enumerate(train)}
    labels = {}
    for split, column in columns.items():
        where, split_classes = splits[split][0].where, classes[split]
        if bool(names[split]) != bool(names["train"]):
            raise ValueError(f"{where}: only one of the splits train and {split} contains class names")
        name_of = (
            dict(enumerate(split_classes)) if names[split] else {label: label for label in split_classes}
        )
        is_unknown = np.array([value not in name_of for value in column.values])[column.codes]
        if is_unknown.any():
            row = int(is_unknown.argmax())
            raise ValueError(
                f"label {column.values[column.codes[row]]} in row {row} of the {split} split ({where}) is out"
                f" of range for {len(split_classes)} classes (rows with such labels: {is_unknown.sum():,})"
            )
        refuse_unknown_classes(
            where, f"the {split} split", {str(name_of[value]) for value in column.values}, map(str, train)
        )
        # A class name may occur twice, so labels are not looked up by name if the splits' class names are
        # identical.
        is_same = bool(names[split]) and split_classes == train
        numbers = np.array([value if is_same else label_of[name_of[value]] for value in column.values])
        labels[split] = TableLabels(numbers[column.codes], rows[split])
    return tuple(map(str, train)), labels


class _LabelColumn(NamedTuple):
    """Label column, stored as its distinct values and a code for each row."""

    values: list[Any]  # distinct labels
    codes: np.ndarray  # index of each row's value in `values`, int32 [N]


def _read_split(
    split: str, tables: list[Table], chosen: Columns, beat: Heartbeat
) -> tuple[_LabelColumn, tuple[str, ...], list[tuple[str, int]]]:
    """Read the labels of one split.

    Returns:
        The label column (int or str), the class names (empty if the files contain no class names), and the
        name and row count of each table.

    Raises:
        ValueError: If a label is missing, labels have unsuitable types, or class names differ between tables.
    """
    codes, names, rows, code_of = list[np.ndarray](), [], [], dict[Any, int]()
    for table in tables:
        with table.open() as (schema, read):
            column_name = label_column(schema, chosen, table.where)
            names.append(tuple(_column_features(schema, table.where).get(column_name, {}).get("names") or ()))
            chunks = [_value_codes(column, code_of, table.where) for column in read(column_name, LABEL_ROWS)]
        table_codes = np.concatenate(chunks) if chunks else np.zeros(0, np.int32)
        if split == "test" and (table_codes < 0).all():
            table_codes[:] = code_of.setdefault(-1, len(code_of))
        if (table_codes < 0).any():
            raise ValueError(f"row {int((table_codes < 0).argmax())} of {table.where} has no label")
        if names[-1] != names[0]:
            raise ValueError(f"{table.where} and {tables[0].where} contain different class names")
        codes.append(table_codes)
        rows.append((table.where, len(table_codes)))
        beat()
    if not sum(map(len, codes)):
        names_of_tables = some_of([table.where for table in tables])
        raise ValueError(f"the {split} split contains no images ({names_of_tables})")
    return _LabelColumn(list(code_of), np.concatenate(codes)), names[0], rows


def _value_codes(column: "pyarrow.Array", code_of: dict[Any, int], where: str) -> np.ndarray:
    """Return the code of each row's value, int32 [n], or -1 for null, and add new values to `code_of`.

    Python code runs only once per distinct value, so that 30 million rows take one second.

    Raises:
        ValueError: If the column's type is unsuitable for labels.
    """
    import pyarrow as pa

    if column.null_count == len(column):
        return np.full(len(column), -1, np.int32)
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        raise ValueError(f"the labels in {where} are lists. {MULTI_LABEL}")
    if pa.types.is_nested(column.type):
        raise ValueError(f"the labels in {where} have type {column.type} instead of numbers or names")
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    values = [str(value) if isinstance(value, bool) else value for value in encoded.dictionary.to_pylist()]
    if other_types := {type(value) for value in values} - {int, str, type(None)}:
        raise ValueError(
            f"the labels in {where} have type {other_types.pop().__name__} instead of numbers or names"
        )
    codes = [-1 if value is None else code_of.setdefault(value, len(code_of)) for value in values]
    indices = encoded.indices.fill_null(len(codes)).to_numpy(zero_copy_only=False)
    return np.array([*codes, -1], np.int32)[indices]


class TableImage(NamedTuple):
    """Encoded image from a table row."""

    content: bytes
    name: str  # path from the Hub's Image struct, or ""


def read_images(tables: list[Table], chosen: Columns, beat: Heartbeat) -> Iterator[TableImage]:
    """Yield the images in a column of binary values or the Hub's Image structs."""
    for table in tables:
        with table.open() as (schema, read):
            row = 0
            for column in read(image_column(schema, chosen, table.where), IMAGE_ROWS):
                yield from _image_bytes(column, table, row)
                row += len(column)
                beat()


def _image_bytes(column: "pyarrow.Array", table: Table, row: int) -> list[TableImage]:
    """Return the bytes and names of consecutive images. Rows from `datasets` may refer to files in its cache.

    Args:
        column: Consecutive values of the image column.
        table: Table that contains the column.
        row: Row number of the first image, shown in error messages.
    """
    import pyarrow as pa

    if not _holds_bytes(column.type):
        raise ValueError(f"{table.where}: the image column has type {column.type} instead of image bytes")
    images = []
    for offset, value in enumerate(column.to_pylist()):
        file = None
        if pa.types.is_struct(column.type):
            value, file = (value or {}).get("bytes"), (value or {}).get("path")
        if value is None and file and not isinstance(table.content, Path) and os.path.isfile(file):
            value = Path(file).read_bytes()
        if value is None:
            raise ValueError(f"row {row + offset} of {table.where} has no image bytes")
        images.append(TableImage(value, file or ""))
    return images


def _holds_bytes(dtype: "pyarrow.DataType") -> bool:
    """Return True if a type is binary or the Hub's Image struct."""
    import pyarrow as pa

    if pa.types.is_struct(dtype) and dtype.get_field_index("bytes") >= 0:
        dtype = dtype.field("bytes").type
    return pa.types.is_binary(dtype) or pa.types.is_large_binary(dtype)


# Columns of tables


def image_column(schema: "pyarrow.Schema", chosen: Columns, where: str) -> str:
    """Return the chosen image column, or else a column named img or image, or else the only image column."""
    features = _column_features(schema, where)
    candidates = [
        field.name
        for field in schema
        if _holds_bytes(field.type)
        # Audio columns also contain bytes
        and features.get(field.name, {}).get("_type", "Image") in ("Image", "Value")
    ]
    return chosen_column(schema.names, "image", chosen.image, IMAGE_COLUMNS, candidates, where)


def label_column(schema: "pyarrow.Schema", chosen: Columns, where: str) -> str:
    """Return the label column.

    In order of preference, the label column is the chosen column, a column named label or fine_label, the
    only column with class names, the only column whose name is in OTHER_LABEL_COLUMNS, or the only column of
    integers, strings (including dictionary-encoded strings) or booleans.
    """
    import pyarrow as pa

    types = pa.types
    label_tests = (
        types.is_integer,
        types.is_string,
        types.is_large_string,
        types.is_dictionary,
        types.is_boolean,
    )
    features = _column_features(schema, where)
    candidates = [name for name in schema.names if features.get(name, {}).get("_type") == "ClassLabel"]
    candidates = candidates or [name for name in schema.names if name.lower() in OTHER_LABEL_COLUMNS]
    candidates = candidates or [
        field.name for field in schema if any(test(field.type) for test in label_tests)
    ]
    return chosen_column(schema.names, "label", chosen.label, LABEL_COLUMNS, candidates, where)


def chosen_column(
    names: Sequence[str],
    content: str,
    chosen: str | None,
    usual: Sequence[str],
    candidates: list[str],
    where: str,
) -> str:
    """Return the chosen column, or else the first column with a usual name, or else the only candidate.

    Args:
        names: Names of all columns in the table.
        content: Content of the column to find, "image" or "label".
        chosen: Column specified by a flag, or None or "" if no flag specifies a column.
        usual: Usual column names, in order of preference.
        candidates: Names of all columns with suitable content.
        where: Table name shown in error messages.

    Raises:
        ValueError: If the chosen column is missing, or if the column can't be determined.
    """
    if chosen and chosen not in names:
        raise ValueError(f"--{content}_column {chosen}: {where} contains only the columns {some_of(names)}")
    if column := chosen or next((name for name in usual if name in names), None):
        return column
    if len(candidates) == 1:
        return candidates[0]
    problem = f"no {content} column ({', '.join(usual)}), only {some_of(names)}"
    if candidates:
        problem = f"several {content} columns ({some_of(candidates)})"
    raise ValueError(f"{where} contains {problem}. Choose a column with --{content}_column")


def _column_features(schema: "pyarrow.Schema", where: str) -> dict[str, dict[str, Any]]:
    """Return each column's feature from `datasets` metadata in the schema, or {} without such metadata."""
    try:
        metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = (metadata.get("info") or {}).get("features") or {}
        features = {name: feature for name, feature in features.items() if isinstance(feature, dict)}
        names = [feature.get("names") or [] for feature in features.values()]
    except (ValueError, AttributeError, RecursionError):
        names = [None]
    if all(isinstance(column, list) and all(isinstance(name, str) for name in column) for column in names):
        return features
    raise ValueError(
        f"{where}: the class names in the huggingface metadata are not in the format that `datasets` writes,"
        " a list of strings at info.features.<column>.names"
    )
