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
from onecurve.data.names import save_names_on_read
from onecurve.system.env import check_hub_or_go_offline
from onecurve.system.files import lfs_pointer_problem
from onecurve.system.text import printable, some_of
from onecurve.system.threads import Heartbeat, run_with_heartbeat

if TYPE_CHECKING:
    import pyarrow

    # Function that reads a column, by name, and yields its values in chunks with a maximum number of rows
    ReadColumn = Callable[[str, int], Iterator[pyarrow.Array]]

HUB_DATA_SET_PATTERN = re.compile(r"hub:(\w[\w.-]*/\w[\w.-]*)(?::([\w.-]+))?", re.ASCII)
# Usual names of image and label columns, in order of preference. A column with a different name is used only
# if no column has a usual name.
USUAL_IMAGE_COLUMNS = ("img", "image")
USUAL_LABEL_COLUMNS = ("label", "fine_label")
OTHER_LABEL_COLUMNS = ("labels", "class", "category", "target")
IMAGE_ROWS_PER_CHUNK, LABEL_ROWS_PER_CHUNK = 256, 1_000_000  # rows of a column that are read at once
MAX_REASON_LENGTH = 300  # maximum number of characters of a Hub error's reason shown in a message
MULTI_LABEL_ADVICE = (
    "Multi-label data is not supported, because the scripts train classifiers with one class per image."
    " Keep only one label for each image"
)


class Columns(NamedTuple):
    """Columns that --image_column and --label_column specify. None detects a column by type and name."""

    image: str | None = None  # name of the image column
    label: str | None = None  # name of the label column


DEFAULT_COLUMNS = Columns()


class Table(NamedTuple):
    """Image table in a parquet file, in an Arrow stream (.arrow), or loaded by `datasets`."""

    display_name: str  # table name shown in error messages
    content: "Path | pyarrow.Table"  # local file, or table that `datasets` has loaded

    @contextmanager
    def open(self) -> "Iterator[tuple[pyarrow.Schema, ReadColumn]]":
        """Open the table's file, and provide the schema and a function that reads one column.

        The function `read_column(column_name, chunk_rows)` yields the column in chunks of up to `chunk_rows`
        values. It can only be called while the table is open.

        Raises:
            ValueError: If pyarrow can't read the table. The message contains the table's name.
        """
        import pyarrow as pa
        import pyarrow.parquet

        try:
            if isinstance(self.content, Path) and self.content.suffix != ".arrow":
                # The file is opened here, because pyarrow rejects file names that are not UTF-8
                with open(self.content, "rb") as table_stream:
                    parquet_file = pa.parquet.ParquetFile(table_stream)

                    def read_parquet_column(column_name: str, chunk_rows: int) -> "Iterator[pyarrow.Array]":
                        for row_batch in parquet_file.iter_batches(chunk_rows, columns=[column_name]):
                            yield row_batch.column(0)

                    yield parquet_file.schema_arrow, read_parquet_column
                return
            arrow_table = self.content
            if isinstance(arrow_table, Path):
                with open(arrow_table, "rb") as table_stream:
                    arrow_table = pa.ipc.open_stream(table_stream).read_all()

            def read_arrow_column(column_name: str, chunk_rows: int) -> "Iterator[pyarrow.Array]":
                for row_batch in arrow_table.select([column_name]).to_batches(chunk_rows):
                    yield row_batch.column(0)

            yield arrow_table.schema, read_arrow_column
        except (pa.ArrowException, OSError) as error:
            first_error_line = str(error).splitlines()[0].rstrip(".")
            unreadable_reason = f"{first_error_line}. The file may be incomplete. Download the file again"
            if isinstance(self.content, Path):
                unreadable_reason = lfs_pointer_problem(self.content) or unreadable_reason
            raise ValueError(f"{self.display_name} cannot be read: {unreadable_reason}") from None
        except UnicodeDecodeError:
            encoding_problem = "contains a name or label that is not encoded in UTF-8"
            raise ValueError(f"{self.display_name} {encoding_problem}") from None


