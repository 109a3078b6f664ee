"""ImageNet's archives, or any images in class tars or class folders, prepared for training in one pass.

    python prep_imagenet.py --data /downloads --out /data/imagenet
    python prep_imagenet.py --data /downloads --out /data/imagenet256 --resize 256
    python prep_imagenet.py --data s3://bucket/tars --out s3://bucket/imagenet --work_dir /scratch/imagenet
    python prep_imagenet.py --url https://host/folder --out /data/imagenet
    python prep_imagenet.py --data /downloads --out /data/imagenet_index --format index --no_verify
    python prep_imagenet.py --from folder --data /data/flowers --out /data/flower_shards

--data is the folder, or the s3:// prefix, of ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and
ILSVRC2012_devkit_t12.tar.gz, and --url the same on a web server; --train, --val and --devkit name them one
by one, also by signed urls. They are read as streams, once, and nothing is extracted. Their published MD5
sums are checked meanwhile; --no_verify does without, and then an interrupted preparation need not read again
what it has done.

--format shards  tar files of some 256 MiB that `tar`, WebDataset and `datasets` read, the images spread over
                 them by --seed, with an index, and last a manifest: this is --data of the train scripts
--format folder  train/<class>/*.JPEG and val/<class>/*.JPEG
--format index   copies nothing: an index into the archives, which must stay where they are on this host;
                 a training takes their folder as --data_root

Images stay as they are, byte for byte. CMYK and the PNG that is named .JPEG become RGB JPEGs of quality 95,
and are listed. --resize 256 makes the shorter side of larger images 256 pixels, in all cores.

Other images: --from tar takes train.tar and val.tar, each of which holds <class>.tar files, and --from folder
train/<class>/ and val/<class>/; --train and --val may be one and the other. Labels are then the numbers of
the sorted class names, for which tars are looked through first. Hidden files, and what has no image's
extension, are passed over. Each JPEG is checked, in all cores: half of one with an end marker looks whole to
decoders, which fill it up with grey. --no_verify does without.

Interrupted, killed or out of room, the same command goes on where it was, and the result is the same.
"""

import argparse
import contextlib
import fcntl
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from common.data.decode import SPLITS
from common.data.shards import FORMAT, JOURNAL, MANIFEST, MANIFEST_LIMIT, data_root_flag, index_name
from common.prepare.archives import scan
from common.prepare.devkit import DEVKIT, TRAIN, VAL
from common.prepare.inputs import shown
from common.prepare.recode import recoded
from common.prepare.source import SECOND_CLASS, ImageBatch, Position, RawDataset, batches, exists, index_rows
from common.prepare.writer import FolderWriter, ShardWriter, part_name, replace, write_index
from common.system.cli import expand_home, run_command
from common.system.files import parse_json, read_json
from common.system.progress import Reading
from common.system.s3 import ObjectStore
from common.system.text import printable, printable_lines

NAMES = {
    "imagenet": {"train": TRAIN, "val": VAL, "devkit": DEVKIT},
    "tar": {"train": "train.tar", "val": "val.tar"},
    "folder": {"train": "train", "val": "val"},
}
JOURNAL_S = 20  # what a kill may cost
FOLDER_MANIFEST = "prepared.json"  # of --format folder: no data set of its own, only a list
SAMPLED = 8  # batches that tell how many shards there will be
OURS = re.compile(r"(train|val)(-\d{5,}\.tar|_index\.npy)")


