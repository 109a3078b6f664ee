"""The kinds of `--data`: finding their files, and reading them into a cache folder.

`find_source` only lists files; `Source.write` reads them; `common/data/cache.py` decodes and caches.
Class folders are listed by os.scandir: 0.11 s for 100,000 files in 1,000 folders. torchvision's make_dataset
takes 0.46 s with the same rules about hidden files and dangling links, and 2.2 s for its import, at every
start. It also enters folders within class folders, and follows links in circles.
"""

import difflib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from common.data import shards
from common.data.decode import SPLITS
from common.data.encoded import save_images, save_labels
from common.data.parquet import Table, only_in, write_tables
from common.system.cli import expand_home
from common.system.s3 import ObjectStore
from common.system.text import some_of
from common.system.threads import Heartbeat, run_with_heartbeat

KNOWN = ("digits", "cifar10", "synthetic")
EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
VAL_NAMES = {"val": "val", "validation": "val", "test": "test"}  # the first that exists: its split's name


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
    """Lists `train/<class>/*` and `val/<class>/*` (or validation, test)."""
    val_name = next((name for name in VAL_NAMES if (root / name).is_dir()), None)
    if not (root / "train").is_dir():
        tars = next(root.glob("*.tar"), None)
        raise ValueError(
            f"--data {root} holds neither parquet files (train-*.parquet, test-*.parquet)"
            " nor class folders (train/<class>/*.jpg, val/<class>/*.jpg)"
            + (f"; run prep_imagenet.py on {tars.name}, and give --data its output" if tars else "")
        )
    if val_name is None:
        raise ValueError(f"--data {root} has train/, but no val/ or test/ to evaluate on")
    listing = {name: _list_classes(root / name) for name in ("train", val_name)}
    train, val = (set(classes) for classes in listing.values())
    if train != val:
        raise ValueError(
            f"--data {root}: the class folders of train/ and {val_name}/ differ:"
            + only_in("train", train - val)
            + only_in(val_name, val - train)
        )
    classes = sorted(train)
    names = {
        split: [(c, f"{name}/{c}/{file}") for c in classes for file in listing[name][c]]
        for split, name in zip(SPLITS, listing, strict=True)
    }

    def write(folder: Path, beat: Heartbeat) -> tuple[str, ...]:
        number = {c: k for k, c in enumerate(classes)}
        for split in SPLITS:
            save_images(folder, split, (os.fsencode(path) for _, path in names[split]), root)
            save_labels(folder, split, [number[c] for c, _ in names[split]])
            beat()
        return tuple(classes)

    files = tuple((path, root / path) for split in SPLITS for _, path in names[split])
    return Source(root.name, files, write, VAL_NAMES[val_name], root=root)


def _list_classes(folder: Path) -> dict[str, list[str]]:
    """Lists {class: sorted names of its images}. Skips hidden entries and files with other extensions."""
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
        raise ValueError(f"no images ({' '.join(EXTENSIONS)}) in {some_of(empty)}: fill or remove the folder")
    return found


def _is_image(entry: os.DirEntry) -> bool:
    name = entry.name
    return not name.startswith(".") and name.lower().endswith(EXTENSIONS) and entry.is_file()


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