# Finding tables


def parquet_files(root: Path) -> dict[str, list[Path]] | None:
    """Return the parquet files of each split, in `root` or in one subfolder, or None without training files.

    A file's split is determined by its name (train-*.parquet, val-*.parquet, validation-*.parquet,
    valid-*.parquet or test-*.parquet) or by its folder (for example train/*.parquet).
    """
    candidate_folders = [root, *(root / folder_name for folder_name in folder_names(root))]
    # File names take precedence over folder names
    for files_of_split in (_files_named_after, _files_in_split_folder):
        data_folders = [folder for folder in candidate_folders if files_of_split(folder, "train")]
        if data_folders:
            break
    else:
        return None
    if len(data_folders) > 1 and data_folders[0] != root:
        folder_list = some_of([folder.name for folder in data_folders])
        raise ValueError(
            f"--data {root} contains several data sets ({folder_list}). Pass the folder of one data set"
        )
    files_by_split = {split: files_of_split(data_folders[0], split) for split in ("train", *VAL_NAMES)}
    return {split: split_files for split, split_files in files_by_split.items() if split_files}


def is_named_after(file: Path, split: str) -> bool:
    """Return True for names like train.parquet and train-00000-of-00002.parquet, if the split is train."""
    return re.fullmatch(rf"{split}([-.].*)?\.parquet", file.name) is not None


def _files_named_after(folder: Path, split: str) -> list[Path]:
    """Return the sorted parquet files in a folder whose names start with a split's name."""
    return sorted(parquet_file for parquet_file in folder.iterdir() if is_named_after(parquet_file, split))


def _files_in_split_folder(folder: Path, split: str) -> list[Path]:
    """Return the parquet files in a split's folder, or [] if it contains subfolders.

    A folder with subfolders is ignored, because it may consist of class folders and an unrelated parquet
    file.
    """
    split_folder_name = split_folders(folder).get(split)
    if not split_folder_name or folder_names(folder / split_folder_name):
        return []
    return sorted((folder / split_folder_name).glob("[!.]*.parquet"))


def saved_files(root: Path) -> dict[str, list[Path]] | None:
    """Return each split's data files if the folder was saved by `datasets.save_to_disk`, otherwise None."""
    if (root / "state.json").is_file() and (root / "dataset_info.json").is_file():
        folder_by_split = {"train": root}
    elif (root / "dataset_dict.json").is_file():
        folder_by_split = {split: root / folder_name for split, folder_name in split_folders(root).items()}
    else:
        return None
    files_by_split = {}
    for split, split_folder in folder_by_split.items():
        if (state_file := split_folder / "state.json").is_file():
            try:
                file_entries = json.loads(state_file.read_bytes())["_data_files"]
                # Only the name is used, so that no entry can refer to a file outside the folder.
                files_by_split[split] = [
                    split_folder / Path(file_entry["filename"]).name for file_entry in file_entries
                ]
            except (ValueError, KeyError, TypeError):
                state_problem = "does not list data files in the format that `datasets` writes"
                raise ValueError(f"{state_file} {state_problem}") from None
    return files_by_split


