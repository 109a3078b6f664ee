"""Prepares ImageNet's archives, or any images in class tars or class folders, for training in one pass.

    python prep_imagenet.py --data /downloads --out /data/imagenet
    python prep_imagenet.py --data /downloads --out /data/imagenet256 --resize 256
    python prep_imagenet.py --data s3://bucket/tars --out s3://bucket/imagenet --work_dir /scratch/imagenet
    python prep_imagenet.py --from folder --data /data/flowers --out /data/flower_shards
    python prep_imagenet.py --from shards --data s3://bucket/wds --format index --out /data/wds_index

--data is the folder, or the s3:// prefix, with ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and
ILSVRC2012_devkit_t12.tar.gz; --train, --val and --devkit name them one by one. Each archive is read once, as
a stream, and never extracted; its published MD5 sum is checked at the same time, unless --no_verify is given.
Without the development kit, --val_labels gives the class of each validation image on a line, in the order of
their names: its WordNet id (n01440764) or its index. A line may begin with the name of its image.

--format shards  tar files of about 256 MiB that `tar`, WebDataset and `datasets` read, with the images
                 shuffled by --seed. An index and, last, a manifest complete them. Pass it to --data

Images are copied byte for byte. CMYK images, and the PNG that is named .JPEG, become RGB JPEGs of quality 95,
and are listed. --resize 256 scales larger images to a shorter side of 256 pixels, on all cores.

Other images: --from tar takes train.tar and val.tar with a <class>.tar per class; --from folder takes
train/<class>/ and val/<class>/, with images also in subfolders. --train and --val each take a tar or a
folder. Labels are the indices of the sorted class names, so a tar is scanned for them first. Hidden files,
and files without an image's extension, are skipped. Each JPEG is checked on all cores, because decoders
silently fill the missing part of a truncated JPEG with grey; --no_verify skips that check.

--from parquet takes a folder of train-*.parquet, and of val-*, validation-* or test-*.parquet.

Other people's shards: --from shards --format index indexes WebDataset's tars in a folder or below an S3
prefix, without copying them. It finds tars whose name or folder contains train, val or test; --train and
--val take patterns, as 'DIR/train-{0000..1023}.tar'. A sample's class is in its .cls file, or the "label" of
its .json; --classes is a file of class names, one per line. Shards in S3 are read once, for their SHA-256.

After an interruption, a kill or a full disk the same command keeps the finished splits, and begins the other
one again. The result is the same.
"""

import argparse
import signal
import sys

from onecurve.system.cli import command_parser, run_command
from onecurve.system.text import message_text
from tools.prepare.preparation import NAMES, Preparation

BOUNDS = {"resize": (1, 10_000), "quality": (1, 100), "shard_mib": (2**-10, 2**20), "seed": (0, 2**32 - 1)}


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        Preparation(parse_flags(sys.argv[1:])).run()
    except OSError as error:  # a full disk, above all
        what = message_text(f"{error.filename}: {error.strerror}" if error.filename else error)
        print(f"error: {what}. Correct that, then run the same command to resume", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: run the same command to resume", file=sys.stderr)
        return 130
    return 0


def parse_flags(words: list[str]) -> argparse.Namespace:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("--data", help="folder or s3://bucket/prefix of the archives")
    for part in NAMES["imagenet"]:
        add(f"--{part}", help="path or s3:// url of this archive")
    add("--val_labels", metavar="FILE", help="without a devkit: WordNet id or index of each image of val")
    kind = "kind of input (default: imagenet)"
    add("--from", dest="source", choices=(*NAMES, "parquet", "shards"), default="imagenet", help=kind)
    add("--classes", metavar="FILE", help="with --from shards: class names, one per line")
    add("--out", required=True, help="a folder, or s3://bucket/prefix")
    add("--work_dir", help="with --out s3://...: a local folder with room for all shards")
    add("--format", choices=("shards", "index"), default="shards", help="(default: shards)")
    add("--resize", type=int, help="shorter side in pixels (default: images stay as they are)")
    add("--quality", type=int, default=90, help="JPEG quality of resized images (default: 90)")
    add("--shard_mib", type=float, default=256, help="approximate size of a shard (default: 256)")
    add("--seed", type=int, default=0, help="seed of the shuffle (default: 0)")
    skipped = "skip the check of ImageNet's MD5 sums, and of other JPEGs for missing parts"
    add("--no_verify", action="store_true", help=skipped)
    add("--subset", action="store_true", help="accept other counts than 1,000 classes of 50 val images")
    flags = parser.parse_args(words)
    for name, (low, high) in BOUNDS.items():
        if (value := getattr(flags, name)) is not None and not low <= value <= high:
            parser.error(f"--{name} {value}: must be from {low:g} to {high:,}")
    for name in ("data", "train", "val", "devkit", "val_labels", "out", "classes"):
        if "://" in (value := getattr(flags, name) or "") and not value.startswith("s3://"):
            parser.error(f"--{name} takes paths and s3://bucket/...: download other urls (curl -C - -O URL)")
    if problem := _problem(flags):
        parser.error(problem)
    return flags


def _problem(flags: argparse.Namespace) -> str | None:
    """Returns an error for flags that contradict one another, else None."""
    source, index, remote = flags.source, flags.format == "index", flags.out.startswith("s3://")
    places = [place for place in (flags.data, flags.train, flags.val) if place]
    local = [place for place in places if not place.startswith("s3://")]
    only_table = "--from parquet takes --data FOLDER, with train-*.parquet and val-* or test-*.parquet"
    only_index = "--from shards and --format index go together, without --resize: they copy no image"
    unreadable = f"--out {flags.out}: other hosts can't read an index there of files on this host"
    problems = [
        (not places, "give --data, or --train and --val"),
        (flags.devkit and source != "imagenet", f"--devkit: --from {source} takes no devkit"),
        (flags.val_labels and source not in ("imagenet", "tar"), f"--val_labels: --from {source} has labels"),
        (flags.classes and source != "shards", f"--classes: --from {source} finds the names of the classes"),
        (source == "parquet" and local != [flags.data], only_table),
        (index != (source == "shards") or (index and flags.resize), only_index),
        (index and remote and local, unreadable),
        (remote != bool(flags.work_dir), "--work_dir is needed with --out s3://..., and only then"),
    ]
    return next((message for is_problem, message in problems if is_problem), None)


if __name__ == "__main__":
    sys.exit(run_command(main))
