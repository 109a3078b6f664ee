"""Labels and encoded images from parquet and arrow files, such as the Hugging Face hub's, read by pyarrow.

`datasets` calls pyarrow, too. It takes 3 s to import, and takes `[`, `*` and `::` in the name of a folder for
patterns and URLs.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from common.data.encoded import save_images, save_labels
from common.data.source import Columns
from common.system.files import fits, parse_json
from common.system.text import some_of
from common.system.threads import Heartbeat

if TYPE_CHECKING:
    import pyarrow

# The first that is there, before others that hold images or labels
IMAGE_COLUMNS, LABEL_COLUMNS = ("img", "image"), ("label", "fine_label")
OTHER_LABEL_COLUMNS = ("labels", "class", "category", "target")
ROWS = 256  # read at a time
MIXED = "must be all numbers, or all names in columns without ClassLabel"


class Table(NamedTuple):
    """A parquet file, an arrow stream (.arrow), or rows that `datasets` has loaded."""

    where: str  # its name in messages
    content: "Path | pyarrow.Table"

    @contextmanager
    def open(self) -> "Iterator[tuple[pyarrow.Schema, Callable[[str], Iterator[pyarrow.Array]]]]":
        """Yields the schema and a function that reads a column, ROWS values at a time. Raises ValueError that
        names the table for anything that pyarrow can't read."""
        import pyarrow as pa
        import pyarrow.parquet

        rows = self.content
        try:
            if not isinstance(rows, Path):
                yield rows.schema, lambda name: (b.column(0) for b in rows.select([name]).to_batches(ROWS))
                return
            with open(rows, "rb") as stream:  # pyarrow takes no file name that is not UTF-8
                if rows.suffix == ".arrow":
                    yield pa.ipc.open_stream(stream).schema, partial(_stream_column, stream)
                    return
                file = pa.parquet.ParquetFile(stream)
                read = partial(file.iter_batches, ROWS)
                yield file.schema_arrow, lambda name: (b.column(0) for b in read(columns=[name]))
        except (pa.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"{self.where} cannot be read: {reason}. Is it complete? Fetch it again"
            ) from None
        except UnicodeDecodeError:
            raise ValueError(f"{self.where} has a name or label that is not UTF-8") from None


def _stream_column(stream: BinaryIO, name: str) -> "Iterator[pyarrow.Array]":
    import pyarrow as pa

    stream.seek(0)
    for batch in pa.ipc.open_stream(stream):
        yield batch.column(name)


class _Column(NamedTuple):
    """The labels of one split, as its files have them."""

    names: tuple[str, ...] | None  # of the classes, where the files have them
    values: "pyarrow.ChunkedArray"  # int64 or string [N]
    rows: list[tuple[str, int]]  # of each table


def write_tables(
    splits: dict[str, list[Table]], columns: Columns, folder: Path, beat: Heartbeat
) -> tuple[str, ...]:
    """Stores labels and encoded images of the splits in a cache folder. Returns the class names.

    All labels are checked before an image is read. Memory: one row group and the labels.
    """
    classes, labels = read_labels(splits, columns, beat)
    for split, tables in splits.items():
        save_labels(folder, split, labels[split].numbers)
        save_images(folder, split, read_images(tables, columns, beat), parts=labels[split].rows)
    return classes


class Labels(NamedTuple):
    """The labels of one split."""

    numbers: np.ndarray  # int64 [N]
    rows: list[tuple[str, int]]  # of each table


def read_labels(
    splits: dict[str, list[Table]], chosen: Columns, beat: Heartbeat
) -> tuple[tuple[str, ...], dict[str, Labels]]:
    """The class names, and the labels of each split. Raises ValueError for a label without a class."""
    columns = {split: _read_column(split, tables, chosen, beat) for split, tables in splits.items()}
    classes, numbers = _number_labels(columns)
    for split, tables in splits.items():
        wrong = np.flatnonzero((numbers[split] < 0) | (numbers[split] >= len(classes)))
        if len(wrong):
            raise ValueError(
                f"label {numbers[split][wrong[0]]} in row {wrong[0]} of the {split} split"
                f" ({tables[0].where}) is out of range: there are {len(classes)} classes"
                f" ({len(wrong):,} such rows)"
            )
    return classes, {split: Labels(numbers[split], columns[split].rows) for split in splits}