def load_from_hub(data: str, beat: Heartbeat) -> dict[str, Any]:
    """Load `cifar10` or `hub:OWNER/NAME[:CONFIG]`, and return a `datasets.Dataset` for each split.

    The data is downloaded only once, because `datasets` keeps a copy in its own cache. If the Hub can't be
    reached, this process switches to offline mode and uses that copy.

    Args:
        data: Value of `--data`.
        beat: Heartbeat function, called about once per second.

    Raises:
        ValueError: If the name is invalid, or the data can't be loaded.
    """
    name_match = HUB_DATA_SET_PATTERN.fullmatch("hub:uoft-cs/cifar10" if data == "cifar10" else data)
    if not name_match:
        raise ValueError(f"--data {data} is invalid. Use hub:OWNER/NAME or hub:OWNER/NAME:CONFIG")

    repository_name, config_name = name_match.groups()
    hub_problems = list[str]()

    def load_data_set():
        # The check may enable the offline mode, which `datasets` reads on import.
        hub_problems.append(check_hub_or_go_offline())
        import datasets

        return datasets.load_dataset(repository_name, config_name)

    try:
        return run_with_heartbeat(load_data_set, beat)
    except Exception as error:  # `datasets` raises many exception types, for example for a full disk
        first_failure_reason = next(filter(None, (*hub_problems, str(error), type(error).__name__)))
        failure_reason = " ".join(first_failure_reason.split())
        reason_ellipsis = " ..." if len(failure_reason) > MAX_REASON_LENGTH else ""
        raise ValueError(
            f"--data {data}: {repository_name} could not be loaded from the Hub"
            f" ({printable(failure_reason[:MAX_REASON_LENGTH])}{reason_ellipsis})."
            " Without network access, use --data digits, or --data FOLDER"
            " with the Hub's train-*.parquet and test-*.parquet files in FOLDER"
        ) from error


# Reading tables


def write_tables(
    tables_by_split: dict[str, list[Table]], columns: Columns, folder: Path, beat: Heartbeat
) -> tuple[str, ...]:
    """Store the labels and encoded images of all splits in a cache folder, and return the class names.

    All labels are checked before any image is read. A test split without labels is not stored. Memory use is
    limited to all labels and one row group of images.
    """
    class_names, labels_by_split = read_labels(tables_by_split, columns, beat)
    for split, (labels, row_counts) in labels_by_split.items():
        save_labels(folder, split, labels)
        table_images = read_images(tables_by_split[split], columns, beat)
        save_images(folder, split, save_names_on_read(table_images, folder, split), tables=row_counts)
    return class_names


class TableLabels(NamedTuple):
    """Labels of one split, with the row counts of its tables."""

    labels: np.ndarray  # class indices, int64 [N]
    row_counts: list[tuple[str, int]]  # name and row count of each table


def read_labels(
    tables_by_split: dict[str, list[Table]], flag_columns: Columns, beat: Heartbeat
) -> tuple[tuple[str, ...], dict[str, TableLabels]]:
    """Read the class names and each split's labels.

    If the files contain no class names, the classes are the sorted distinct labels in the training split. A
    test split is ignored if all of its labels are -1 or null, because data sets on the Hub hide test labels
    in this way.

    Raises:
        ValueError: If a label belongs to no class, or if label types or class names differ between splits.
    """
    first_table = tables_by_split["train"][0]
    with first_table.open() as (schema, _read_column):
        # All tables must use the same label column
        label_column = find_label_column(schema, flag_columns, first_table.display_name)
    all_tables_columns = flag_columns._replace(label=label_column)
    raw_labels_by_split = dict[str, _RawLabels]()
    for split, tables in tables_by_split.items():
        raw_labels = _read_raw_labels(split, tables, all_tables_columns, beat)
        if split != "test" or raw_labels.label_values != [-1]:  # [-1] means that all test labels are hidden
            raw_labels_by_split[split] = raw_labels
    has_class_names = bool(raw_labels_by_split["train"].class_names)
    all_labels = raw_labels_by_split.values()
    label_types = {type(raw_label) for raw_labels in all_labels for raw_label in raw_labels.label_values}
    if len(label_types) > 1 or (has_class_names and str in label_types):
        table_names = [table.display_name for tables in tables_by_split.values() for table in tables]
        raise ValueError(
            f"the labels in {some_of(table_names, 3)} must be either all numbers,"
            " or all names in columns without the ClassLabel feature"
        )
    classes_by_split = {
        split: raw_labels.class_names or tuple(sorted(raw_labels.label_values))
        for split, raw_labels in raw_labels_by_split.items()
    }
    train_classes = classes_by_split["train"]
    train_label_by_class = {class_name: label for label, class_name in enumerate(train_classes)}
    labels_by_split = {}
    for split, (label_values, row_codes, class_names, row_counts) in raw_labels_by_split.items():
        table_name = tables_by_split[split][0].display_name
        split_classes = classes_by_split[split]
        if bool(class_names) != has_class_names:
            class_names_problem = f"only one of the splits train and {split} contains class names"
            raise ValueError(f"{table_name}: {class_names_problem}")
        # A label in a table is the class itself, or the index of a class name
        class_by_value: dict[Any, Any] = {split_class: split_class for split_class in split_classes}
        if class_names:
            class_by_value = dict(enumerate(split_classes))
        # Mask of the rows whose label belongs to no class
        has_unknown_label = np.array([value not in class_by_value for value in label_values])[row_codes]
        if has_unknown_label.any():
            row = int(has_unknown_label.argmax())
            raise ValueError(
                f"label {label_values[row_codes[row]]} in row {row} of the {split} split ({table_name})"
                f" is out of range for {len(split_classes)} classes"
                f" (rows with such labels: {has_unknown_label.sum():,})"
            )
        present_classes = {str(class_by_value[raw_label]) for raw_label in label_values}
        refuse_unknown_classes(table_name, f"the {split} split", present_classes, map(str, train_classes))
        # A class name may occur twice, so labels are not looked up by name if the splits' class names are
        # identical.
        if not class_names or split_classes != train_classes:
            label_values = [train_label_by_class[class_by_value[raw_label]] for raw_label in label_values]
        labels_by_split[split] = TableLabels(np.array(label_values)[row_codes], row_counts)
    return tuple(map(str, train_classes)), labels_by_split


