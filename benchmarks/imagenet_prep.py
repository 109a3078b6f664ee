"""Compares prep_imagenet.py with torchvision's parse_train_archive, on the same nested tar.

    python -m benchmarks.imagenet_prep --images /data/photographs
    python -m benchmarks.imagenet_prep --count 20000 --rounds 3

The tar has the structure of ILSVRC2012_img_train.tar. It holds the photographs of a folder, repeated under
other names, or noise of their usual size. The arms read it in turn, from the page cache where it fits. The
clock stops when everything written is on the disk. The arms:

torchvision  checks the MD5 sum, then extracts the class tars, and from them the images
shards       checks the MD5 sum meanwhile, and takes the SHA-256 of each shard
index        --format index

The first two also run without the check of the MD5 sum; the index never checks it.

Results and the machine: benchmarks/README.md.
"""

import argparse
import contextlib
import hashlib
import io
import os
import shutil
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table
from torchvision.datasets import imagenet

import prep_imagenet
from tools.prepare.devkit import MD5, TRAIN

NOISE_BYTES = 110_000  # an image of ILSVRC2012, on average


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--images", type=Path, help="a folder of JPEGs (default: noise)")
    parser.add_argument("--count", type=int, default=10_000, help="images in the tar")
    parser.add_argument("--classes", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="for the tar and the output: 3 times the tar's size (default: /tmp)")
    flags = parser.parse_args()
    try:
        photographs = photographs_in(flags.images) if flags.images else []
    except ValueError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
        tar = Path(folder) / TRAIN
        make_tar(tar, photographs, flags)
        with open(tar, "rb") as file:
            md5 = hashlib.file_digest(file, "md5").hexdigest()
        arms = {
            "torchvision": lambda out: torchvision(tar, out, md5),
            "shards": lambda out: ours(tar, out, md5),
            "torchvision without MD5": lambda out: torchvision(tar, out, None),
            "shards without MD5": lambda out: ours(tar, out, None),
            "index": lambda out: ours(tar, out, None, "--format", "index"),
        }
        rounds = [{name: measure(arm, tar.parent) for name, arm in arms.items()} for _ in range(flags.rounds)]
        report(rounds, flags.count, tar.stat().st_size)


def photographs_in(folder: Path) -> list[bytes]:
    """Reads all JPEGs below a folder. Raises ValueError when there are none."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if not files:
        raise ValueError(f"--images {folder}: holds no file that ends in .jpg or .jpeg")
    return [path.read_bytes() for path in files]


def make_tar(path: Path, photographs: list[bytes], flags: argparse.Namespace) -> None:
    with tarfile.open(path, "w") as outer:
        for c in range(flags.classes):
            inner = io.BytesIO()
            with tarfile.open(fileobj=inner, mode="w") as archive:
                for k in range(c, flags.count, flags.classes):
                    data = photographs[k % len(photographs)] if photographs else os.urandom(NOISE_BYTES)
                    add(archive, f"n{c:08}_{k}.JPEG", data)
            add(outer, f"n{c:08}.tar", inner.getvalue())


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def torchvision(tar: Path, out: Path, md5: str | None) -> None:
    imagenet.ARCHIVE_META["train"] = (tar.name, md5)
    os.symlink(tar, out / tar.name)
    imagenet.parse_train_archive(out)


def ours(tar: Path, out: Path, md5: str | None, *flags: str) -> None:
    words = ["--from", "tar", "--train", str(tar), "--out", str(out), "--no_verify", *flags]
    preparation = prep_imagenet.Preparation(prep_imagenet.parse(words))
    if md5:
        MD5["train"], preparation.dataset.hashed = md5, True
    with contextlib.redirect_stdout(io.StringIO()):
        preparation.run()


def measure(arm: Callable[[Path], None], folder: Path) -> dict[str, float]:
    """Seconds until all is on the disk, and bytes that went through write calls."""
    out = Path(tempfile.mkdtemp(dir=folder))
    os.sync()  # so that this arm does not wait for the last one's writes
    written, began = psutil.Process().io_counters().write_chars, time.perf_counter()
    arm(out)
    os.sync()
    seconds = time.perf_counter() - began
    written = psutil.Process().io_counters().write_chars - written
    shutil.rmtree(out)
    return {"seconds": seconds, "written": written}


def report(rounds: list[dict[str, dict[str, float]]], count: int, size: int) -> None:
    title = f"{count:,} images, {size / 2**30:.2f} GiB; medians of {len(rounds)} rounds"
    table = Table("", title=title, title_justify="left")
    for column in ("images/s", "of torchvision's", "least", "most", "bytes written per byte read"):
        table.add_column(column, justify="right")
    for name in rounds[0]:
        base = "torchvision" if name in ("torchvision", "shards") else "torchvision without MD5"
        ratios = [found[base]["seconds"] / found[name]["seconds"] for found in rounds]
        speed = count / statistics.median(found[name]["seconds"] for found in rounds)
        table.add_row(
            name,
            f"{speed:,.0f}",
            *(f"{value:.1f}" for value in (statistics.median(ratios), min(ratios), max(ratios))),
            f"{statistics.median(found[name]['written'] for found in rounds) / size:.3f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