def _read_column(split: str, tables: list[Table], chosen: Columns, beat: Heartbeat) -> _Column:
    import pyarrow as pa

    names, columns = [], []
    for table in tables:
        with table.open() as (schema, read):
            name = label_column(schema, chosen, table.where)
            names.append(_class_names(schema, name, table.where))
            column = pa.chunked_array(read(name), schema.field(name).type)
            columns.append(_numbers_or_names(column, table.where))
        if names[-1] != names[0]:
            raise ValueError(f"{table.where} has other class names than {tables[0].where}")
        beat()
    chunks = [chunk for column in columns for chunk in column.chunks if len(chunk)]
    if not chunks:
        raise ValueError(f"no images in the {split} split: {some_of([table.where for table in tables])}")
    if len({chunk.type for chunk in chunks}) > 1:
        raise ValueError(f"labels of the {split} split ({tables[0].where}) {MIXED}")
    rows = [(table.where, len(column)) for table, column in zip(tables, columns, strict=True)]
    return _Column(names[0], pa.chunked_array(chunks), rows)


def _numbers_or_names(labels: "pyarrow.ChunkedArray", where: str) -> "pyarrow.ChunkedArray":
    """Labels as int64 or string. Raises ValueError for other types, and where one is missing."""
    import pyarrow as pa

    if not len(labels):
        return labels
    if labels.null_count:
        raise ValueError(f"row {labels.is_null().index(True)} of {where} has no label")
    if pa.types.is_dictionary(labels.type):
        labels = labels.cast(labels.type.value_type)
    if pa.types.is_integer(labels.type):
        return labels.cast(pa.int64())
    if not (pa.types.is_string(labels.type) or pa.types.is_large_string(labels.type)):
        raise ValueError(f"the labels of {where} are {labels.type}, neither numbers nor names")
    labels.unique().to_pylist()  # UnicodeDecodeError where one is not UTF-8
    return labels.cast(pa.string())


def _number_labels(labels: dict[str, _Column]) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
    """The class names, and each split's labels as int64 [N]. Without names in the files the classes are the
    distinct labels, sorted."""
    import pyarrow as pa
    import pyarrow.compute

    values = {split: found.values for split, found in labels.items()}
    kinds, names = {column.type for column in values.values()}, labels["train"].names
    if len(kinds) > 1 or (names is not None and pa.string() in kinds):
        raise ValueError(f"labels {MIXED}")
    classes = {
        split: found.names or tuple(sorted(found.values.unique().to_pylist()))
        for split, found in labels.items()
    }
    train = classes["train"]
    val = classes.get("val", train)
    if train != val:
        raise ValueError(
            f"the classes of the two splits differ:{only_in('train', set(train) - set(val))}"
            f"{only_in('val', set(val) - set(train))} In order, train has {some_of(train)}, val"
            f" {some_of(val)}"
        )
    if names is None:
        known = pa.array(train, *kinds)
        values = {split: pa.compute.index_in(column, known) for split, column in values.items()}
    return tuple(map(str, train)), {split: np.asarray(column, np.int64) for split, column in values.items()}


def read_images(tables: list[Table], chosen: Columns, beat: Heartbeat) -> Iterator[bytes]:
    """The values of a column of the hub's Image structs, or of plain binary."""
    for table in tables:
        with table.open() as (schema, read):
            row = 0
            for column in read(image_column(schema, chosen, table.where)):
                yield from _image_bytes(column, table, row)
                row += len(column)
                beat()