class _RawLabels(NamedTuple):
    """Labels of one split as stored in its tables: the distinct values and a code for each row."""

    label_values: list[Any]  # distinct labels, int or str
    row_codes: np.ndarray  # index of each row's label in `label_values`, int32 [N]
    class_names: tuple[str, ...]  # empty if the files contain no class names
    row_counts: list[tuple[str, int]]  # name and row count of each table


def _read_raw_labels(split: str, tables: list[Table], chosen_columns: Columns, beat: Heartbeat) -> _RawLabels:
    """Read the labels of one split from all of its tables.

    Raises:
        ValueError: If a label is missing, labels have unsuitable types, or class names differ between tables.
    """
    row_codes = list[np.ndarray]()  # codes of each table
    row_counts = list[tuple[str, int]]()
    code_by_value = dict[Any, int]()  # shared by all tables; _value_codes() adds new labels
    split_class_names: tuple[str, ...] | None = None
    for table in tables:
        table_name = table.display_name
        with table.open() as (schema, read_column):
            column_name = find_label_column(schema, chosen_columns, table_name)
            label_feature = _features_by_column(schema, table_name).get(column_name, {})
            label_chunks = read_column(column_name, LABEL_ROWS_PER_CHUNK)
            chunk_codes = [_value_codes(chunk, code_by_value, table_name) for chunk in label_chunks]
        table_codes = np.concatenate(chunk_codes) if chunk_codes else np.zeros(0, np.int32)
        if split == "test" and (table_codes < 0).all():  # treat a table without test labels like labels of -1
            table_codes[:] = code_by_value.setdefault(-1, len(code_by_value))
        if (table_codes < 0).any():
            raise ValueError(f"row {int((table_codes < 0).argmax())} of {table_name} has no label")
        class_names = tuple(label_feature.get("names") or ())
        if split_class_names is None:
            split_class_names = class_names
        if class_names != split_class_names:
            raise ValueError(f"{table_name} and {tables[0].display_name} contain different class names")
        row_codes.append(table_codes)
        row_counts.append((table_name, len(table_codes)))
        beat()
    if split_class_names is None or not sum(map(len, row_codes)):
        table_names = some_of([table.display_name for table in tables])
        raise ValueError(f"the {split} split contains no images ({table_names})")
    return _RawLabels(list(code_by_value), np.concatenate(row_codes), split_class_names, row_counts)