def main() -> int:
    flags = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        Preparation(flags).run()
    except ValueError as error:
        print(f"error: {printable_lines(error)}", file=sys.stderr)
        return 1
    except OSError as error:  # a full disk, above all
        what = f"{error.filename}: {error.strerror}" if error.filename else error
        what = f"{printable_lines(what)}. Once it is mended, the same command goes on where it was"
        print(f"error: {what}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: the same command goes on where it was", file=sys.stderr)
        return 130
    return 0


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog=__doc__.partition("\n\n")[2], allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--data", help="folder or s3://bucket/prefix that holds the archives")
    parser.add_argument("--url", help="http(s)://... of the folder that holds the archives")
    for part in NAMES["imagenet"]:
        parser.add_argument(f"--{part}", help="path, s3:// or http(s):// url of this one")
    parser.add_argument(
        "--from", dest="source", choices=tuple(NAMES), default="imagenet", help="what is read"
    )
    parser.add_argument("--out", required=True, help="a folder, or s3://bucket/prefix")
    parser.add_argument("--work_dir", help="with --out s3://...: a local folder with room for all shards")
    parser.add_argument("--format", choices=("shards", "folder", "index"), default="shards")
    parser.add_argument(
        "--resize", type=int, help="shorter side in pixels (default: images stay as they are)"
    )
    parser.add_argument("--quality", type=int, default=90, help="of resized JPEGs (default: 90)")
    parser.add_argument("--shard_mib", type=float, default=256, help="size of a shard, about (default: 256)")
    parser.add_argument("--seed", type=int, default=0, help="of the shuffling (default: 0)")
    parser.add_argument(
        "--no_verify",
        action="store_true",
        help="check neither ImageNet's published MD5 sums nor whether other JPEGs are whole",
    )
    parser.add_argument(
        "--subset", action="store_true", help="other counts than 1,000 classes of 50 validation images"
    )
    # --work-dir is understood as well as --work_dir
    flags = parser.parse_args(
        [re.sub("^--[^=]+", lambda m: "--" + m[0][2:].replace("-", "_"), w) for w in words]
    )
    bounds = {
        "resize": (1, 10_000),
        "quality": (1, 100),
        "shard_mib": (2**-10, 2**20),
        "seed": (0, 2**32 - 1),
    }
    for name, (low, high) in bounds.items():
        if (value := getattr(flags, name)) is not None and not low <= value <= high:
            parser.error(f"--{name} {value}: must be from {low:g} to {high:,}")
    if problem := _problem(flags):
        parser.error(problem)
    return flags


def _problem(flags: argparse.Namespace) -> str | None:
    """What in these flags does not go together."""
    remote = flags.out.startswith("s3://")
    if not (flags.data or flags.url or flags.train or flags.val):
        return "give --data, --url, or --train and --val"
    if flags.data and flags.url:
        return "--data and --url exclude one another"
    if flags.url and not re.match("https?://", flags.url):
        return "--url must begin with http:// or https://; --data takes folders and s3://"
    if flags.url and "?" in flags.url:
        return f"--url {shown(flags.url)}: signed urls are given one by one, by --train, --val and --devkit"
    if "://" in (flags.data or "") and not flags.data.startswith("s3://"):
        return f"--data {shown(flags.data)}: takes folders and s3://bucket/prefix; --url takes http(s)://"
    if "://" in flags.out and not remote:
        return f"--out {shown(flags.out)}: must be a folder, or s3://bucket/prefix"
    if flags.devkit and flags.source != "imagenet":
        return f"--devkit: --from {flags.source} takes the classes from the names"
    if remote and flags.format != "shards":
        return f"--format {flags.format} writes to a local folder, not to {shown(flags.out)}"
    if remote != bool(flags.work_dir):
        return "--work_dir and --out s3://... belong together"
    if flags.format == "index" and (flags.resize or flags.source == "folder"):
        return "--format index copies nothing: it takes archives, and no --resize"
    return None


