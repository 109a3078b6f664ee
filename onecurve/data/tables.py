"""Tables of images: parquet files, folders that `datasets` saved, and data sets of the Hugging Face hub.

pyarrow reads the files in place. `datasets` would copy them into a cache of its own first, takes `[`, `*` and
`::` in the name of a folder for patterns and URLs, and takes 3 s to import: it is used for the hub alone.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from onecurve.data.class_folders import VAL_NAMES, check_known, folder_names, split_folders
from onecurve.data.encoded import save_images, save_labels
from onecurve.data.names import save_names_of
from onecurve.system.env import hub_problem
from onecurve.system.files import unfetched
from onecurve.system.text import printable, some_of
from onecurve.system.threads import Heartbeat, run_with_heartbeat

if TYPE_CHECKING:
    import pyarrow

HUB = re.compile(r"hub:(\w[\w.-]*/\w[\w.-]*)(?::([\w.-]+))?", re.ASCII)
# The first that is there, before others that hold images or labels
IMAGE_COLUMNS, LABEL_COLUMNS = ("img", "image"), ("label", "fine_label")
OTHER_LABEL_COLUMNS = ("labels", "class", "category", "target")
IMAGE_ROWS, LABEL_ROWS = 256, 1_000_000  # read at a time
MULTI_LABEL = (
    "This is multi-label data, and the scripts train classifiers with one class for each image: keep one"
    " label of each"
)


class Columns(NamedTuple):
    """--image_column and --label_column of tables; None: found by type and name."""

    image: str | None = None
    label: str | None = None


BY_TYPE = Columns()


class Table(NamedTuple):
    """A parquet file, an arrow stream (.arrow), or rows that `datasets` has loaded."""

    where: str  # its name in messages
    content: "Path | pyarrow.Table"

    @contextmanager
    def open(self) -> "Iterator[tuple[pyarrow.Schema, Callable[..., Iterator[pyarrow.Array]]]]":
        """Yields the schema and a function that reads a column by its name, so many values at a time. Raises
        ValueError that names the table for anything that pyarrow can't read."""
        import pyarrow as pa
        import pyarrow.parquet

        try:
            if isinstance(self.content, Path) and self.content.suffix != ".arrow":
                with open(self.content, "rb") as stream:  # pyarrow takes no file name that is not UTF-8
                    file = pa.parquet.ParquetFile(stream)
                    batches = file.iter_batches
                    yield file.schema_arrow, lambda name, n: (b.column(0) for b in batches(n, columns=[name]))
                return
            rows = self.content
            if isinstance(rows, Path):
                with open(rows, "rb") as stream:
                    rows = pa.ipc.open_stream(stream).read_all()
            yield rows.schema, lambda name, n: (b.column(0) for b in rows.select([name]).to_batches(n))
        except (pa.ArrowException, OSError) as error:
            reason = f"{str(error).splitlines()[0].rstrip('.')}. Is it complete? Fetch it again"
            if isinstance(self.content, Path):
                reason = unfetched(self.content) or reason
            raise ValueError(f"{self.where} cannot be read: {reason}") from None
        except UnicodeDecodeError:
            raise ValueError(f"{self.where} has a name or label that is not UTF-8") from None


# Finding them


def parquet_files(root: Path) -> dict[str, list[Path]] | None:
    """Lists train-*.parquet and val-*, validation-*, valid- or test-*.parquet, or train/*.parquet and so on.

    They lie in the folder, or one level below. None without any for training.
    """
    below = [root, *(root / name for name in folder_names(root))]
    for files_of in (_named_files, _files_in_folders):
        if folders := [f for f in below if files_of(f, "train")]:
            break
    else:
        return None
    if len(folders) > 1 and folders[0] != root:
        names = [f.name for f in folders]
        raise ValueError(
            f"--data {root} holds more than one data set ({some_of(names)}): give the folder of one"
        )
    return {split: files for split in ("train", *VAL_NAMES) if (files := files_of(folders[0], split))}


def is_named(file: Path, split: str) -> bool:
    return re.fullmatch(rf"{split}([-.].*)?\.parquet", file.name) is not None


