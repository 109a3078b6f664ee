"""What a data set holds: images, classes, what was left out; imbalance, and images in both splits."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from common.data.encoded import Encoded
from common.system.text import printable, some_of

IMBALANCE = 10  # times as many images in the largest class as in the smallest: named
SEARCHED_BYTES = 4 * 2**30  # more are not searched for duplicates, nor decoded to find broken images


class Duplicates(NamedTuple):
    """Images of an evaluated split whose bytes are in the training split, too."""

    images: int
    train: str  # the names of the first pair
    other: str


class Broken(NamedTuple):
    """Images that can't be decoded, or of which a part is missing."""

    images: int
    first: str  # the name of the first, and what is wrong with it


class Flaws(NamedTuple):
    duplicates: Mapping[str, Duplicates]  # by the name of the evaluated split
    broken: Broken | None


NO_FLAWS = Flaws({}, None)


def find_duplicates(train: Encoded, val: Encoded) -> Duplicates | None:
    """Compares the bytes of images of equal size. None where no image is in both splits."""
    sizes = [[images.size(i) for i in range(len(images))] for images in (train, val)]
    common = set(sizes[0]) & set(sizes[1])
    train_ids, val_ids = ([i for i, size in enumerate(found) if size in common] for found in sizes)
    known = {_digest(train, i): i for i in reversed(train_ids)}
    pairs = [(known[digest], i) for i in val_ids if (digest := _digest(val, i)) in known]
    return Duplicates(len(pairs), train.where(pairs[0][0]), val.where(pairs[0][1])) if pairs else None


def is_too_much(*splits: Encoded) -> bool:
    return sum(images.size(i) for images in splits for i in range(len(images))) > SEARCHED_BYTES


def _digest(images: Encoded, i: int) -> bytes:
    return hashlib.sha256(images.content(i)).digest()


Labels = Mapping[str, np.ndarray]  # int64 [N], by the name of the evaluated split


def found(name: str, train: np.ndarray, evaluated: Labels, classes: int, left_out: str) -> str:
    """One line. train: labels int64 [N]."""
    text = f"data {printable(name)}: {len(train):,} training images"
    text += "".join(f", {len(labels):,} {split} images" for split, labels in evaluated.items())
    text += f", {classes:,} {'class' if classes == 1 else 'classes'}"
    return text + (f"; left out: {left_out}" if left_out else "")


def warnings(train: np.ndarray, evaluated: Labels, classes: Sequence[str], flaws: Flaws) -> list[str]:
    """A line for each thing that makes an accuracy misleading."""
    lines = []
    counts = np.bincount(train, minlength=len(classes))
    least, most = int(counts.argmin()), int(counts.argmax())
    if counts[most] >= IMBALANCE * counts[least]:
        lines.append(
            f"the classes are imbalanced: {counts[least]:,} training images of {printable(classes[least])},"
            f" {counts[most]:,} of {printable(classes[most])}: look at each class's recall, too"
        )
    for split, labels in evaluated.items():
        counts = np.bincount(labels, minlength=len(classes))
        if absent := [name for name, count in zip(classes, counts, strict=True) if count == 0]:
            lines.append(f"the {split} split has no image of {some_of(absent)}")
    if broken := flaws.broken:
        lines.append(
            f"{broken.images:,} of the {sum(map(len, (train, *evaluated.values()))):,} images are broken, as"
            f" {broken.first}: repair or remove them; --on_bad_image skip passes over those of training that"
            " can't be decoded"
        )
    for split, duplicates in flaws.duplicates.items():
        lines.append(
            f"{duplicates.images:,} of the {len(evaluated[split]):,} {split} images are training images, too,"
            f" as {duplicates.other} and {duplicates.train}: remove them from one split: accuracies are too"
            " high"
        )
    return lines
