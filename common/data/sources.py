"""The kinds of `--data`: what each consists of, and how its images and labels get into a cache folder.

`find_source` looks and lists, nothing more; `Source.write` reads; `common/data/cache.py` decodes and caches.
"""

import difflib
import json
import os
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from common.data import shards
from common.data.decode import SPLITS
from common.system.cli import expand_home
from common.system.files import parse_json
from common.system.s3 import ObjectStore
from common.system.text import printable
from common.system.threads import Heartbeat, run_with_heartbeat

KNOWN = ("digits", "cifar10", "synthetic")
EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
VAL_NAMES = {"val": "val", "validation": "val", "test": "test"}  # the first that exists; what it is called
IMAGE_COLUMNS, LABEL_COLUMNS = ("img", "image"), ("label", "fine_label")


@dataclass(frozen=True)
class Source:
    """What `--data` names. write(folder, beat) stores both splits in a folder and returns the class names:
    `<split>_labels.npy` int64 [N], and `<split>_images.npy` or what `common.data.decode.Encoded` reads."""

    name: str
    files: tuple[tuple[str, Path], ...]  # (name that goes into the key, file), sorted; () for generated data
    write: Callable[[Path, Heartbeat], tuple[str, ...]]
    val_name: str = "val"
    mirror: bool = True
    root: Path | None = None  # where the image files are, when they are stored as paths
    shards: str | None = None  # where they are, when there are some: a folder, or s3://bucket/prefix
    marks: tuple[str, ...] = ()  # of the content, beside the files


def find_source(data: str, beat: Heartbeat, show_progress: bool, data_root: tuple[str, ...] = ()) -> Source:
    """data_root: where the files of an index may lie. Raises ValueError when there is nothing that can be
    trained on, before much is read."""
    if data == "digits":
        return Source(data, (), _write_digits, mirror=False)  # a mirrored 2 is no 2
    if data == "synthetic":
        return Source(data, (), _write_synthetic)
    if data == "cifar10":
        return _find_on_hub(data, "uoft-cs/cifar10", beat, show_progress)
    if str(data).startswith("s3://"):
        return run_with_heartbeat(lambda: _find_stored_shards(ObjectStore(data)), beat)
    # Links are not followed: hosts that keep the data in different places can give it one name.
    root = Path(os.path.abspath(expand_home(data, "give --data as an absolute path")))
    if not root.is_dir():
        what = "is a file, not a folder" if root.exists() else "does not exist"
        near = difflib.get_close_matches(data, KNOWN, n=1)
        meant = f"did you mean {near[0]}?" if near else f"give a folder or one of: {', '.join(KNOWN)}"
        raise ValueError(f"--data {data}: {what}; {meant}")
    return run_with_heartbeat(
        lambda: _find_shards(root, data_root) or _find_parquet(root) or _find_class_folders(root), beat
    )


def _write_digits(folder: Path, beat: Heartbeat) -> tuple[str, ...]:
    """scikit-learn's 1,797 digits of 8x8 (values 0 to 16) as uint8 32x32; 36 of each class are held out.

    RandomState, whose stream numpy keeps fixed (NEP 19), makes the hold-out the same on every machine.
    """

    def load():
        from PIL import Image
        from sklearn.datasets import load_digits

        digits = load_digits()
        small = np.round(digits.images * (255 / 16)).astype(np.uint8)
        large = [np.asarray(Image.fromarray(x).resize((32, 32), Image.Resampling.BILINEAR)) for x in small]
        return np.repeat(np.stack(large)[..., None], 3, axis=3), digits.target

    images, labels = run_with_heartbeat(load, beat)
    shuffled = np.random.RandomState(0).permutation(len(labels))
    val = np.sort(np.concatenate([shuffled[labels[shuffled] == c][:36] for c in range(10)]))
    train = np.setdiff1d(np.arange(len(labels)), val)
    for split, ids in zip(SPLITS, (train, val), strict=True):
        np.save(folder / f"{split}_images.npy", images[ids])
        _save_labels(folder, split, labels[ids])
    return tuple("0123456789")


def _write_synthetic(folder: Path, beat: Heartbeat) -> tuple[str, ...]:
    """4,096 + 1,024 images of 32x32: one of ten fixed patterns of 4x4 coloured squares, under noise."""
    generator = np.random.RandomState(0)
    patterns = generator.randint(64, 192, (10, 4, 4, 3)).repeat(8, axis=1).repeat(8, axis=2)
    for split, count in zip(SPLITS, (4096, 1024), strict=True):
        labels = generator.permutation(count) % 10
        noise = generator.normal(0, 64, (count, 32, 32, 3))
        images = np.clip(np.rint(patterns[labels] + noise), 0, 255).astype(np.uint8)
        np.save(folder / f"{split}_images.npy", images)
        _save_labels(folder, split, labels)
        beat()
    return tuple(f"pattern {c}" for c in range(10))


