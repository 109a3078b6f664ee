"""ILSVRC2012's three archives: their names and MD5 sums, and the labels of the validation images."""

import gzip
import io
import re
import tarfile
import zlib
from collections.abc import Sequence

import numpy as np

from tools.prepare.archives import GET_AGAIN, Stream

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
VAL_NAME = re.compile(r"ILSVRC2012_val_(\d{8})(\.JPEG)?")
LARGEST_DEVKIT_BYTES = 2**28  # another archive that is given in its place may not fit into memory


def read_devkit(stream: Stream, subset: bool = False) -> tuple[dict[str, str], np.ndarray]:
    """Read DEVKIT: the words of each class by its WordNet id, sorted in the order of the labels, and the
    labels of the validation images, int64 [images], in the order of their names.

    Unless `subset`, it must have CLASSES with VAL_PER_CLASS images each. Raises ValueError that names the
    archive when a file is missing, damaged or inconsistent.
    """
    files = _unpacked(stream)
    if missing := [name for name in (META, TRUTH) if name not in files]:
        raise ValueError(f"{stream.where} has no {missing[0]}: give {DEVKIT} (task 1 and 2)")
    wnids, words = _leaves(f"{stream.where}: {META}", files[META])
    label_of = {wnid: label for label, wnid in enumerate(words)}
    truth, lines = f"{stream.where}: {TRUTH}", files[TRUTH].decode(errors="replace").split()
    if unknown := set(lines) - {str(i) for i in wnids}:
        raise ValueError(f"{truth} has the id {min(unknown)!a}, which is no class of {META}; {GET_AGAIN}")
    labels = np.array([label_of[wnids[int(line)]] for line in lines], dtype=np.int64)
    if not subset:
        check_classes(stream.where, len(wnids))
        _check_counts(truth, labels)
    return words, labels


def read_val_labels(stream: Stream, wnids: Sequence[str], subset: bool = False) -> np.ndarray:
    """Read a list of the validation images' classes: labels, int64 [images], in the order of the names.

    A line holds the WordNet id of a class, or its index in `wnids`, after the image's name or alone. Raises
    ValueError that names the line.
    """
    label_of = {str(label): label for label in range(len(wnids))}
    label_of |= {wnid: label for label, wnid in enumerate(wnids)}
    labels: dict[int, int] = {}  # by the image's number, from 1
    text = stream.read(LARGEST_DEVKIT_BYTES).decode(errors="replace")
    rows = [re.split(r"[,\s]+", line) for line in text.splitlines()]
    rows = [row for row in rows if row[0] and row[0] != "ImageId"]  # a header of Kaggle's
    classes = [row[1] if len(row) > 1 and VAL_NAME.fullmatch(row[0]) else row[0] for row in rows]
    if not rows:
        raise ValueError(f"{stream.where} holds no labels")
    if "0" not in classes and str(len(wnids)) in classes and all(name.isdecimal() for name in classes):
        raise ValueError(
            f"{stream.where} numbers its classes from 1, as the development kit does in an order of its own:"
            f" give --devkit {DEVKIT}, or a list of WordNet ids"
        )
    for number, (row, name) in enumerate(zip(rows, classes, strict=True), 1):
        if name not in label_of:
            where = f"{stream.where} line {number}"
            raise ValueError(f"{where}: {name} is none of the {len(wnids):,} classes in {TRAIN}")
        image = VAL_NAME.fullmatch(row[0])
        labels[int(image[1]) if image else number] = label_of[name]
    if missing := set(range(1, len(labels) + 1)) - labels.keys():
        raise ValueError(f"{stream.where} has no label for validation image {min(missing)}")
    in_order = np.array([labels[number] for number in sorted(labels)], dtype=np.int64)
    if not subset:
        _check_counts(stream.where, in_order)
    return in_order


def check_classes(where: str, count: int) -> None:
    """Raise ValueError for another number of classes than ILSVRC2012's."""
    _check(f"{where} has {{}} classes", count, CLASSES)


def _check_counts(where: str, labels: np.ndarray) -> None:
    """Raise ValueError for other numbers of validation images than ILSVRC2012's."""
    counts = np.bincount(labels, minlength=CLASSES)
    _check(f"{where} has {{}} lines", len(labels), CLASSES * VAL_PER_CLASS)
    _check(f"{where} has {{}} images of class {counts.argmax()}", int(counts.max()), VAL_PER_CLASS)


def _check(what: str, count: int, published: int) -> None:
    if count != published:
        what = f"{what.format(f'{count:,}')} where ILSVRC2012 has {published:,}"
        raise ValueError(f"{what}: --subset, if that is meant")


def _unpacked(stream: Stream) -> dict[str, bytes]:
    """Read META and TRUTH, as far as the archive has them."""
    files = {}
    try:
        content = gzip.decompress(stream.read(LARGEST_DEVKIT_BYTES))  # whole, so that its sum is checked
        with tarfile.open(fileobj=io.BytesIO(content)) as kit:
            for member in kit:
                name = member.name.partition("/")[2]  # all files lie in one folder
                if name in (META, TRUTH) and (file := kit.extractfile(member)):
                    files[name] = file.read()
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise ValueError(f"{stream.where} is no gzip file, or damaged ({error}); {GET_AGAIN}") from None
    return files


def _leaves(where: str, content: bytes) -> tuple[dict[int, str], dict[str, str]]:
    """Read the classes, meta.mat's synsets without children: wnid by id, and words by wnid, sorted.

    Nothing in the file is executed: MATLAB's functions and objects are read as data.
    """
    from scipy.io import loadmat

    try:
        synsets = loadmat(io.BytesIO(content), squeeze_me=True, variable_names=["synsets"])["synsets"]
        fields = ("ILSVRC2012_ID", "WNID", "words", "num_children")
        rows = zip(*(np.atleast_1d(synsets)[field] for field in fields), strict=True)
        leaves = [(int(i), str(wnid), str(words)) for i, wnid, words, children in rows if children == 0]
    except Exception as error:  # loadmat's errors have no common class
        raise ValueError(
            f"{where} is not readable as the list of synsets ({type(error).__name__}); {GET_AGAIN}"
        ) from None
    wnids = {i: wnid for i, wnid, _ in leaves}
    names = {wnid: words for _, wnid, words in leaves}
    if not len(wnids) == len(names) == len(leaves) > 0 or not all(re.fullmatch(r"n\d{8}", n) for n in names):
        raise ValueError(f"{where} has classes without a WordNet id or id of their own; {GET_AGAIN}")
    return wnids, dict(sorted(names.items()))