def _image_bytes(column: "pyarrow.Array", table: Table, row: int) -> list[bytes]:
    """The bytes of consecutive images. row: the first one's.

    Rows that `datasets` has loaded may have the path of a file in its cache instead.
    """
    import pyarrow as pa
    import pyarrow.compute

    files = [None] * len(column)
    if pa.types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0:
        if not isinstance(table.content, Path) and column.type.get_field_index("path") >= 0:
            files = pa.compute.struct_field(column, "path").to_pylist()
        column = pa.compute.struct_field(column, "bytes")
    if not _is_binary(column.type):
        raise ValueError(f"{table.where}: its image column holds {column.type}, not image bytes")
    images = column.to_pylist()
    for k, (data, file) in enumerate(zip(images, files, strict=True)):
        if data is None and file and os.path.isfile(file):
            images[k] = Path(file).read_bytes()
        elif data is None:
            raise ValueError(f"row {row + k} of {table.where} has no image bytes")
    return images


def _is_binary(kind: "pyarrow.DataType") -> bool:
    import pyarrow as pa

    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def image_column(schema: "pyarrow.Schema", chosen: Columns, where: str) -> str:
    """The column of images: the chosen one, else img or image, else the only one that holds some."""
    import pyarrow as pa

    if chosen.image:
        return _known(schema, chosen.image, "image", where)
    features, found = _features(schema, where), []
    for field in schema:
        kind = field.type
        if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
            kind = kind.field("bytes").type
        is_other = features.get(field.name, {}).get("_type", "Image") not in ("Image", "Value")  # as sounds
        if _is_binary(kind) and not is_other:
            found.append(field.name)
    return _choice(schema, "image", IMAGE_COLUMNS, found, where)


def label_column(schema: "pyarrow.Schema", chosen: Columns, where: str) -> str:
    """The column of labels: the chosen one, else label or fine_label, else the only one with class names.

    Without class names the only one with a usual name, or the only one of numbers or words.
    """
    import pyarrow as pa

    if chosen.label:
        return _known(schema, chosen.label, "label", where)
    features = _features(schema, where)
    found = [name for name in schema.names if features.get(name, {}).get("_type") == "ClassLabel"]
    found = found or [name for name in schema.names if name.lower() in OTHER_LABEL_COLUMNS]
    found = found or [
        field.name
        for field in schema
        if pa.types.is_integer(field.type)
        or pa.types.is_string(field.type)
        or pa.types.is_large_string(field.type)
        or pa.types.is_dictionary(field.type)
    ]
    return _choice(schema, "label", LABEL_COLUMNS, found, where)


def _choice(schema: "pyarrow.Schema", kind: str, names: tuple[str, ...], found: list[str], where: str) -> str:
    """The first of these names that the table has, else the only one found. Raises ValueError without."""
    if known := [name for name in names if name in schema.names]:
        return known[0]
    if len(found) == 1:
        return found[0]
    what = (
        f"several columns of {kind}s, {some_of(found)}"
        if found
        else f"no column of {kind}s, only: {some_of(schema.names)}"
    )
    raise ValueError(f"{where} has {what}: choose one by --{kind}_column")


def _known(schema: "pyarrow.Schema", name: str, kind: str, where: str) -> str:
    if name not in schema.names:
        raise ValueError(f"--{kind}_column {name}: {where} has only: {some_of(schema.names)}")
    return name


def _features(schema: "pyarrow.Schema", where: str) -> dict[str, dict[str, Any]]:
    """The `datasets` features of the columns, from the schema's metadata; empty without."""
    metadata = f"{where}: its huggingface metadata"
    about = parse_json((schema.metadata or {}).get(b"huggingface", b"{}"), metadata)
    for key in ("info", "features"):
        about = about.get(key) or {}
        if not isinstance(about, dict):
            raise ValueError(f"{metadata} has no class names as `datasets` writes them: {key} is no object")
    return {name: feature for name, feature in about.items() if isinstance(feature, dict)}


def _class_names(schema: "pyarrow.Schema", label: str, where: str) -> tuple[str, ...] | None:
    """The names of a `datasets.ClassLabel` column, from the schema's metadata; None without."""
    names = _features(schema, where).get(label, {}).get("names") or []
    if not fits(names, list[str]):
        raise ValueError(
            f"{where}: its huggingface metadata has no class names as `datasets` writes them, a list at"
            f" info.features.{label}"
        )
    return tuple(names) or None


def only_in(split: str, classes: set) -> str:
    """A sentence that names the classes which only this split has; empty without any."""
    return f" only in {split}: {some_of(sorted(classes))}." if classes else ""
