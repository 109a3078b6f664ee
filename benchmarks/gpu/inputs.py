"""Photographs from files to the device: decoding alone, and a training beside the same resident step."""

import io
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.gpu.rows import END_TO_END, Result, Row, Setting, succeeds

SIZES = ((500, 375), (375, 500))  # the usual photograph of ImageNet; images of one size would be decoded once


def rows() -> dict[str, Row]:
    return {"decoding, one core": decoding, "vit shards / resident": shards}


def photographs(root: Path, count: int, sizes: Sequence[tuple[int, int]] = SIZES) -> Path:
    """Class folders of smooth noise, which a JPEG compresses to a photograph's size. Returns their root."""
    random = np.random.default_rng(0)
    for split, images in (("train", count), ("val", count // 16)) if not root.exists() else ():
        for number in range(images):
            folder = root / split / f"class_{number % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            small = Image.fromarray(random.integers(0, 256, (48, 64, 3), dtype=np.uint8))
            data = io.BytesIO()
            small.resize(sizes[number % len(sizes)], Image.Resampling.BICUBIC).save(data, "JPEG", quality=95)
            (folder / f"{number}.jpg").write_bytes(data.getvalue())
    return root


def decoding(setting: Setting) -> Result:
    photos = photographs(setting.folder / "photographs", setting.size(1024, 64))
    file = setting.folder / "decoding.json"
    images = ["--images", photos / "val"]
    words = ["-m", "benchmarks.decoding", *images, "--rounds", setting.size(9, 1), "--json", file]
    succeeds(setting, words)
    measured = json.loads(file.read_text())
    ms = statistics.median(round_["ours, originals"] for round_ in measured["ms_per_image"])
    ratio = measured["ratios"]["ours, originals"]["PIL, originals"]
    return Result(round(1e3 / ms), "images/s", 500, note=f"{ratio:.2f} times PIL's")


def shards(setting: Setting) -> Result:
    photos = photographs(setting.folder / "photographs", setting.size(1024, 64))
    small = ["--model", "test_vit", "--image_size", 64, "--patch_size", 16, "--batch_size", 8]
    large = ["--model", "vit_small_patch16_224", "--batch_size", 256]
    steps = ["--rounds", setting.size(3, 1), "--steps", setting.size(20, 1), "--workers", setting.size(12, 1)]
    file = setting.folder / "shards.json"
    words = ["-m", "benchmarks.shard_training", "--data", photos, *steps]
    words += ["--json", file, *(small if setting.is_small else large)]
    succeeds(setting, words)
    rounds = json.loads(file.read_text())
    share = round(statistics.median(speeds["shards"] / speeds["resident"] for speeds in rounds), 3)
    note = f"{statistics.median(speeds['shards'] for speeds in rounds):,.0f} images/s"
    return Result(share, "", f"at least {END_TO_END}", setting.judge(share >= END_TO_END), note)
