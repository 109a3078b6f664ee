"""--holdout: images of the training split that are taken out of it and evaluated instead."""

from pathlib import Path

import numpy as np

NAME = "holdout"  # of the split that they are


def hold_out(folder: Path, holdout: float) -> None:
    """Divides the training split of a cache folder: writes the ids of its parts, each ascending.

    holdout: a share below 1, or a number of images.
    """
    is_held_out = chosen(np.load(folder / "train_labels.npy"), holdout)
    np.save(part_file(folder, "train"), np.flatnonzero(~is_held_out))
    np.save(part_file(folder, "val"), np.flatnonzero(is_held_out))


def part_file(folder: Path, part: str) -> Path:
    """The ids of the images that --holdout leaves in "train", or takes out of it, "val": int64 [n]."""
    return folder / f"{part}_part.npy"


def chosen(labels: np.ndarray, holdout: float) -> np.ndarray:
    """The images that are held out: bool [N]. labels: int64 [N].

    The same share of each class, by a fixed hash of the images' ids: no seed changes the choice. A class
    keeps one training image at least. Raises ValueError where that leaves too few.
    """
    from common.order import hashes

    count = len(labels)
    wanted = round(holdout * count) if holdout < 1 else int(holdout)
    sizes = np.bincount(labels)
    spare = np.maximum(sizes - 1, 0)
    if not 0 < wanted <= spare.sum():
        raise ValueError(
            f"--holdout {holdout:g} is {wanted:,} of {count:,} training images: choose 1 to {spare.sum():,},"
            " as each class keeps one"
        )
    exact = sizes * wanted / count
    shares = np.minimum(exact.astype(np.int64), spare)
    while (missing := wanted - shares.sum()) > 0:  # to the classes that are furthest below their share
        open_classes = np.flatnonzero(shares < spare)
        order = np.argsort(shares[open_classes] - exact[open_classes], kind="stable")
        shares[open_classes[order[:missing]]] += 1
    is_held_out, order = np.zeros(count, bool), hashes(count)
    for label in np.flatnonzero(shares):
        ids = np.flatnonzero(labels == label)
        is_held_out[ids[np.argsort(order[ids], kind="stable")[: shares[label]]]] = True
    return is_held_out