def _value_codes(chunk: "pyarrow.Array", code_by_value: dict[Any, int], table_name: str) -> np.ndarray:
    """Return the code of each row's value, int32 [n], or -1 for null, and add new values to `code_by_value`.

    Python code runs only once per distinct value, so that 30 million rows take one second.

    Raises:
        ValueError: If the column's type is unsuitable for labels.
    """
    import pyarrow as pa

    if chunk.null_count == len(chunk):
        return np.full(len(chunk), -1, np.int32)
    if pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type):
        raise ValueError(f"the labels in {table_name} are lists. {MULTI_LABEL_ADVICE}")
    if pa.types.is_nested(chunk.type):
        raise ValueError(f"the labels in {table_name} have type {chunk.type} instead of numbers or names")
    encoded_chunk = chunk if pa.types.is_dictionary(chunk.type) else chunk.dictionary_encode()
    distinct_labels = encoded_chunk.dictionary.to_pylist()
    # Booleans become classes named False and True
    labels = [str(label) if isinstance(label, bool) else label for label in distinct_labels]
    if unsupported_types := {type(label) for label in labels} - {int, str, type(None)}:
        type_name = unsupported_types.pop().__name__
        raise ValueError(f"the labels in {table_name} have type {type_name} instead of numbers or names")
    codes = [-1 if label is None else code_by_value.setdefault(label, len(code_by_value)) for label in labels]
    # Null rows get the index of the -1 that is appended to the codes
    label_indices = encoded_chunk.indices.fill_null(len(codes)).to_numpy(zero_copy_only=False)
    return np.array([*codes, -1], np.int32)[label_indices]


class TableImage(NamedTuple):
    """Encoded image from a table row."""

    content: bytes
    name: str  # path from the Hub's Image struct, or ""


def read_images(tables: list[Table], flag_columns: Columns, beat: Heartbeat) -> Iterator[TableImage]:
    """Yield the images of all tables in row order.

    The image column may contain binary values or the Hub's Image structs.
    """
    for table in tables:
        with table.open() as (schema, read_column):
            first_row = 0
            column_name = find_image_column(schema, flag_columns, table.display_name)
            for image_chunk in read_column(column_name, IMAGE_ROWS_PER_CHUNK):
                yield from _images_in_chunk(image_chunk, table, first_row)
                first_row += len(image_chunk)
                beat()


def _images_in_chunk(chunk: "pyarrow.Array", table: Table, first_row: int) -> list[TableImage]:
    """Return the bytes and names of consecutive images.

    Rows from `datasets` may refer to files in its cache, which this function reads.

    Args:
        chunk: Consecutive values of the image column.
        table: Table that contains the column.
        first_row: Row number of the first image, shown in error messages.
    """
    import pyarrow as pa

    if not _holds_bytes(chunk.type):
        type_problem = f"the image column has type {chunk.type} instead of image bytes"
        raise ValueError(f"{table.display_name}: {type_problem}")
    table_images = []
    for row, image_value in enumerate(chunk.to_pylist(), first_row):
        image_bytes, image_path = image_value, None
        if pa.types.is_struct(chunk.type):
            image_struct = image_value or {}
            image_bytes, image_path = image_struct.get("bytes"), image_struct.get("path")
        # Only rows from the Hub refer to files on this host
        is_from_hub = not isinstance(table.content, Path)
        if image_bytes is None and image_path and is_from_hub and os.path.isfile(image_path):
            image_bytes = Path(image_path).read_bytes()
        if image_bytes is None:
            raise ValueError(f"row {row} of {table.display_name} has no image bytes")
        table_images.append(TableImage(image_bytes, image_path or ""))
    return table_images


def _holds_bytes(column_type: "pyarrow.DataType") -> bool:
    """Return True if a type is binary or the Hub's Image struct."""
    import pyarrow as pa

    if pa.types.is_struct(column_type) and column_type.get_field_index("bytes") >= 0:
        column_type = column_type.field("bytes").type
    return pa.types.is_binary(column_type) or pa.types.is_large_binary(column_type)


# Columns of tables