def _named_files(folder: Path, split: str) -> list[Path]:
    return sorted(file for file in folder.iterdir() if is_named(file, split))


def _files_in_folders(folder: Path, split: str) -> list[Path]:
    """Parquet files of a folder that holds no folders: class folders may have such a file among them."""
    name = split_folders(folder).get(split)
    return sorted((folder / name).glob("[!.]*.parquet")) if name and not folder_names(folder / name) else []


def saved_files(root: Path) -> dict[str, list[Path]] | None:
    """Lists what `save_to_disk` of `datasets` wrote: for each split a folder with state.json, else None."""
    if (root / "state.json").is_file() and (root / "dataset_info.json").is_file():
        folders = {"train": root}
    elif (root / "dataset_dict.json").is_file():
        folders = {split: root / name for split, name in split_folders(root).items()}
    else:
        return None
    found = {}
    for split, folder in folders.items():
        if (state := folder / "state.json").is_file():
            try:
                files = json.loads(state.read_bytes())["_data_files"]
                found[split] = [folder / Path(file["filename"]).name for file in files]
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{state} names no data files, as `datasets` writes them") from None
    return found


def load_from_hub(data: str, beat: Heartbeat) -> dict[str, Any]:
    """The `datasets.Dataset` of each split of `cifar10`, or `hub:OWNER/NAME[:CONFIG]`; `datasets` downloads
    it once and keeps it."""
    match = HUB.fullmatch("hub:uoft-cs/cifar10" if data == "cifar10" else data)
    if not match:
        raise ValueError(f"--data {data}: expected hub:OWNER/NAME or hub:OWNER/NAME:CONFIG")

    problem = list[str]()

    def load():
        problem.append(hub_problem())  # before `datasets` reads whether it is there
        import datasets

        return datasets.load_dataset(*match.groups())

    try:
        return run_with_heartbeat(load, beat)
    except Exception as error:  # no network, no room, a hub that says no: too many classes to list
        reason = " ".join(next(filter(None, (*problem, str(error), type(error).__name__))).split())
        more = " ..." if len(reason) > 300 else ""
        raise ValueError(
            f"--data {data}: {match[1]} could not be loaded from the hub ({printable(reason[:300])}{more})."
            " Without network use local files: --data FOLDER with the hub's train-*.parquet and"
            " test-*.parquet, or --data digits"
        ) from error


# Reading them


def write_tables(
    splits: dict[str, list[Table]], columns: Columns, folder: Path, beat: Heartbeat
) -> tuple[str, ...]:
    """Stores labels and encoded images of the splits in a cache folder. Returns the class names.

    All labels are checked before an image is read. A test split without labels is not stored. Memory: one row
    group and the labels.
    """
    classes, labels = read_labels(splits, columns, beat)
    for split, (numbers, rows) in labels.items():
        save_labels(folder, split, numbers)
        images = read_images(splits[split], columns, beat)
        save_images(folder, split, save_names_of(images, folder, split), parts=rows)
    return classes


class Labels(NamedTuple):
    """The labels of one split."""

    numbers: np.ndarray  # int64 [N]
    rows: list[tuple[str, int]]  # of each table


