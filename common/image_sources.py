"""The kinds of `--data`: what each consists of, and how its images and labels get into a cache folder.

`find_source` looks and lists, nothing more; `Source.write` reads. `common/images.py` makes a cache of it.
"""

import json
import os
import re
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.decode import SPLITS

Beat = Callable[[], None]

GENERATED = ("digits", "synthetic")
KNOWN = ("digits", "cifar10", "synthetic")
EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
VAL_NAMES = ("val", "validation", "test")  # the first that exists is taken
IMAGE_COLUMNS, LABEL_COLUMNS = ("img", "image"), ("label", "fine_label")


@dataclass(frozen=True)
class Source:
    """What `--data` names. write(folder, beat) stores both splits in a folder and returns the class names:
    `<split>_labels.npy` int64 [N], and `<split>_images.npy` or what `common.decode.Encoded` reads."""

    name: str
    files: tuple[tuple[str, Path], ...]  # (name that goes into the key, file), sorted; () for generated data
    write: Callable[[Path, Beat], tuple[str, ...]]
    val_name: str = "val"
    mirror: bool = True
    root: Path | None = None  # where the image files are, when they are stored as paths


def find_source(data: str, beat: Beat, show_progress: bool) -> Source:
    """Raises ValueError when there is nothing that can be trained on, before much is read."""
    if data == "digits":
        return Source(data, (), _write_digits, mirror=False)  # a mirrored 2 is no 2
    if data == "synthetic":
        return Source(data, (), _write_synthetic)
    if data == "cifar10":
        return _find_on_hub(data, "uoft-cs/cifar10", beat, show_progress)
    root = Path(data).expanduser()
    if not root.is_dir():
        what = "is a file, not a folder" if root.exists() else "does not exist"
        raise ValueError(f"--data {data}: {what}. Give a folder or one of: {', '.join(KNOWN)}")
    return waiting(beat, lambda: _find_parquet(root) or _find_class_folders(root))


def waiting(beat: Beat, work: Callable):
    """work() in a thread of its own, with beat() every half second. Its result, or its exception."""
    outcome: dict = {}

    def run() -> None:
        try:
            outcome["result"] = work()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.5)
        beat()
    if "error" in outcome:
        raise outcome["error"]
    return outcome["result"]


def _write_digits(folder: Path, beat: Beat) -> tuple[str, ...]:
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

    images, labels = waiting(beat, load)
    shuffled = np.random.RandomState(0).permutation(len(labels))
    val = np.sort(np.concatenate([shuffled[labels[shuffled] == c][:36] for c in range(10)]))
    train = np.setdiff1d(np.arange(len(labels)), val)
    for split, ids in zip(SPLITS, (train, val), strict=True):
        np.save(folder / f"{split}_images.npy", images[ids])
        _save_labels(folder, split, labels[ids])
    return tuple("0123456789")


def _write_synthetic(folder: Path, beat: Beat) -> tuple[str, ...]:
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
    """Image bytes or paths, one after another in a file, for `common.decode.Encoded`. Memory: the offsets."""
    offsets = array("q", [0])
    with open(folder / f"{split}_items.bin", "wb") as out:
        for item in items:
            out.write(item)
            offsets.append(offsets[-1] + len(item))
    np.save(folder / f"{split}_offsets.npy", np.asarray(offsets))
    about = {"root": None if root is None else str(root), "parts": parts}
    (folder / f"{split}_items.json").write_text(json.dumps(about))


