"""prep_imagenet.py beside torchvision's parse_train_archive, on the same nested tar.

    python -m benchmarks.imagenet_prep --images /data/photographs

The tar has the structure of ILSVRC2012_img_train.tar. It holds the photographs of a folder, repeated under
other names, or noise of their usual size. The arms read it in turn, from the page cache where it fits; the
clock stops when everything written is on the disk. Results: benchmarks/README.md.

torchvision  checks the MD5 sum, then extracts the class tars, and from them the images
shards       checks the MD5 sum meanwhile, and takes the SHA-256 of each shard
index        --format index; it never checks the MD5 sum
"""

import argparse
import contextlib
import hashlib
import io
import os
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from torchvision.datasets import imagenet

import prep_imagenet
from benchmarks.harness import benchmark_parser, in_turn, report
from common.system.cli import run_command
from tools.prepare.devkit import MD5, TRAIN

NOISE_BYTES = 110_000  # an image of ILSVRC2012, on average


def main() -> int:
    parser = benchmark_parser(__doc__, rounds=5)
    parser.add_argument("--images", type=Path, help="a folder of JPEGs (default: noise)")
    parser.add_argument("--count", type=int, default=10_000, help="images in the tar")
    parser.add_argument("--classes", type=int, default=20)
    parser.add_argument("--folder", help="for the tar and the output: 3 times the tar's size (default: /tmp)")
    flags = parser.parse_args()
    files = sorted(flags.images.rglob("*.[jJ][pP]*[gG]")) if flags.images else []
    if flags.images and not files:
        raise ValueError(f"--images {flags.images}: holds no file that ends in .jpg or .jpeg")
    with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
        tar = Path(folder) / TRAIN
        make_tar(tar, [path.read_bytes() for path in files], flags)
        with open(tar, "rb") as file:
            md5 = hashlib.file_digest(file, "md5").hexdigest()

        def speed(arm: Callable[..., None], *words: str | None) -> float:
            out = Path(tempfile.mkdtemp(dir=folder))
            os.sync()  # so that this arm does not wait for the last one's writes
            began = time.perf_counter()
            arm(tar, out, *words)
            os.sync()
            seconds = time.perf_counter() - began
            shutil.rmtree(out)
            return flags.count / seconds

        arms = {
            "torchvision": lambda: speed(torchvision, md5),
            "shards": lambda: speed(ours, md5),
            "torchvision without MD5": lambda: speed(torchvision, None),
            "shards without MD5": lambda: speed(ours, None),
            "index": lambda: speed(ours, None, "--format", "index"),
        }
        report(in_turn(arms, flags.rounds), "images/s", "torchvision", flags.json)
    return 0


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


if __name__ == "__main__":
    sys.exit(run_command(main))
