"""The kinds of `--data`: finding their files, and reading them into a cache folder.

`find_source` only lists files; `Source.write` reads them; `common/data/cache.py` decodes and caches.
"""

import difflib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np

from common.data import shards
from common.data.class_folders import VAL_NAMES, LeftOut, list_classes, split_folders
from common.data.decode import EXTENSIONS, SPLITS
from common.data.encoded import save_images, save_labels
from common.data.parquet import Table, only_in, write_tables
from common.system.cli import expand_home
from common.system.s3 import ObjectStore
from common.system.text import plural, some_of
from common.system.threads import Heartbeat, run_with_heartbeat

KNOWN = ("digits", "cifar10", "synthetic")


@dataclass(frozen=True)
class Source:
    """The data that `--data` names.

    write(folder, beat) stores both splits in a cache folder and returns the class names: for each split the
    labels, `<split>_labels.npy` int64 [N], and decoded images, `<split>_images.npy`, or encoded ones
    (common/data/encoded.py).
    """

    name: str
    files: tuple[tuple[str, Path], ...]  # (name that is part of the key, file), sorted; () if generated
    write: Callable[[Path, Heartbeat], tuple[str, ...]]
    val_name: str = "val"
    mirror: bool = True
    root: Path | None = None  # the folder of the image files, for images stored as paths
    shards: str | None = None  # the place of their manifest: a folder, or s3://bucket/prefix
    store: str | None = None  # the place in S3 of other people's shards
    hashes: tuple[str, ...] = ()  # hashes of the content beyond the files'
    left_out: str = ""  # what is not read, and why


