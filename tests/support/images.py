"""Small image folders, made of scikit-learn's real digits."""

from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits


def class_folders(root: Path, train: int, val: int, size: int = 16, kind: str = "png") -> Path:
    """Writes `root/train/<digit>/*` and `root/val/<digit>/*`; train, val: images of two classes together."""
    digits = load_digits()
    images = digits.images[np.isin(digits.target, (0, 1))]
    targets = digits.target[np.isin(digits.target, (0, 1))]
    # classes in turn, so that both are in each split
    pairs = sorted(range(len(images)), key=lambda i: (np.sum(targets[:i] == targets[i]), targets[i]))
    for split, ids in (("train", pairs[:train]), ("val", pairs[train : train + val])):
        for i in ids:
            folder = root / split / str(targets[i])
            folder.mkdir(parents=True, exist_ok=True)
            pixels = (images[i] * (255 / 16)).astype(np.uint8)
            Image.fromarray(pixels).resize((size, size)).convert("RGB").save(folder / f"{i:04d}.{kind}")
    return root