def _save_labels(folder: Path, split: str, labels) -> None:
    np.save(folder / f"{split}_labels.npy", np.asarray(labels, np.int64))


def _save_items(
    folder: Path, split: str, items: Iterable[bytes], root: Path | None = None, parts: list | None = None
) -> None:
    """Image bytes or paths, one after another in a file, for `decode.Encoded`. Memory: the offsets."""
    offsets = array("q", [0])
    with open(folder / f"{split}_items.bin", "wb") as out:
        for item in items:
            out.write(item)
            offsets.append(offsets[-1] + len(item))
    np.save(folder / f"{split}_offsets.npy", np.asarray(offsets))
    about = {"root": None if root is None else str(root), "parts": parts}
    (folder / f"{split}_items.json").write_text(json.dumps(about))


def _find_shards(root: Path, data_root: tuple[str, ...]) -> Source | None:
    """What prep_imagenet.py made in a folder; the shards stay where they are."""
    manifest = shards.find_local(root, data_root)
    if manifest is None:
        return None
    return _source_of_shards(manifest, str(root), lambda name: (root / name).read_bytes())


def _find_stored_shards(store: ObjectStore) -> Source:
    """The same below a prefix in S3; the shards are fetched as they are needed."""
    manifest, content = shards.find_stored(store)

    def read(name: str) -> bytes:
        found = content if name == shards.MANIFEST else store.read(name, shards.INDEX_LIMIT)
        if found is None:
            raise ValueError(f"{store.url}/{name} is not there: prepare again")
        return found

    return _source_of_shards(manifest, store.url, read)


def _source_of_shards(manifest: shards.Manifest, place: str, read: Callable[[str], bytes]) -> Source:
    """read(name): a file beside the shards."""

    def write(folder: Path, beat: Heartbeat) -> tuple[str, ...]:
        (folder / shards.MANIFEST).write_bytes(read(shards.MANIFEST))
        for split in SPLITS:
            name = shards.index_name(split)
            content = run_with_heartbeat(partial(read, name), beat)
            rows = shards.parse_index(content, manifest, split, f"{place}/{name}")
            (folder / name).write_bytes(content)
            _save_labels(folder, split, rows[:, 3])
            beat()
        return manifest.classes

    return Source(manifest.name, (), write, shards=place, marks=(manifest.sha256,))


def _find_class_folders(root: Path) -> Source:
    """`train/<class>/*` and `val/<class>/*` (or validation, test)."""
    val_name = next((name for name in VAL_NAMES if (root / name).is_dir()), None)
    if not (root / "train").is_dir():
        tars = next(root.glob("*.tar"), None)
        raise ValueError(
            f"--data {root}: neither parquet files (train-*.parquet, test-*.parquet)"
            " nor class folders (train/<class>/*.jpg, val/<class>/*.jpg) are there"
            + (f"; {tars.name} is for prep_imagenet.py, and --data what that makes of it" if tars else "")
        )
    if val_name is None:
        raise ValueError(f"--data {root}: there is train/ but no val/ or test/ beside it to evaluate on")
    listing = {name: _list_classes(root / name) for name in ("train", val_name)}
    train, val = (set(classes) for classes in listing.values())
    if train != val:
        raise ValueError(
            f"--data {root}: the class folders of train/ and {val_name}/ differ:"
            + _only_in("train", train - val)
            + _only_in(val_name, val - train)
        )
    classes = sorted(train)
    names = {
        split: [(c, f"{name}/{c}/{file}") for c in classes for file in listing[name][c]]
        for split, name in zip(SPLITS, listing, strict=True)
    }

    def write(folder: Path, beat: Heartbeat) -> tuple[str, ...]:
        number = {c: k for k, c in enumerate(classes)}
        for split in SPLITS:
            _save_items(folder, split, (os.fsencode(path) for _, path in names[split]), root)
            _save_labels(folder, split, [number[c] for c, _ in names[split]])
            beat()
        return tuple(classes)

    files = tuple((path, root / path) for split in SPLITS for _, path in names[split])
    return Source(root.name, files, write, VAL_NAMES[val_name], root=root)