def find_source(data: str, beat: Heartbeat, show_progress: bool, data_root: tuple[str, ...] = ()) -> Source:
    """Finds the data that `--data` names and lists its files.

    data_root: folders in which the files of an index may lie. Raises ValueError for data that can't be
    trained on, before much is read.
    """
    if data == "digits":
        return Source(data, (), _write_digits, mirror=False)  # a mirrored 2 is no 2
    if data == "synthetic":
        return Source(data, (), _write_synthetic)
    if data == "cifar10":
        return _find_on_hub(data, "uoft-cs/cifar10", beat, show_progress)
    if str(data).startswith("s3://"):
        return run_with_heartbeat(lambda: _find_stored_shards(ObjectStore(data), data_root), beat)
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
    """Writes scikit-learn's 1,797 digits of 8x8 (values 0 to 16) as uint8 32x32; holds out 36 of each class.

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
        save_labels(folder, split, labels[ids])
    return tuple("0123456789")


def _write_synthetic(folder: Path, beat: Heartbeat) -> tuple[str, ...]:
    """Writes 4,096 + 1,024 images of 32x32: one of ten fixed patterns of 4x4 coloured squares, with noise."""
    generator = np.random.RandomState(0)
    patterns = generator.randint(64, 192, (10, 4, 4, 3)).repeat(8, axis=1).repeat(8, axis=2)
    for split, count in zip(SPLITS, (4096, 1024), strict=True):
        labels = generator.permutation(count) % 10
        noise = generator.normal(0, 64, (count, 32, 32, 3))
        images = np.clip(np.rint(patterns[labels] + noise), 0, 255).astype(np.uint8)
        np.save(folder / f"{split}_images.npy", images)
        save_labels(folder, split, labels)
        beat()
    return tuple(f"pattern {c}" for c in range(10))


def _find_shards(root: Path, data_root: tuple[str, ...]) -> Source | None:
    """Finds the shards that prep_imagenet.py wrote to a folder, or an index of others; they stay there."""
    manifest = shards.find_local(root, data_root)
    if manifest is None:
        return None
    return _source_of_shards(manifest, str(root), lambda name: (root / name).read_bytes())


def _find_stored_shards(store: ObjectStore, data_root: tuple[str, ...]) -> Source:
    """Finds shards below a prefix in S3, or an index of others; each is fetched when it is needed."""
    manifest, content = shards.find_stored(store, data_root)

    def read(name: str) -> bytes:
        found = content if name == shards.MANIFEST else store.read(name, shards.INDEX_LIMIT)
        if found is None:
            raise ValueError(f"{store.url}/{name} is missing: prepare again")
        return found

    return _source_of_shards(manifest, store.url, read)


def _source_of_shards(manifest: shards.Manifest, place: str, read: Callable[[str], bytes]) -> Source:
    """The source of shards in a place. read(name): the content of a file beside them."""

    def write(folder: Path, beat: Heartbeat) -> tuple[str, ...]:
        (folder / shards.MANIFEST).write_bytes(read(shards.MANIFEST))
        for split in SPLITS:
            name = shards.index_name(split)
            content = run_with_heartbeat(partial(read, name), beat)
            rows = shards.parse_index(content, manifest, split, f"{place}/{name}")
            (folder / name).write_bytes(content)
            save_labels(folder, split, rows[:, 3])
            beat()
        return manifest.classes

    hashes = (manifest.sha256,)
    return Source(manifest.name, (), write, shards=place, store=manifest.store, hashes=hashes)


def _find_class_folders(root: Path) -> Source:
    """Lists `train/<class>/` and `val/<class>/` (or validation/, valid/, test/)."""
    left_out, folders = LeftOut(), split_folders(root)
    if folders and "train" not in folders:
        raise ValueError(f"--data {root} has {next(iter(folders.values()))}/, but no train/")
    val = next((split for split in VAL_NAMES if split in folders), None)
    if not folders or val is None:
        _refuse_without_val(root, folders)
    names = {"train": folders["train"], "val": folders[val]}
    splits = {split: list_classes(root / name, left_out) for split, name in names.items()}
    for split, classes in splits.items():
        folder = root / names[split]
        if not classes:
            raise ValueError(
                f"{folder} has no class folders: each class's images belong in a folder of its own"
            )
        if empty := [str(folder / name) for name, images in classes.items() if not images]:
            raise ValueError(
                f"no images ({' '.join(EXTENSIONS)}) in {some_of(empty)}: fill or remove the folder"
            )
    train, other = (set(classes) for classes in splits.values())
    if train != other:
        raise ValueError(
            f"--data {root}: the class folders of {names['train']}/ and {names['val']}/ differ:"
            + only_in(names["train"], train - other)
            + only_in(names["val"], other - train)
        )
    files = {
        split: [(c, f"{names[split]}/{c}/{path}") for c, paths in classes.items() for path in paths]
        for split, classes in splits.items()
    }
    unused = [
        f"{name}/, as {names['val']}/ is there"
        for split, name in folders.items()
        if split not in ("train", val)
    ]
    said = ", ".join(filter(None, (str(left_out), *unused)))
    return _source_of_files(root.name, root, files, VAL_NAMES[val], said)


def _refuse_without_val(root: Path, folders: dict[str, str]) -> NoReturn:
    """Raises ValueError: class folders have no held-out split, or there are none."""
    train = root / folders["train"] if folders else root
    classes = [name for name, images in list_classes(train, LeftOut()).items() if images]
    if classes:
        where = (
            f"{folders['train']}/, but no" if folders else f"{plural(len(classes), 'class folder')}, but no"
        )
        move = "" if folders else "each class folder into train/, and "
        raise ValueError(
            f"--data {root} has {where} val/, validation/, valid/ or test/ to evaluate on: move {move}some"
            " images of each class into val/<class>/"
        )
    tars = next(root.glob("*.tar"), None)
    raise ValueError(
        f"--data {root} holds neither parquet files (train-*.parquet, test-*.parquet)"
        " nor class folders (train/<class>/*.jpg, val/<class>/*.jpg)"
        + (f"; run prep_imagenet.py on {tars.name}, and give --data its output" if tars else "")
    )


def _source_of_files(
    name: str, root: Path, splits: dict[str, list[tuple[str, str]]], val_name: str, left_out: str
) -> Source:
    """The source of image files. splits: the class, and the path below root, of each image of a split."""
    classes = sorted({c for c, _ in splits["train"]})

    def write(folder: Path, beat: Heartbeat) -> tuple[str, ...]:
        number = {c: k for k, c in enumerate(classes)}
        for split in SPLITS:
            save_images(folder, split, (os.fsencode(path) for _, path in splits[split]), root)
            save_labels(folder, split, [number[c] for c, _ in splits[split]])
            beat()
        return tuple(classes)

    files = tuple((path, root / path) for split in SPLITS for _, path in splits[split])
    return Source(name, files, write, val_name, root=root, left_out=left_out)


def _find_parquet(root: Path) -> Source | None:
    """Lists train-*.parquet and val-*, validation-* or test-*.parquet, in the folder or one level below."""
    folders = [f for f in (root, *sorted(root.iterdir())) if f.is_dir() and _split_files(f, "train")]
    if not folders:
        return None
    if len(folders) > 1 and folders[0] != root:
        names = [f.name for f in folders]
        raise ValueError(
            f"--data {root} holds more than one data set ({some_of(names)}): give the folder of one"
        )
    folder = folders[0]
    val_name = next((name for name in VAL_NAMES if _split_files(folder, name)), None)
    if val_name is None:
        raise ValueError(f"--data {root} has train-*.parquet, but no val-, validation- or test-*.parquet")
    splits = {"train": _split_files(folder, "train"), "val": _split_files(folder, val_name)}

    def write(out: Path, beat: Heartbeat) -> tuple[str, ...]:
        return write_tables({s: [Table(str(f), f) for f in splits[s]] for s in SPLITS}, out, beat)

    files = tuple((f.name, f) for split in SPLITS for f in splits[split])
    return Source(root.name, files, write, VAL_NAMES[val_name])


def _split_files(folder: Path, split: str) -> list[Path]:
    return sorted(f for f in folder.iterdir() if re.fullmatch(rf"{split}([-.].*)?\.parquet", f.name))


def _find_on_hub(name: str, repository: str, beat: Heartbeat, show_progress: bool) -> Source:
    """Loads a data set of the Hugging Face hub; `datasets` downloads it once and keeps it."""

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
        return write_tables(
            {s: [Table(f"{name}'s {s} split", tables[s].data.table)] for s in SPLITS}, out, beat
        )

    return Source(name, files, write, "test")
