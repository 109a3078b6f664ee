"""What `--data` names, once it is found."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from common.system.threads import Heartbeat

VAL_NAMES = {"val": "val", "validation": "val", "valid": "val", "test": "test"}  # the first one is evaluated
VAL_CHOICE = "val, validation, valid or test"


class Columns(NamedTuple):
    """--image_column and --label_column of tables; None: found by type and name."""

    image: str | None = None
    label: str | None = None


BY_TYPE = Columns()


@dataclass(frozen=True)
class Source:
    """The data that `--data` names.

    write(folder, beat) stores the splits in a cache folder and returns the class names: for each split the
    labels, `<split>_labels.npy` int64 [N], and decoded images, `<split>_images.npy`, or encoded ones
    (common/data/encoded.py).
    """

    name: str
    files: tuple[tuple[str, Path], ...]  # (name that is part of the key, file), sorted; () if generated
    write: Callable[[Path, Heartbeat], tuple[str, ...]]
    val_name: str | None = "val"  # its held-out split; None: it has training images alone
    holdout: float | None = None  # how many of those are held out
    mirror: bool = True
    root: Path | None = None  # the folder of the image files, for images stored as paths
    shards: str | None = None  # the place of their manifest: a folder, or s3://bucket/prefix
    store: str | None = None  # the place in S3 of other people's shards
    hashes: tuple[str, ...] = ()  # hashes of the content beyond the files'
    is_table: bool = False  # it has columns to choose from
    left_out: str = ""  # what is not read, and why