def _list_classes(folder: Path) -> dict[str, list[str]]:
    """{class: sorted names of its images}; hidden files, and what has another extension, are passed over."""
    with os.scandir(folder) as entries:
        classes = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    if not classes:
        raise ValueError(f"{folder} has no class folders: each class's images belong in a folder of its own")
    found = {}
    for name in classes:
        with os.scandir(folder / name) as entries:
            found[name] = sorted(e.name for e in entries if _is_image(e))
    empty = [str(folder / name) for name, images in found.items() if not images]
    if empty:
        raise ValueError(f"no images ({' '.join(EXTENSIONS)}) in {_first(empty)}: fill or remove the folder")
    return found


def _is_image(entry: os.DirEntry) -> bool:
    name = entry.name
    return not name.startswith(".") and name.lower().endswith(EXTENSIONS) and entry.is_file()


def _only_in(name: str, classes: set) -> str:
    return f" only in {name}: {_first(sorted(classes))}." if classes else ""


def _first(names: Sequence, count: int = 10) -> str:
    rest = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(map(printable, names[:count])) + rest


def _find_parquet(root: Path) -> Source | None:
    """The hub's files, in the folder or one deeper: train-*.parquet and val-*, validation-* or test-*."""
    folders = [f for f in (root, *sorted(root.iterdir())) if f.is_dir() and _split_files(f, "train")]
    if not folders:
        return None
    if len(folders) > 1 and folders[0] != root:
        names = [f.name for f in folders]
        raise ValueError(f"--data {root}: more than one data set there ({_first(names)}): name one of them")
    folder = folders[0]
    val_name = next((name for name in VAL_NAMES if _split_files(folder, name)), None)
    if val_name is None:
        raise ValueError(f"--data {root}: no val-, validation- or test-*.parquet beside train-*.parquet")
    splits = {"train": _split_files(folder, "train"), "val": _split_files(folder, val_name)}

    def write(out: Path, beat: Heartbeat) -> tuple[str, ...]:
        return _write_tables({s: [(str(f), f) for f in splits[s]] for s in SPLITS}, out, beat)

    files = tuple((f.name, f) for split in SPLITS for f in splits[split])
    return Source(root.name, files, write, VAL_NAMES[val_name])


def _split_files(folder: Path, split: str) -> list[Path]:
    return sorted(f for f in folder.iterdir() if re.fullmatch(rf"{split}([-.].*)?\.parquet", f.name))


def _find_on_hub(name: str, repository: str, beat: Heartbeat, show_progress: bool) -> Source:
    """A data set of the Hugging Face hub; `datasets` downloads it once, and takes its own copy afterwards."""

    def load():
        import datasets

        if not show_progress:
            datasets.disable_progress_bars()
        return datasets.load_dataset(repository)

    try:
        splits = run_with_heartbeat(load, beat)
    except Exception as error:  # no network, no room, a hub that says no: too many classes to list
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"--data {name}: {repository} could not be loaded from the hub ({reason}). Without network use"
            f" local files: --data FOLDER with the hub's train-*.parquet and test-*.parquet"
        ) from error
    tables = {"train": splits["train"], "val": splits["test"]}
    files = tuple(
        (f"{split} {k}", Path(file["filename"]))
        for split, table in tables.items()
        for k, file in enumerate(table.cache_files)
    )

    def write(out: Path, beat: Heartbeat) -> tuple[str, ...]:
        return _write_tables({s: [(f"{name}'s {s} split", tables[s].data.table)] for s in SPLITS}, out, beat)

    return Source(name, files, write, "test")


# What messages call it, and its file or its rows (pyarrow.Table).
Table = tuple[str, Any]


def _write_tables(splits: dict[str, list[Table]], out: Path, beat: Heartbeat) -> tuple[str, ...]:
    """Stores the labels, once they are found right, and then the image bytes; memory: one row group and the
    labels."""
    names, labels, parts = {}, {}, {}
    for split, tables in splits.items():
        names[split], labels[split], parts[split] = _read_labels(tables, beat)
        if not labels[split]:
            raise ValueError(f"no images in the {split} split: {_first([where for where, _ in tables])}")
    classes, numbers = _number_labels(names, labels)
    for split, tables in splits.items():
        found = np.asarray(numbers[split])
        wrong = np.flatnonzero((found < 0) | (found >= len(classes)))
        if len(wrong):
            raise ValueError(
                f"label {found[wrong[0]]} in row {wrong[0]} of the {split} split ({tables[0][0]}) is out of"
                f" range: there are {len(classes)} classes ({len(wrong):,} such rows)"
            )
        _save_labels(out, split, found)
        _save_items(out, split, _read_images(tables, beat), parts=parts[split])
    return classes