def read_labels(
    splits: dict[str, list[Table]], chosen: Columns, beat: Heartbeat
) -> tuple[tuple[str, ...], dict[str, Labels]]:
    """The class names, and the labels of each split. Raises ValueError for a label without a class.

    Without names in the files the classes are the distinct labels of train, sorted. A split "test" whose
    labels are all -1 or null, as the hub has hidden ones, is left out.
    """
    columns, names, rows = dict[str, _Column](), {}, {}
    with (first := splits["train"][0]).open() as (schema, _):  # the one of all files, not each file's guess
        chosen = chosen._replace(label=label_column(schema, chosen, first.where))
    for split, tables in splits.items():
        column, of_split, counts = _read_split(split, tables, chosen, beat)
        if split != "test" or column.values != [-1]:
            columns[split], names[split], rows[split] = column, of_split, counts
    types = {type(value) for column in columns.values() for value in column.values}
    if len(types) > 1 or (names["train"] and str in types):
        where = some_of([table.where for split in splits.values() for table in split], 3)
        raise ValueError(f"labels of {where} must be all numbers, or all names in columns without ClassLabel")
    classes = {split: names[split] or tuple(sorted(column.values)) for split, column in columns.items()}
    train = classes["train"]
    number = {name: k for k, name in enumerate(train)}
    labels = {}
    for split, column in columns.items():
        where, of_split = splits[split][0].where, classes[split]
        if bool(names[split]) != bool(names["train"]):
            raise ValueError(f"{where}: of the splits train and {split} only one has class names")
        name_of = dict(enumerate(of_split)) if names[split] else {label: label for label in of_split}
        is_wrong = np.array([value not in name_of for value in column.values])[column.codes]
        if is_wrong.any():
            row = int(is_wrong.argmax())
            raise ValueError(
                f"label {column.values[column.codes[row]]} in row {row} of the {split} split ({where}) is out"
                f" of range: there are {len(of_split)} classes ({is_wrong.sum():,} such rows)"
            )
        check_known(where, f"the split {split}", {str(name_of[v]) for v in column.values}, map(str, train))
        # Equal names are not looked up, as a name may occur twice.
        is_same = bool(names[split]) and of_split == train
        numbers = np.array([value if is_same else number[name_of[value]] for value in column.values])
        labels[split] = Labels(numbers[column.codes], rows[split])
    return tuple(map(str, train)), labels


class _Column(NamedTuple):
    """A column of labels: its distinct values, and each row's number among them."""

    values: list[Any]
    codes: np.ndarray  # int32 [N]


def _read_split(
    split: str, tables: list[Table], chosen: Columns, beat: Heartbeat
) -> tuple[_Column, tuple[str, ...], list[tuple[str, int]]]:
    """The labels of a split, int or str; the class names, where the files have them; and each table's number
    of rows. Raises ValueError for labels of other types, and where one is missing."""
    codes, names, rows, numbers = list[np.ndarray](), [], [], dict[Any, int]()
    for table in tables:
        with table.open() as (schema, read):
            name = label_column(schema, chosen, table.where)
            names.append(tuple(_features(schema, table.where).get(name, {}).get("names") or ()))
            parts = [_encoded(column, numbers, table.where) for column in read(name, LABEL_ROWS)]
        part = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        if split == "test" and (part < 0).all():
            part[:] = numbers.setdefault(-1, len(numbers))
        if (part < 0).any():
            raise ValueError(f"row {int((part < 0).argmax())} of {table.where} has no label")
        if names[-1] != names[0]:
            raise ValueError(f"{table.where} has other class names than {tables[0].where}")
        codes.append(part)
        rows.append((table.where, len(part)))
        beat()
    if not sum(map(len, codes)):
        raise ValueError(f"no images in the {split} split: {some_of([table.where for table in tables])}")
    return _Column(list(numbers), np.concatenate(codes)), names[0], rows


def _encoded(column: "pyarrow.Array", numbers: dict[Any, int], where: str) -> np.ndarray:
    """Return each row's number in `numbers`, which gets new values: int32 [n], -1 for null.

    Python sees each distinct value once, so that 30 million rows take a second. ValueError for values that
    are no labels.
    """
    import pyarrow as pa

    if column.null_count == len(column):
        return np.full(len(column), -1, np.int32)
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        raise ValueError(f"the labels of {where} are lists. {MULTI_LABEL}")
    if pa.types.is_nested(column.type):
        raise ValueError(f"the labels of {where} are {column.type}, not numbers or names")
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    values = [str(value) if isinstance(value, bool) else value for value in encoded.dictionary.to_pylist()]
    if other := {type(value) for value in values} - {int, str, type(None)}:
        raise ValueError(f"the labels of {where} are {other.pop().__name__}, not numbers or names")
    own = [-1 if value is None else numbers.setdefault(value, len(numbers)) for value in values]
    return np.array([*own, -1], np.int32)[encoded.indices.fill_null(len(own)).to_numpy(zero_copy_only=False)]


class TableImage(NamedTuple):
    content: bytes
    name: str  # the struct's path; "" without one


