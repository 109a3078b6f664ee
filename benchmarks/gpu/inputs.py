"""Photographs from files to the device: decoding alone, and a training beside the same resident step."""

import io
import json
import statistics

import numpy as np
from PIL import Image

from benchmarks.gpu.rows import END_TO_END, Result, Row, Setting, judged, succeeds

SIZES = ((500, 375), (375, 500))  # the usual photograph of ImageNet; images of one size would be decoded once


def rows() -> dict[str, Row]:
    return {"decoding, one core": decoding, "vit shards / resident": shards}


def photographs(setting: Setting) -> None:
    """Class folders of smooth noise, which a JPEG compresses to a photograph's size."""
    root = setting.folder / "photographs"
    if root.exists():
        return
    random = np.random.default_rng(0)
    for split, count in (("train", setting.size(1024, 24)), ("val", setting.size(64, 8))):
        for number in range(count):
            folder = root / split / f"class_{number % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            small = Image.fromarray(random.integers(0, 256, (48, 64, 3), dtype=np.uint8))
            data = io.BytesIO()
            small.resize(SIZES[number % 2], Image.Resampling.BICUBIC).save(data, "JPEG", quality=95)
            (folder / f"{number}.jpg").write_bytes(data.getvalue())


def decoding(setting: Setting) -> Result:
    photographs(setting)
    file = setting.folder / "decoding.json"
    images = ["--images", setting.folder / "photographs" / "val"]
    words = ["-m", "benchmarks.decoding", *images, "--rounds", setting.size(9, 1), "--json", file]
    succeeds(setting, words)
    measured = json.loads(file.read_text())
    ms = statistics.median(round_["ours, originals"] for round_ in measured["ms_per_image"])
    ratio = measured["ratios"]["ours, originals"]["PIL, originals"]
    return Result(round(1e3 / ms), "images/s", note=f"{ratio:.2f} times PIL's")


def shards(setting: Setting) -> Result:
    photographs(setting)
    small = ["--model", "test_vit", "--image_size", 64, "--patch_size", 16, "--batch_size", 8]
    large = ["--model", "vit_small_patch16_224", "--batch_size", 256]
    steps = ["--rounds", setting.size(3, 1), "--steps", setting.size(20, 1), "--workers", setting.size(12, 1)]
    file = setting.folder / "shards.json"
    words = ["-m", "benchmarks.shard_training", "--data", setting.folder / "photographs", *steps]
    words += ["--json", file, *(small if setting.dry_run else large)]
    succeeds(setting, words)
    rounds = json.loads(file.read_text())
    share = round(statistics.median(speeds["shards"] / speeds["resident"] for speeds in rounds), 3)
    note = f"{statistics.median(speeds['shards'] for speeds in rounds):,.0f} images/s"
    return Result(share, note=note) if setting.dry_run else judged(share, "", END_TO_END, note)
