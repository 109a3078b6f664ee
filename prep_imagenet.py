"""Prepare ImageNet, or other images in tars or class folders, for training in one pass.

    python prep_imagenet.py --data /downloads --out /data/imagenet
    python prep_imagenet.py --data /downloads --out /data/imagenet256 --resize 256
    python prep_imagenet.py --data s3://bucket/tars --out s3://bucket/imagenet --work_dir /scratch/imagenet
    python prep_imagenet.py --from folder --data /data/flowers --out /data/flower_shards
    python prep_imagenet.py --from shards --data s3://bucket/wds --format index --out /data/wds_index

--data is the folder or s3:// prefix with ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and
ILSVRC2012_devkit_t12.tar.gz. --train, --val and --devkit specify the paths of these archives separately. Each
archive is read once, as a stream, and never extracted. The published MD5 sum is checked during the same read,
unless --no_verify is set. Without the development kit, pass --val_labels FILE. FILE contains one line per
validation image, in the order of the image names. Each line contains a class's WordNet id (n01440764) or
index, optionally after the image's name.

--format shards  writes tar files of about 256 MiB that `tar`, WebDataset and `datasets` can read. The images
                 are shuffled by --seed. The output folder also contains an index and a manifest. The
                 manifest is written last. To train on the shards, use --data OUT.

Images are copied byte for byte, except for CMYK images and PNG images named .JPEG. These images are converted
to RGB JPEGs of quality 95, and listed. --resize 256 scales larger images to a shorter side of 256 pixels,
using all cores.

Other images: --from tar reads train.tar and val.tar with one <class>.tar per class. --from folder reads
train/<class>/ and val/<class>/, including subfolders. --train and --val each accept a tar or a folder. Labels
are indices into the sorted class names, so a tar is first scanned for its class names. Hidden files and files
without an image extension are skipped. Each JPEG is checked for missing parts, using all cores, because
decoders silently fill the missing part of a truncated JPEG with grey. --no_verify skips the JPEG check.

--from parquet reads a folder with train-*.parquet and val-*, validation-* or test-*.parquet.

Existing shards: --from shards --format index indexes WebDataset tars in a folder or under an S3 prefix,
without copying the tars. The command indexes tars whose name or folder contains train, val or test. --train
and --val accept patterns, for example 'DIR/train-{0000..1023}.tar'. A sample's class is read from its .cls
file or from "label" in its .json file. --classes is a file with one class name per line. Shards in S3 are
read once to compute their SHA-256.

After an interruption, a kill or a full disk, the same command keeps the finished splits and repeats the
interrupted split. An uninterrupted preparation would produce the same files.
"""

import argparse
import signal
import sys

from onecurve.system.cli import command_parser, run_command
from onecurve.system.text import safe_message
from tools.prepare.preparation import INPUT_NAMES, Preparation