def read_images(tables: list[Table], chosen: Columns, beat: Heartbeat) -> Iterator[TableImage]:
    """The values of a column of the hub's Image structs, or of plain binary."""
    for table in tables:
        with table.open() as (schema, read):
            row = 0
            for column in read(image_column(schema, chosen, table.where), IMAGE_ROWS):
                yield from _image_bytes(column, table, row)
                row += len(column)
                beat()


def _image_bytes(column: "pyarrow.Array", table: Table, row: int) -> list[TableImage]:
    """The bytes and names of consecutive images. row: the first one's.

    Rows that `datasets` has loaded may have the path of a file in its cache instead.
    """
    import pyarrow as pa

    if not _holds_bytes(column.type):
        raise ValueError(f"{table.where}: its image column holds {column.type}, not image bytes")
    images = []
    for k, value in enumerate(column.to_pylist()):
        file = None
        if pa.types.is_struct(column.type):
            value, file = (value or {}).get("bytes"), (value or {}).get("path")
        if value is None and file and not isinstance(table.content, Path) and os.path.isfile(file):
            value = Path(file).read_bytes()
        if value is None:
            raise ValueError(f"row {row + k} of {table.where} has no image bytes")
        images.append(TableImage(value, file or ""))
    return images


def _holds_bytes(kind: "pyarrow.DataType") -> bool:
    """True for binary, and for the hub's structs of an image."""
    import pyarrow as pa

    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind = kind.field("bytes").type
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


# Their columns


def image_column(schema: "pyarrow.Schema", chosen: Columns, where: str) -> str:
    """The column of images: the chosen one, else img or image, else the only one that holds some."""
    features = _features(schema, where)
    found = [
        field.name
        for field in schema
        if _holds_bytes(field.type)
        and features.get(field.name, {}).get("_type", "Image") in ("Image", "Value")  # not sounds
    ]
    return chosen_column(schema.names, "image", chosen.image, IMAGE_COLUMNS, found, where)


def label_column(schema: "pyarrow.Schema", chosen: Columns, where: str) -> str:
    """The column of labels: the chosen one, else label or fine_label, else the only one with class names.

    Without class names the only one with a usual name, or the only one of numbers or words.
    """
    import pyarrow as pa

    types = pa.types
    is_label = (
        types.is_integer,
        types.is_string,
        types.is_large_string,
        types.is_dictionary,
        types.is_boolean,
    )
    features = _features(schema, where)
    found = [name for name in schema.names if features.get(name, {}).get("_type") == "ClassLabel"]
    found = found or [name for name in schema.names if name.lower() in OTHER_LABEL_COLUMNS]
    found = found or [field.name for field in schema if any(test(field.type) for test in is_label)]
    return chosen_column(schema.names, "label", chosen.label, LABEL_COLUMNS, found, where)


def chosen_column(
    names: Sequence[str], kind: str, chosen: str | None, usual: Sequence[str], found: list[str], where: str
) -> str:
    """The chosen column, else the first usual one that the table has, else the only one found."""
    if chosen and chosen not in names:
        raise ValueError(f"--{kind}_column {chosen}: {where} has only: {some_of(names)}")
    if known := chosen or next((name for name in usual if name in names), None):
        return known
    if len(found) == 1:
        return found[0]
    what = f"no column of {kind}s ({', '.join(usual)}), only: {some_of(names)}"
    what = f"several columns of {kind}s, {some_of(found)}" if found else what
    raise ValueError(f"{where} has {what}: choose one by --{kind}_column")


def _features(schema: "pyarrow.Schema", where: str) -> dict[str, dict[str, Any]]:
    """The `datasets` features of the columns, from the schema's metadata; empty without."""
    try:
        metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = (metadata.get("info") or {}).get("features") or {}
        features = {name: feature for name, feature in features.items() if isinstance(feature, dict)}
        names = [feature.get("names") or [] for feature in features.values()]
    except (ValueError, AttributeError, RecursionError):
        names = [None]
    if all(isinstance(some, list) and all(isinstance(name, str) for name in some) for some in names):
        return features
    raise ValueError(
        f"{where}: its huggingface metadata has no class names as `datasets` writes them, a list at"
        " info.features.<column>.names"
    )