def _read_labels(tables: list[Table], beat: Heartbeat) -> tuple[tuple[str, ...] | None, list, list]:
    """Class names (None without), all labels, and [(table, rows)]."""
    names, labels, parts = [], [], []
    for where, table in tables:
        with _open_table(where, table) as (schema, read):
            label = _column(schema, LABEL_COLUMNS, where)
            names.append(_class_names(schema, label, where))
            found = []
            for column in read(label):
                found += _labels(column, where, len(found))
                beat()
        if names[-1] != names[0]:
            raise ValueError(f"{where} has other class names than {tables[0][0]}")
        labels += found
        parts.append((where, len(found)))
    return names[0], labels, parts


def _read_images(tables: list[Table], beat: Heartbeat) -> Iterator[bytes]:
    for where, table in tables:
        with _open_table(where, table) as (schema, read):
            rows = 0
            for column in read(_column(schema, IMAGE_COLUMNS, where)):
                yield from _encoded(column, where, rows)
                rows += len(column)
                beat()


@contextmanager
def _open_table(where: str, table) -> Iterator[tuple]:
    """Its Arrow schema, and a function from a column's name to its values, some 256 rows at a time."""
    import pyarrow.parquet

    try:
        if isinstance(table, Path):
            file = pyarrow.parquet.ParquetFile(table)
            schema, read = file.schema_arrow, lambda name: file.iter_batches(256, columns=[name])
        else:
            schema, read = table.schema, lambda name: table.select([name]).to_batches(256)
        yield schema, lambda name: (batch.column(0) for batch in read(name))
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{where} cannot be read: {reason}. Is it complete? Fetch it again") from None
    except UnicodeDecodeError:
        raise ValueError(f"{where} has a name or label that is not UTF-8") from None


def _number_labels(names: dict, labels: dict[str, list]) -> tuple[tuple[str, ...], dict[str, list[int]]]:
    """The class names, and the labels as numbers. Without names in the files the classes are the distinct
    labels, sorted."""
    kinds = {type(label) for found in labels.values() for label in found}
    if len(kinds) > 1 or (names["train"] is not None and str in kinds):
        raise ValueError("labels must be all numbers, or all names in columns without ClassLabel")
    train, val = (names[split] or tuple(sorted(set(labels[split]))) for split in SPLITS)
    if train != val:
        raise ValueError(
            f"the classes of the two splits differ:{_only_in('train', set(train) - set(val))}"
            f"{_only_in('val', set(val) - set(train))} In order, train has {_first(train)}; val {_first(val)}"
        )
    if names["train"] is None:
        number = {label: k for k, label in enumerate(train)}
        labels = {split: [number[label] for label in found] for split, found in labels.items()}
    return tuple(map(str, train)), labels


def _column(schema, candidates: tuple[str, ...], where: str) -> str:
    for name in candidates:
        if name in schema.names:
            return name
    wanted = " or ".join(candidates)
    raise ValueError(f"{where} has no column {wanted}, only: {_first(schema.names)}")


def _class_names(schema, label: str, where: str) -> tuple[str, ...] | None:
    """The names of a `datasets.ClassLabel` column, kept in the schema's metadata; None without."""
    about = parse_json(
        (schema.metadata or {}).get(b"huggingface", b"{}"), f"{where}: its huggingface metadata"
    )
    for key in ("info", "features", label):
        about = about.get(key) or {}
        if not isinstance(about, dict):
            raise ValueError(f"{where}: its huggingface metadata has no object as {printable(key)}")
    names = about.get("names")
    if names is None:
        return None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{where}: its huggingface metadata has no list of class names")
    return tuple(names)


def _encoded(column, where: str, first: int) -> list[bytes]:
    """The bytes of a column of datasets' Image structs, or of plain binary."""
    import pyarrow.compute

    if pyarrow.types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0:
        column = pyarrow.compute.struct_field(column, "bytes")
    if not (pyarrow.types.is_binary(column.type) or pyarrow.types.is_large_binary(column.type)):
        raise ValueError(f"{where}: its image column holds {column.type}, not image bytes")
    images = column.to_pylist()
    if None in images:
        raise ValueError(f"row {first + images.index(None)} of {where} has no image bytes")
    return images


def _labels(column, where: str, first: int) -> list:
    labels = column.to_pylist()
    for k, label in enumerate(labels):
        if not isinstance(label, int | str) or isinstance(label, bool):
            what = f"the label {printable(label)[:40]}, neither a number nor a name"
            raise ValueError(f"row {first + k} of {where} has {what}")
    return labels