def _find_class_folders(root: Path) -> Source:
    """`train/<class>/*` and `val/<class>/*` (or validation, test)."""
    val_name = next((name for name in VAL_NAMES if (root / name).is_dir()), None)
    if not (root / "train").is_dir():
        raise ValueError(
            f"--data {root}: neither parquet files (train-*.parquet, test-*.parquet)"
            " nor class folders (train/<class>/*.jpg, val/<class>/*.jpg) are there"
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

    def write(folder: Path, beat: Beat) -> tuple[str, ...]:
        number = {c: k for k, c in enumerate(classes)}
        for split in SPLITS:
            _save_items(folder, split, (os.fsencode(path) for _, path in names[split]), root.resolve())
            _save_labels(folder, split, [number[c] for c, _ in names[split]])
            beat()
        return tuple(classes)

    files = tuple((path, root / path) for split in SPLITS for _, path in names[split])
    return Source(
        root.resolve().name, files, write, "test" if val_name == "test" else "val", root=root.resolve()
    )


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


def _only_in(name: str, classes: set[str]) -> str:
    return f" only in {name}: {_first(sorted(classes))}." if classes else ""


def _first(names: list[str], count: int = 10) -> str:
    rest = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + rest


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

    def write(out: Path, beat: Beat) -> tuple[str, ...]:
        return _write_tables({s: [(str(f), _read_parquet(f)) for f in splits[s]] for s in SPLITS}, out, beat)

    files = tuple((f.name, f) for split in SPLITS for f in splits[split])
    return Source(root.resolve().name, files, write, "test" if val_name == "test" else "val")


def _split_files(folder: Path, split: str) -> list[Path]:
    return sorted(f for f in folder.iterdir() if re.fullmatch(rf"{split}([-.].*)?\.parquet", f.name))


def _find_on_hub(name: str, repository: str, beat: Beat, show_progress: bool) -> Source:
    """A data set of the Hugging Face hub; `datasets` downloads it once, and takes its own copy afterwards."""

    def load():
        import datasets

        if not show_progress:
            datasets.disable_progress_bars()
        return datasets.load_dataset(repository)

    try:
        splits = waiting(beat, load)
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

    def write(out: Path, beat: Beat) -> tuple[str, ...]:
        parts = {s: [(f"{name}'s {s} split", _read_arrow(tables[s].data.table))] for s in SPLITS}
        return _write_tables(parts, out, beat)

    return Source(name, files, write, "test")


# A table: its Arrow schema, and a function from column names to record batches of some 256 rows.
Table = Callable[[], tuple]


def _read_parquet(path: Path) -> Table:
    def read():
        import pyarrow.parquet

        file = pyarrow.parquet.ParquetFile(path)
        return file.schema_arrow, lambda columns: file.iter_batches(256, columns=columns)

    return read


def _read_arrow(table) -> Table:
    return lambda: (table.schema, lambda columns: table.select(columns).to_batches(256))


def _write_tables(splits: dict[str, list[tuple[str, Table]]], out: Path, beat: Beat) -> tuple[str, ...]:
    """Stores the image bytes and labels of named tables; memory: one row group and the labels."""
    labels, names = {}, {}
    for split, tables in splits.items():
        labels[split], parts = [], []
        _save_items(out, split, _rows(tables, labels[split], parts, names, split, beat), parts=parts)
        if not labels[split]:
            raise ValueError(f"no images in the {split} split: {_first([where for where, _ in tables])}")
    if names["train"] != names["val"]:
        raise ValueError(
            "the class names of the two splits differ:"
            + _only_in("train", set(names["train"] or ()) - set(names["val"] or ()))
            + _only_in("val", set(names["val"] or ()) - set(names["train"] or ()))
            + f" In order, train has {_first(list(names['train'] or ['none']))};"
            + f" val {_first(list(names['val'] or ['none']))}"
        )
    classes = names["train"]
    kinds = {type(label) for found in labels.values() for label in found}
    if len(kinds) > 1 or (classes is not None and str in kinds):
        raise ValueError("labels must be all numbers, or all names in columns without ClassLabel")
    if classes is None:
        classes, labels = _number_labels(labels)
    for split, tables in splits.items():
        found = np.asarray(labels[split])
        wrong = np.flatnonzero((found < 0) | (found >= len(classes)))
        if len(wrong):
            raise ValueError(
                f"label {found[wrong[0]]} in row {wrong[0]} of the {split} split ({tables[0][0]}) is out of"
                f" range: there are {len(classes)} classes ({len(wrong):,} such rows)"
            )
        _save_labels(out, split, found)
    return tuple(classes)


def _number_labels(labels: dict[str, list]) -> tuple[tuple[str, ...], dict[str, list]]:
    """Without names in the files the classes are the distinct labels, sorted."""
    train, val = set(labels["train"]), set(labels["val"])
    if train != val:
        raise ValueError(
            "the labels of the two splits differ:"
            + _only_in("train", {str(x) for x in train - val})
            + _only_in("val", {str(x) for x in val - train})
        )
    number = {label: k for k, label in enumerate(sorted(train))}
    return tuple(map(str, number)), {split: [number[x] for x in found] for split, found in labels.items()}


def _rows(
    tables: list[tuple[str, Table]], labels: list, parts: list, names: dict, split: str, beat: Beat
) -> Iterator[bytes]:
    """Yields the encoded images; fills labels, parts [(where, rows)] and names[split] on the way."""
    import pyarrow

    for where, table in tables:
        try:
            schema, read = table()
            image, label = _column(schema, IMAGE_COLUMNS, where), _column(schema, LABEL_COLUMNS, where)
            found = _class_names(schema, label)
            if names.setdefault(split, found) != found:
                raise ValueError(f"{where} has other class names than {tables[0][0]}")
            rows = 0
            for batch in read([image, label]):
                yield from _encoded(batch.column(image), where, rows)
                labels += _labels(batch.column(label), where, rows)
                rows += len(batch)
                beat()
            parts.append((where, rows))
        except (pyarrow.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"{where} cannot be read: {reason}. Is it complete? Fetch it again") from None


def _column(schema, candidates: tuple[str, ...], where: str) -> str:
    for name in candidates:
        if name in schema.names:
            return name
    wanted = " or ".join(candidates)
    raise ValueError(f"{where} has no column {wanted}, only: {', '.join(schema.names)}")


def _class_names(schema, label: str) -> tuple[str, ...] | None:
    """The names of a `datasets.ClassLabel` column, kept in the schema's metadata; None without."""
    about = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    names = about.get("info", {}).get("features", {}).get(label, {}).get("names")
    return None if names is None else tuple(map(str, names))


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
            raise ValueError(f"row {first + k} of {where} has the label {label}, neither a number nor a name")
    return labels