class Preparation:
    """One --out, from its beginning or where it was left. The journal says how far it is."""

    def __init__(self, flags: argparse.Namespace):
        self.flags = flags
        self.store = ObjectStore(flags.out) if flags.out.startswith("s3://") else None
        self.folder = expand_home(flags.work_dir or flags.out, "give an absolute path").absolute()
        self.manifest = FOLDER_MANIFEST if flags.format == "folder" else MANIFEST
        hashed = flags.source == "imagenet" and not flags.no_verify
        self.source = RawDataset(flags.source, find_parts(flags), hashed, flags.subset)
        self.settings = {
            "format": flags.format,
            "from": flags.source,
            "seed": flags.seed,
            "resize": {"short_side": flags.resize, "quality": flags.quality} if flags.resize else None,
            "shard_mib": flags.shard_mib,
            "inputs": self.source.bytes,
        }
        if self.source.listings:
            self.settings["names_and_sizes"] = self.source.listings
        if flags.format == "index":  # of which the archives are the shards
            parts = self.source.parts
            self.settings["paths"] = {s: str(Path(parts[s]).absolute()) for s in self._splits()}
        self.journal: dict[str, Any] = {"splits": {}}

    def run(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder):
            left = self._left()
            if self._is_complete():
                return
            self.source.read_classes()
            self._begin_or_continue(left)
            for split in self._splits():
                if "finished" not in self.journal["splits"].get(split, {}):
                    (self._index if self.flags.format == "index" else self._write)(split)
                if self.store is not None:
                    self._upload(split)
            self._finish()

    def _splits(self) -> list[str]:
        return [split for split in SPLITS if split in self.source.parts]

    # --- Beginning and end

    def _left(self) -> dict[str, Any] | None:
        """The journal of what was begun here. Raises ValueError where that was for another --out: it says
        what was uploaded, and that only there."""
        path = self.folder / JOURNAL
        left = read_json(path) if path.exists() else None
        if left is not None and left["splits"] and left.get("store") != self._store_url():
            raise ValueError(
                f"{self.folder} holds what was begun for --out {left.get('store') or self.folder}: go on with"
                f" that, give another {'--work_dir' if self.store else '--out'}, or remove what is there"
            )
        return left

    def _store_url(self) -> str | None:
        return None if self.store is None else self.store.url

    def _is_complete(self) -> bool:
        """Raises ValueError when what is there was made otherwise."""
        if self.store is None:
            path = self.folder / self.manifest
            content = path.read_bytes() if path.exists() else None
        else:
            content = self.store.read(self.manifest, MANIFEST_LIMIT)
        if content is None:
            return False
        about = {}
        with contextlib.suppress(ValueError):
            about = parse_json(content, self.manifest)
        if "settings" not in about:
            raise ValueError(f"{self.flags.out} holds a {self.manifest} of something else: give a new one")
        self._check_same(about["settings"])
        self._check_there(about["splits"])
        if (self.folder / JOURNAL).exists():  # killed at the very end
            self._remove_journal()
        print(f"{self.flags.out} is complete: nothing to do")
        self._say_how_to_train(about["splits"])
        return True

    def _check_there(self, splits: dict[str, Any]) -> None:
        """Raises ValueError where a shard, or an index, is gone since; a shard also when it is shorter."""
        if self.flags.format == "folder":
            return  # whose files are not listed
        wanted = {index_name(split): None for split in splits}
        wanted |= {shard["file"]: shard["bytes"] for about in splits.values() for shard in about["shards"]}
        stored = set() if self.store is None else set(self.store.list())
        for file, size in wanted.items():
            path = self.folder / file
            if file not in stored and not (path.is_file() and size in (None, path.stat().st_size)):
                raise ValueError(
                    f"{self.flags.out} was complete, and {file} is not what it was: remove what is there, and"
                    " begin again"
                )

    def _remove_journal(self) -> None:
        if self.store is not None:
            self.store.delete([JOURNAL])
        (self.folder / JOURNAL).unlink()

    def _begin_or_continue(self, left: dict[str, Any] | None) -> None:
        now = {
            "store": self._store_url(),
            "settings": self.settings,
            "versions": self.source.versions,
            "classes": self.source.classes,
        }
        if left is not None and left["splits"]:
            of_sources = {n: self.settings[n] for n in ("inputs", "names_and_sizes") if n in self.settings}
            self._check_same(left["settings"] | of_sources)
            self._check_verified(left["splits"])
            self._drop_changed(left)
            self.journal = left | now
            self._save()
            print(f"{self.folder} was begun: going on there", flush=True)
            return
        if left is not None and left["writing"]:  # stopped before anything was worth keeping
            for split in SPLITS:
                self._remove(split)
        if others := [file.name for file in self.folder.iterdir() if file.name[0] != "."]:
            raise ValueError(f"{self.folder} holds other files, as {others[0]}: give a new folder")
        if self.store is not None:
            self.store.probe()
            # Hidden: what a killed probe left, say. Ours: of a preparation whose --work_dir was lost.
            begun = self.store.read(JOURNAL) is not None
            others = [k for k in self.store.list() if k[0] != "." and not (begun and OURS.fullmatch(k))]
            if others:
                raise ValueError(f"{self.store.url} holds other objects, as {others[0]}: give a new prefix")
            self.store.write(JOURNAL, json.dumps({"settings": self.settings}).encode())
        self.journal = now | {"splits": {}, "uploaded": [], "writing": False}
        self._save()

    def _drop_changed(self, left: dict[str, Any]) -> None:
        """Forgets what was done of an archive that was replaced since: one that was cut short, for example.
        Raises ValueError where that can't be."""
        parts = left["settings"]["inputs"].keys() | self.source.parts.keys()
        done = {part for part in parts if "finished" in left["splits"].get(part, {})} | {"devkit"}
        changed = {part: why for part in parts if (why := self._change(part, left, part in done))}
        for part in changed.keys() & done:
            raise ValueError(f"{changed[part]} since {self.folder} was begun: remove that, and begin again")
        for part, why in changed.items():
            if left["splits"].pop(part, None):
                print(f"{part} is read anew: {why} since {self.folder} was begun", flush=True)
            self._remove(part)  # also of a split that failed, of which the journal has nothing

    def _change(self, part: str, left: dict[str, Any], done: bool) -> str | None:
        """Why what the journal says of a part does not hold any more."""
        version = self.source.versions.get(part)
        before = left["settings"]["inputs"].get(part), left["versions"].get(part)
        if left.get("classes") != self.source.classes:  # and with them the labels
            return "the list of classes changed"
        if before != (self.source.bytes.get(part), version):
            return f"{part} changed"
        if version is None and self.source.hashed and not done:
            # The MD5 will be of what is read now; what was written may have come from another file.
            return f"nothing says whether {part} changed"
        return None

    def _remove(self, split: str) -> None:
        """What was written of it."""
        for path in self.folder.iterdir():
            if OURS.fullmatch(path.name) and path.name.startswith(split):
                path.unlink()
        if self.flags.format == "folder":
            shutil.rmtree(self.folder / split, ignore_errors=True)

    def _begin_writing(self) -> None:
        """From now on a split's files in the folder are ours."""
        if not self.journal["writing"]:
            self.journal["writing"] = True
            self._save()

    def _check_same(self, found: dict[str, Any]) -> None:
        for name, value in self.settings.items():
            if found.get(name) != value:
                raise ValueError(
                    f"{self.flags.out} was begun otherwise: {name} was {found.get(name)}, and is now {value}."
                    f" Give another --out{' and --work_dir' if self.store else ''}, or remove what is there"
                )

    def _check_verified(self, splits: dict[str, Any]) -> None:
        """Raises ValueError where one was finished without its MD5, which would never be checked then."""
        unchecked = [split for split, about in splits.items() if not about.get("verified", True)]
        if unchecked and self.source.hashed:
            raise ValueError(
                f"{unchecked[0]} was finished under --no_verify: go on with --no_verify, or remove"
                f" {self.folder} and begin again"
            )

    def _save(self) -> None:
        replace(self.folder / JOURNAL, json.dumps(self.journal).encode())

    def _finish(self) -> None:
        finished = {split: about["finished"] for split, about in self.journal["splits"].items()}
        odd = [{"split": s, **image} for s, about in self.journal["splits"].items() for image in about["odd"]]
        manifest = {
            "format": FORMAT,
            "kind": self.flags.format,
            "name": self._name(),
            "seed": self.flags.seed,
            "resize": self.settings["resize"],
            "classes": self.source.classes,
            "splits": finished,
            "reencoded": odd,
            "settings": self.settings,
        }
        content = (json.dumps(manifest, indent=1) + "\n").encode()
        for split in finished:
            (self.folder / part_name(split)).unlink(missing_ok=True)
        if self.store is None:
            replace(self.folder / self.manifest, content)
        else:
            made = {shard["file"] for about in finished.values() for shard in about["shards"]}
            made |= {index_name(split) for split in finished}
            # Of one that was begun here, with more shards: readers of train-*.tar would take them, too.
            self.store.delete([key for key in self.store.list() if OURS.fullmatch(key) and key not in made])
            self.store.write(self.manifest, content)
        self._remove_journal()
        counts = ", ".join(f"{about['images']:,} images of {split}" for split, about in finished.items())
        print(f"{self.flags.out} is complete: {counts}, {len(self.source.classes):,} classes")
        for image in odd:
            print(f"recoded as RGB JPEG: {image['split']} {image['key']} ({image['why']})")
        if absent := [split for split in SPLITS if split not in finished]:
            print(f"there is no {absent[0]}: training needs both splits")
        self._say_how_to_train(finished)

    def _say_how_to_train(self, splits: dict[str, Any]) -> None:
        """An index names files outside of its folder, which a training reads only if it is told so."""
        if self.flags.format == "folder" or not set(SPLITS) <= splits.keys():
            return
        out = self.store.url if self.store else str(self.folder)
        words = f"--data {shlex.quote(out)}"
        if self.flags.format == "index":
            words += f" {data_root_flag(self.settings['paths'].values())}"
        print(printable(f"train with: {words}"))

    def _name(self) -> str:
        if self.flags.source == "imagenet":
            return "imagenet"
        flags = self.flags
        return Path(shown(flags.data or flags.url or flags.train or flags.val)).stem or "images"

    def _upload(self, split: str) -> None:
        """Shard by shard, each of which then makes room here."""
        sizes = {s["file"]: s["bytes"] for s in self.journal["splits"][split]["finished"]["shards"]}
        done = 0
        with Reading(split, 0, 0, sum(sizes.values()), "uploaded") as progress:
            for file in (*sizes, index_name(split)):
                if file not in self.journal["uploaded"]:
                    self.store.upload(self.folder / file, file)
                    self.journal["uploaded"].append(file)
                    self._save()
                (self.folder / file).unlink(missing_ok=True)
                done += sizes.get(file, 0)
                progress.tell(done)
        print(f"{split} is uploaded to {self.store.url}", flush=True)

    # --- One split

    def _index(self, split: str) -> None:
        path = Path(self.settings["paths"][split])
        with Reading(split, 0, 0, self.source.bytes[split]) as progress:
            if self.source.hashed:
                with self.source.open(split, hashed=True) as (_, stream):
                    stream.watch = progress.tell
                    self.source.check_md5(split, stream)
            began = time.perf_counter()
            classes = {}
            for listing in scan(path):
                name = (listing.archive or "").rpartition("/")[2]
                if name in classes:
                    raise ValueError(f"{path}: {listing.archive}: {SECOND_CLASS}")
                classes[name] = index_rows(listing, self.source.labels[split], path)
                progress.tell(int(listing.offsets[-1]))
        if not classes:
            raise ValueError(f"{path} holds no images")
        rows = np.concatenate(list(classes.values()))
        self.source.check_counts(split, len(classes), len(rows))
        shard = {"file": str(path), "bytes": path.stat().st_size, "images": len(rows), "sha256": None}
        self._begin_writing()
        digest = write_index(self.folder, split, rows)
        entry = {"images": len(rows), "index_sha256": digest, "shards": [shard]}
        self._finish_split(split, entry, [])
        print(f"{split}: {len(rows):,} images indexed in {time.perf_counter() - began:.2f} s", flush=True)

    def _write(self, split: str) -> None:
        """In one pass, or the rest of it."""
        left = self.journal["splits"].get(split)
        with contextlib.ExitStack() as stack:
            groups, stream = stack.enter_context(self.source.open(split, self.source.hashed))
            if left:
                left["place"] = Position(*left["place"])
            begin = left["place"] if left else Position()
            # ImageNet's own archives are known by their MD5.
            strict = self.flags.source != "imagenet" and not self.flags.no_verify
            images = recoded(
                batches(groups, self.source.labels[split], begin),
                self.flags.resize,
                self.flags.quality,
                strict,
            )
            stack.callback(images.close)  # ends its threads
            first = [] if left else list(islice(images, SAMPLED))
            left = left or self._beginning(split, first)
            self._check_room(left["bytes"] - left["written"])
            self._begin_writing()
            writer = self._writer(split, left)
            stack.callback(writer.close)
            total = self.source.bytes[split]
            progress = stack.enter_context(Reading(split, writer.count, left["read"], total))
            if stream is not None:
                stream.watch = progress.tell
            committed_s = time.monotonic()
            for batch in chain(first, images):
                writer.write(batch.images)
                left["place"] = batch.position
                left["odd"] += batch.odd
                left["read"] += batch.bytes
                left["written"] += sum(len(image.data) for image in batch.images)
                progress.show(writer.count, left["read"])
                if time.monotonic() > committed_s + JOURNAL_S:
                    self.journal["splits"][split] = left | {"writer": writer.commit()}
                    self._save()
                    committed_s = time.monotonic()
            self.source.check_counts(split, left["place"].group + 1, writer.count)
            try:
                self.source.check_md5(split, stream)
            except ValueError:
                if self.journal["splits"].pop(split, None):  # what came out of it counts for nothing
                    self._save()
                raise
            self._finish_split(split, writer.finish(), left["odd"])
            progress.end(writer.count, left["read"])

    def _beginning(self, split: str, first: list[ImageBatch]) -> dict[str, Any]:
        """Of a split that is not begun. What its first images become tells how large it will be."""
        before = sum(batch.bytes for batch in first)
        after = sum(len(image.data) for batch in first for image in batch.images)
        if not before:
            raise ValueError(f"{shown(self.source.parts[split])} holds no images")
        expected = math.ceil(self.source.bytes[split] * after / before)
        shards = math.ceil(expected / (self.flags.shard_mib * 2**20))
        start = {"place": Position(), "odd": [], "read": 0, "written": 0, "writer": None}
        return start | {"bytes": expected, "shards": shards}

    def _check_room(self, needed: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise ValueError(
                f"{self.folder} needs {needed / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free: make"
                " room, or give another folder"
            )

    def _writer(self, split: str, left: dict[str, Any]) -> ShardWriter | FolderWriter:
        if self.flags.format == "folder":
            return FolderWriter(self.folder, split, left["writer"])
        if left["written"] > 2**30:  # for which it is silent for a second and more
            print(f"{split}: reading {left['written'] / 2**30:,.1f} GiB of shards again", flush=True)
        return ShardWriter(self.folder, split, left["shards"], self.flags.seed, left["writer"])

    def _finish_split(self, split: str, entry: dict[str, Any], odd: list[dict[str, str]]) -> None:
        self.journal["splits"][split] = {"finished": entry, "odd": odd, "verified": self.source.hashed}
        self._save()


def find_parts(flags: argparse.Namespace) -> dict[str, str]:
    """Paths or urls of train, val and devkit, of those that there are."""
    base, names, found = flags.url or os.path.expanduser(flags.data or ""), NAMES[flags.source], {}
    for part, name in names.items():
        given, beside = getattr(flags, part), base and f"{base.rstrip('/')}/{name}"
        if given or (beside and (flags.url or exists(beside))):
            found[part] = given or beside
    if not {"train", "val"} & found.keys():
        raise ValueError(f"--data {shown(base)}: there is neither {names['train']} nor {names['val']}")
    if flags.source == "imagenet" and "devkit" not in found:
        raise ValueError(
            f"{DEVKIT} is missing{f' in {shown(base)}' if base else ''}: it has the labels of val, and the"
            " names of the classes. Give --devkit; class tars without one are read by --from tar"
        )
    if flags.format == "index" and (remote := [where for where in found.values() if "://" in where]):
        raise ValueError(f"--format index takes files of this host, not {shown(remote[0])}")
    return found


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Alone in this folder; the kernel opens the lock when its holder dies, however that is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process prepares images in {folder}: wait for it") from None
        yield
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(run_command(main))
