"""Labels and encoded images from parquet files, such as the Hugging Face hub's, read by pyarrow.

`datasets` calls pyarrow, too. It takes 3 s to import, and takes `[`, `*` and `::` in the name of a folder for
patterns and URLs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from common.data.encoded import save_images, save_labels
from common.system.files import parse_json
from common.system.schema import fits
from common.system.text import some_of
from common.system.threads import Heartbeat

if TYPE_CHECKING:
    import pyarrow

IMAGE_COLUMNS, LABEL_COLUMNS = ("img", "image"), ("label", "fine_label")
ROWS = 256  # read at a time
MIXED = "must be all numbers, or all names in columns without ClassLabel"


class Table(NamedTuple):
    """A parquet file, or rows that `datasets` has loaded."""

    where: str  # its name in messages
    content: "Path | pyarrow.Table"

    @contextmanager
    def open(self) -> "Iterator[tuple[pyarrow.Schema, Callable[[str], Iterator[pyarrow.Array]]]]":
        """Yields the schema and a function that reads a column, ROWS values at a time. Raises ValueError that
        names the table for anything that pyarrow can't read."""
        import pyarrow.parquet

        rows = self.content
        try:
            if not isinstance(rows, Path):
                yield rows.schema, lambda name: (b.column(0) for b in rows.select([name]).to_batches(ROWS))
                return
            with open(rows, "rb") as stream:  # pyarrow takes no file name that is not UTF-8
                file = pyarrow.parquet.ParquetFile(stream)
                read = partial(file.iter_batches, ROWS)
                yield file.schema_arrow, lambda name: (b.column(0) for b in read(columns=[name]))
        except (pyarrow.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"{self.where} cannot be read: {reason}. Is it complete? Fetch it again"
            ) from None
        except UnicodeDecodeError:
            raise ValueError(f"{self.where} has a name or label that is not UTF-8") from None


class Labels(NamedTuple):
    """The labels of one split."""

    names: tuple[str, ...] | None  # of the classes, where the files have them
    values: "pyarrow.ChunkedArray"  # int64 or string [N]
    rows: list[tuple[str, int]]  # of each table


def write_tables(splits: dict[str, list[Table]], folder: Path, beat: Heartbeat) -> tuple[str, ...]:
    """Stores labels and encoded images of both splits in a cache folder. Returns the class names.

    All labels are checked before an image is read. Memory: one row group and the labels.
    """
    labels = {split: _read_labels(split, tables, beat) for split, tables in splits.items()}
    classes, numbers = _number_labels(labels)
    for split, tables in splits.items():
        wrong = np.flatnonzero((numbers[split] < 0) | (numbers[split] >= len(classes)))
        if len(wrong):
            raise ValueError(
                f"label {numbers[split][wrong[0]]} in row {wrong[0]} of the {split} split"
                f" ({tables[0].where}) is out of range: there are {len(classes)} classes"
                f" ({len(wrong):,} such rows)"
            )
        save_labels(folder, split, numbers[split])
        save_images(folder, split, _read_images(tables, beat), parts=labels[split].rows)
    return classes


def _read_labels(split: str, tables: list[Table], beat: Heartbeat) -> Labels:
    import pyarrow as pa

    names, columns = [], []
    for table in tables:
        with table.open() as (schema, read):
            name = _column(schema, LABEL_COLUMNS, table.where)
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
    return Labels(names[0], pa.chunked_array(chunks), rows)


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


def _number_labels(labels: dict[str, Labels]) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
    """The class names, and each split's labels as int64 [N]. Without names in the files the classes are the
    distinct labels, sorted."""
    import pyarrow as pa
    import pyarrow.compute

    values = {split: found.values for split, found in labels.items()}
    kinds, names = {column.type for column in values.values()}, labels["train"].names
    if len(kinds) > 1 or (names is not None and pa.string() in kinds):
        raise ValueError(f"labels {MIXED}")
    train, val = (
        found.names or tuple(sorted(found.values.unique().to_pylist())) for found in labels.values()
    )
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


def _read_images(tables: list[Table], beat: Heartbeat) -> Iterator[bytes]:
    """The values of a column of the hub's Image structs, or of plain binary."""
    import pyarrow as pa
    import pyarrow.compute

    for table in tables:
        with table.open() as (schema, read):
            row = 0
            for column in read(_column(schema, IMAGE_COLUMNS, table.where)):
                if pa.types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0:
                    column = pa.compute.struct_field(column, "bytes")
                if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
                    raise ValueError(f"{table.where}: its image column holds {column.type}, not image bytes")
                if column.null_count:
                    row += column.is_null().index(True).as_py()
                    raise ValueError(f"row {row} of {table.where} has no image bytes")
                yield from column.to_pylist()
                row += len(column)
                beat()


def _column(schema: "pyarrow.Schema", candidates: tuple[str, ...], where: str) -> str:
    for name in candidates:
        if name in schema.names:
            return name
    wanted = " or ".join(candidates)
    raise ValueError(f"{where} has no column {wanted}, only: {some_of(schema.names)}")


def _class_names(schema: "pyarrow.Schema", label: str, where: str) -> tuple[str, ...] | None:
    """The names of a `datasets.ClassLabel` column, from the schema's metadata; None without."""
    metadata = f"{where}: its huggingface metadata"
    about = parse_json((schema.metadata or {}).get(b"huggingface", b"{}"), metadata)
    if not fits(about, {"info": {"features": {label: {"names": list[str]}}}}):
        raise ValueError(
            f"{metadata} has no class names as `datasets` writes them, a list at info.features.{label}"
        )
    for key in ("info", "features", label):
        about = about.get(key) or {}
    return tuple(about["names"]) if about.get("names") else None


def only_in(split: str, classes: set) -> str:
    """A sentence that names the classes which only this split has; empty without any."""
    return f" only in {split}: {some_of(sorted(classes))}." if classes else ""
