"""--holdout: images of the training split that are taken out of it and evaluated instead."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from common.data.encoded import FILES, Encoded, save_images, save_labels
from common.system.threads import Heartbeat

HELD, REST = "held_out", "rest"  # the names of val and train while both are written


def hold_out(folder: Path, holdout: float, beat: Heartbeat) -> None:
    """Divides the encoded training images of a cache folder into train and val.

    holdout: a share below 1, or a number of images. Each part keeps the order, and the names of its images.
    """
    images, labels = Encoded(folder, "train"), np.load(folder / "train_labels.npy")
    is_held_out = chosen(labels, holdout)
    root = None if images.root is None else Path(images.root)
    for split, ids in ((HELD, np.flatnonzero(is_held_out)), (REST, np.flatnonzero(~is_held_out))):
        save_images(folder, split, _items(images, ids, beat), root, images.parts, ids)
        save_labels(folder, split, labels[ids])
    for old, new in ((REST, "train"), (HELD, "val")):
        for ending in ("labels.npy", *FILES):
            os.replace(folder / f"{old}_{ending}", folder / f"{new}_{ending}")


def _items(images: Encoded, ids: np.ndarray, beat: Heartbeat) -> Iterator[bytes]:
    for number, i in enumerate(ids.tolist()):
        if number % 1000 == 0:
            beat()
        yield images.item(i)


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