PARTS = {"train": "the training images", "val": "the validation images", "devkit": "the development kit"}
BOUNDS = {"resize": (1, 10_000), "quality": (1, 100), "shard_mib": (2**-10, 2**20), "seed": (0, 2**32 - 1)}


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        Preparation(parse_flags(sys.argv[1:])).run()
    except OSError as error:  # the usual cause is a full disk
        cause = safe_message(f"{error.filename}: {error.strerror}" if error.filename else error)
        print(f"error: {cause}. Fix the problem, then run the same command to resume.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("The preparation was interrupted. Run the same command to resume.", file=sys.stderr)
        return 130
    return 0


def parse_flags(words: list[str]) -> argparse.Namespace:
    parser = command_parser(__doc__, "prep_imagenet.py --data PATH --out PATH [flags]")
    add = parser.add_argument
    add("--data", metavar="PATH", help="Folder or s3://bucket/prefix with the archives or images.")
    for part in INPUT_NAMES["imagenet"]:
        add(
            f"--{part}",
            metavar="PATH",
            help=f"Path or s3:// URL of {PARTS[part]}. Default: a file in --data.",
        )
    labels_help = (
        "File with the WordNet id or index of each validation image's class. Replaces the --devkit labels."
    )
    add("--val_labels", metavar="FILE", help=labels_help)
    source_help = "Format of the input. Default: imagenet."
    sources = (*INPUT_NAMES, "parquet", "shards")
    add("--from", dest="source", choices=sources, default="imagenet", help=source_help)
    add("--classes", metavar="FILE", help="File with one class name per line, for --from shards.")
    add("--out", required=True, metavar="PATH", help="Output folder or s3://bucket/prefix.")
    add(
        "--work_dir",
        metavar="FOLDER",
        help="Local folder with enough space for all shards. --work_dir is required if --out is in S3.",
    )
    format_help = "Output format: new shards, or only an index of the input's shards. Default: shards."
    add("--format", choices=("shards", "index"), default="shards", help=format_help)
    resize_help = "Shorter side to which larger images are resized, in pixels. Default: no resizing."
    add("--resize", type=int, metavar="N", help=resize_help)
    add(
        "--quality",
        type=int,
        default=90,
        metavar="N",
        help="JPEG quality of resized images, from 1 to 100. Default: 90.",
    )
    size_help = "Approximate size of a shard, in MiB. Default: 256."
    add("--shard_mib", type=float, default=256, metavar="MIB", help=size_help)
    add("--seed", type=int, default=0, metavar="N", help="Seed for shuffling the images. Default: 0.")
    skipped = "Skip the check of ImageNet's MD5 sums, or the check of other JPEGs for missing parts."
    add("--no_verify", action="store_true", help=skipped)
    subset_help = (
        "Accept a subset of ImageNet. Default: require 1,000 classes with 50 validation images each."
    )
    add("--subset", action="store_true", help=subset_help)
    flags = parser.parse_args(words)
    for name, (low, high) in BOUNDS.items():
        if (value := getattr(flags, name)) is not None and not low <= value <= high:
            parser.error(f"--{name} {value} must be from {low:g} to {high:,}")
    for name in ("data", "train", "val", "devkit", "val_labels", "out", "classes"):
        if "://" in (value := getattr(flags, name) or "") and not value.startswith("s3://"):
            parser.error(
                f"--{name} accepts only paths and s3:// URLs. Download the file first (curl -C - -O URL)."
            )
    if problem := _problem(flags):
        parser.error(problem)
    return flags


def _problem(flags: argparse.Namespace) -> str | None:
    """Return an error message if flags contradict one another, and None otherwise."""
    source, is_index, is_remote = flags.source, flags.format == "index", flags.out.startswith("s3://")
    inputs = [path for path in (flags.data, flags.train, flags.val) if path]
    local = [path for path in inputs if not path.startswith("s3://")]
    only_table = "--from parquet needs --data FOLDER with train-*.parquet and val-* or test-*.parquet"
    only_index = "--from shards and --format index require each other, and exclude --resize"
    unreadable = f"--out {flags.out}: an index in S3 can't refer to files on this host. Pass a local --out."
    problems = [
        (not inputs, "the input is missing. Pass --data, or --train and --val."),
        (
            flags.devkit and source != "imagenet",
            f"--devkit does not apply to --from {source}. Remove --devkit.",
        ),
        (
            flags.val_labels and source not in ("imagenet", "tar"),
            f"--val_labels does not apply to --from {source}, which contains labels. Remove --val_labels.",
        ),
        (
            flags.classes and source != "shards",
            f"--classes does not apply to --from {source}, which contains class names. Remove --classes.",
        ),
        (source == "parquet" and local != [flags.data], only_table),
        (is_index != (source == "shards") or (is_index and flags.resize), only_index),
        (is_index and is_remote and local, unreadable),
        (
            is_remote != bool(flags.work_dir),
            "--out s3://... requires --work_dir, and a local --out excludes --work_dir",
        ),
    ]
    return next((message for is_problem, message in problems if is_problem), None)


if __name__ == "__main__":
    sys.exit(run_command(main))