def find_image_column(schema: "pyarrow.Schema", flag_columns: Columns, table_name: str) -> str:
    """Return the name of the image column.

    In order of preference, the image column is the column that a flag specifies, a column named img or image,
    or the only column of images or bytes.
    """
    feature_by_column = _features_by_column(schema, table_name)
    image_columns = [
        field.name
        for field in schema
        if _holds_bytes(field.type)
        # Audio columns also contain bytes
        and feature_by_column.get(field.name, {}).get("_type", "Image") in ("Image", "Value")
    ]
    return choose_column(
        schema.names, "image", flag_columns.image, USUAL_IMAGE_COLUMNS, image_columns, table_name
    )


def find_label_column(schema: "pyarrow.Schema", flag_columns: Columns, table_name: str) -> str:
    """Return the name of the label column.

    In order of preference, the label column is the column that a flag specifies, a column named label or
    fine_label, the only column with class names, the only column whose name is in OTHER_LABEL_COLUMNS, or the
    only column of integers, strings (including dictionary-encoded strings) or booleans.
    """
    import pyarrow as pa

    types = pa.types
    label_type_tests = (
        types.is_integer,
        types.is_string,
        types.is_large_string,
        types.is_dictionary,
        types.is_boolean,
    )
    features = _features_by_column(schema, table_name)
    label_columns = [
        column for column in schema.names if features.get(column, {}).get("_type") == "ClassLabel"
    ]
    label_columns = label_columns or [
        column for column in schema.names if column.lower() in OTHER_LABEL_COLUMNS
    ]
    label_columns = label_columns or [
        field.name for field in schema if any(is_type(field.type) for is_type in label_type_tests)
    ]
    return choose_column(
        schema.names, "label", flag_columns.label, USUAL_LABEL_COLUMNS, label_columns, table_name
    )


def choose_column(
    column_names: Sequence[str],
    content: str,
    chosen_name: str | None,
    usual_names: Sequence[str],
    candidates: list[str],
    table_name: str,
) -> str:
    """Return the chosen column, or else the first column with a usual name, or else the only candidate.

    Args:
        column_names: Names of all columns in the table.
        content: Content of the column to find, "image" or "label".
        chosen_name: Column specified by a flag, or None or "" if no flag specifies a column.
        usual_names: Usual column names, in order of preference.
        candidates: Names of all columns with suitable content.
        table_name: Table name shown in error messages.

    Raises:
        ValueError: If the chosen column is missing, or if the column can't be determined.
    """
    if chosen_name and chosen_name not in column_names:
        column_problem = f"{table_name} contains only the columns {some_of(column_names)}"
        raise ValueError(f"--{content}_column {chosen_name}: {column_problem}")
    if column := chosen_name or next((column for column in usual_names if column in column_names), None):
        return column
    if len(candidates) == 1:
        return candidates[0]
    column_problem = f"no {content} column ({', '.join(usual_names)}), only {some_of(column_names)}"
    if candidates:
        column_problem = f"several {content} columns ({some_of(candidates)})"
    raise ValueError(f"{table_name} contains {column_problem}. Choose a column with --{content}_column")


def _features_by_column(schema: "pyarrow.Schema", table_name: str) -> dict[str, dict[str, Any]]:
    """Return each column's feature from `datasets` metadata in the schema, or {} without such metadata."""
    try:
        hub_metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        all_features = (hub_metadata.get("info") or {}).get("features") or {}
        features = {column: feature for column, feature in all_features.items() if isinstance(feature, dict)}
        class_name_lists = [feature.get("names") or [] for feature in features.values()]
    except (ValueError, AttributeError, RecursionError):
        class_name_lists = [None]  # fails the check below
    if all(map(_is_list_of_strings, class_name_lists)):
        return features
    raise ValueError(
        f"{table_name}: the class names in the huggingface metadata are not in the format"
        " that `datasets` writes, a list of strings at info.features.<column>.names"
    )


def _is_list_of_strings(json_value: Any) -> bool:
    """Return True for a parsed JSON array that contains only strings."""
    return isinstance(json_value, list) and all(isinstance(list_item, str) for list_item in json_value)
