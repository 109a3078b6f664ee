"""ILSVRC2012's three archives: their names and MD5 sums, and the content of the development kit."""

import io
import re
import zlib
from dataclasses import dataclass

import numpy as np

from tools.prepare.archives import members
from tools.prepare.inputs import GET_AGAIN, Input, from_bytes

TRAIN = "ILSVRC2012_img_train.tar"  # holds <wnid>.tar, which hold <wnid>_<number>.JPEG
VAL = "ILSVRC2012_img_val.tar"  # holds ILSVRC2012_val_<number>.JPEG
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
MD5 = {  # https://image-net.org/challenges/LSVRC/2012/2012-downloads.php, also in torchvision
    "train": "1d675b47d978889d74fa0da5fadfb00e",
    "val": "29b22e2961454d5413ddabcf34fc5622",
    "devkit": "fa75699e90414af021442c21a62c3abf",
}
CLASSES = 1000
VAL_PER_CLASS = 50

META = "data/meta.mat"
TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"
LARGEST_DEVKIT_BYTES = 2**28  # compressed, and uncompressed


@dataclass(frozen=True)
class Devkit:
    """The classes, and the labels of the validation images."""

    classes: list[tuple[str, str]]  # WordNet id and words, sorted by id: the order of the labels
    val_labels: np.ndarray  # int64 [images], in the order of the sorted file names

    @classmethod
    def read(cls, stream: Input, subset: bool = False) -> "Devkit":
        """Reads DEVKIT. Unless `subset`, it must have CLASSES with VAL_PER_CLASS images each.

        Raises ValueError, with the archive's name, when a file is missing, damaged or inconsistent.
        """
        files = _unpacked(stream)
        missing = [name for name in (META, TRUTH) if name not in files]
        if missing:
            raise ValueError(f"{stream.where} has no {missing[0]}: give {DEVKIT} (task 1 and 2)")
        wnids, names = _leaves(f"{stream.where}: {META}", files[META])
        label_of = {wnid: label for label, wnid in enumerate(sorted(wnids.values()))}
        ids = _numbers(f"{stream.where}: {TRUTH}", files[TRUTH])
        if unknown := set(ids) - wnids.keys():
            raise ValueError(
                f"{stream.where}: {TRUTH} has the id {min(unknown)}, which is no class of {META}; {GET_AGAIN}"
            )
        labels = np.array([label_of[wnids[i]] for i in ids], dtype=np.int64)
        if not subset:
            _check_counts(stream.where, labels, len(wnids))
        return cls([(wnid, names[wnid]) for wnid in label_of], labels)


def _unpacked(stream: Input) -> dict[str, bytes]:
    """Reads META and TRUTH, as far as the archive has them."""
    packed = stream.read(LARGEST_DEVKIT_BYTES)
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS + 16)  # gzip
    try:
        content = unpacker.decompress(packed, LARGEST_DEVKIT_BYTES)
    except zlib.error as error:
        raise ValueError(f"{stream.where} is no gzip file, or damaged ({error}); {GET_AGAIN}") from None
    if not unpacker.eof:
        raise ValueError(
            f"{stream.where} is truncated, or larger than {LARGEST_DEVKIT_BYTES:,} bytes when unpacked;"
            f" {GET_AGAIN}"
        )
    files = {}
    for member in members(from_bytes(stream.where, content)):
        name = member.name.partition("/")[2]  # all files lie in one folder
        if name in (META, TRUTH):
            files[name] = member.read()
    return files


def _leaves(where: str, content: bytes) -> tuple[dict[int, str], dict[str, str]]:
    """Reads the classes, which are meta.mat's synsets without children: wnid by id, and words by wnid.

    Nothing in the file is executed: MATLAB's functions and objects are read as data.
    """
    from scipy.io import loadmat

    try:
        synsets = loadmat(io.BytesIO(content), squeeze_me=True, variable_names=["synsets"])["synsets"]
        synsets = np.atleast_1d(synsets)
        columns = (synsets[field] for field in ("ILSVRC2012_ID", "WNID", "words", "num_children"))
        rows = [
            (int(i), str(wnid), str(words))
            for i, wnid, words, children in zip(*columns, strict=True)
            if children == 0
        ]
    except Exception as error:  # loadmat's errors have no common class
        raise ValueError(
            f"{where} is not readable as the list of synsets ({type(error).__name__}); {GET_AGAIN}"
        ) from None
    wnids = {i: wnid for i, wnid, _ in rows}
    names = {wnid: words for _, wnid, words in rows}
    if not len(wnids) == len(names) == len(rows) > 0 or not all(re.fullmatch(r"n\d{8}", n) for n in names):
        raise ValueError(f"{where} has classes without a WordNet id or id of their own; {GET_AGAIN}")
    return wnids, names


def _numbers(where: str, content: bytes) -> list[int]:
    lines = content.decode(errors="replace").split()
    if not all(line.isascii() and line.isdigit() and len(line) < 8 for line in lines):
        raise ValueError(f"{where} has lines that are no numbers; {GET_AGAIN}")
    return [int(line) for line in lines]


def _check_counts(where: str, labels: np.ndarray, classes: int) -> None:
    if classes != CLASSES:
        raise ValueError(
            f"{where} has {classes:,} classes where ILSVRC2012 has {CLASSES:,}: --subset, if that is meant"
        )
    if len(labels) != CLASSES * VAL_PER_CLASS:
        raise ValueError(
            f"{where}: {TRUTH} has {len(labels):,} lines where ILSVRC2012 has {CLASSES * VAL_PER_CLASS:,}:"
            " --subset, if that is meant"
        )
    counts = np.bincount(labels, minlength=CLASSES)
    if (counts != VAL_PER_CLASS).any():
        label = int(np.argmax(counts != VAL_PER_CLASS))
        raise ValueError(
            f"{where}: {TRUTH} has {counts[label]} images of class {label} where ILSVRC2012 has"
            f" {VAL_PER_CLASS} of each: --subset, if that is meant"
        )
