"""Names and MD5 sums of the three archives of ILSVRC2012, and readers of the validation labels."""

import gzip
import io
import re
import tarfile
import zlib
from collections.abc import Sequence

import numpy as np

from tools.prepare.archives import GET_AGAIN, Stream

TRAIN = "ILSVRC2012_img_train.tar"  # contains <wnid>.tar, which contain <wnid>_<number>.JPEG
VAL = "ILSVRC2012_img_val.tar"  # contains ILSVRC2012_val_<number>.JPEG
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
LARGEST_DEVKIT_BYTES = 2**28  # larger archives can't be the development kit, and may not fit into memory


def read_devkit(stream: Stream, subset: bool = False) -> tuple[dict[str, str], np.ndarray]:
    """Read the development kit.

    Args:
        stream: the archive.
        subset: True to accept counts other than CLASSES with VAL_PER_CLASS images each.

    Returns:
        The words of each class by WordNet id, in label order; and the labels of the validation images, int64
        [images], in the order of the image names.

    Raises:
        ValueError: a file is missing, damaged or inconsistent. The message names the archive.
    """
    files = _unpacked(stream)
    if missing := [name for name in (META, TRUTH) if name not in files]:
        raise ValueError(f"{stream.where} does not contain {missing[0]}. Give {DEVKIT} (task 1 and 2).")
    wnids, words = _leaves(f"{stream.where}: {META}", files[META])
    label_of = {wnid: label for label, wnid in enumerate(words)}
    truth, lines = f"{stream.where}: {TRUTH}", files[TRUTH].decode(errors="replace").split()
    if unknown := set(lines) - {str(i) for i in wnids}:
        raise ValueError(
            f"{truth} has the id {min(unknown)!a}, which is not a class of {META}. Fix: {GET_AGAIN}"
        )
    labels = np.array([label_of[wnids[int(line)]] for line in lines], dtype=np.int64)
    if not subset:
        check_classes(stream.where, len(wnids))
        _check_counts(truth, labels)
    return words, labels


def read_val_labels(stream: Stream, wnids: Sequence[str], subset: bool = False) -> np.ndarray:
    """Read the labels of the validation images from a list.

    A line contains the WordNet id of a class or its index in `wnids`, optionally after the image's name.

    Returns:
        The labels, int64 [images], in the order of the image names.

    Raises:
        ValueError: a line is wrong. The message names the line.
    """
    label_of = {str(label): label for label in range(len(wnids))}
    label_of |= {wnid: label for label, wnid in enumerate(wnids)}
    labels: dict[int, int] = {}  # labels by image number, which starts at 1
    text = stream.read(LARGEST_DEVKIT_BYTES).decode(errors="replace")
    rows = [re.split(r"[,\s]+", line) for line in text.splitlines()]
    rows = [row for row in rows if row[0] and row[0] != "ImageId"]  # skip the header of Kaggle's file
    classes = [row[1] if len(row) > 1 and VAL_NAME.fullmatch(row[0]) else row[0] for row in rows]
    if not rows:
        raise ValueError(f"{stream.where} contains no labels")
    if "0" not in classes and str(len(wnids)) in classes and all(name.isdecimal() for name in classes):
        raise ValueError(
            f"{stream.where} numbers its classes from 1, like the development kit, which orders classes"
            f" differently. Give --devkit {DEVKIT}, or a list of WordNet ids."
        )
    for number, (row, name) in enumerate(zip(rows, classes, strict=True), 1):
        if name not in label_of:
            where = f"{stream.where} line {number}"
            raise ValueError(f"{where}: {name} is not one of the {len(wnids):,} classes in {TRAIN}")
        image = VAL_NAME.fullmatch(row[0])
        labels[int(image[1]) if image else number] = label_of[name]
    if missing := set(range(1, len(labels) + 1)) - labels.keys():
        raise ValueError(f"{stream.where} has no label for validation image {min(missing)}")
    in_order = np.array([labels[number] for number in sorted(labels)], dtype=np.int64)
    if not subset:
        _check_counts(stream.where, in_order)
    return in_order


def check_classes(where: str, count: int) -> None:
    """Raise ValueError unless the number of classes is the same as in ILSVRC2012."""
    _check(f"{where} has {{}} classes", count, CLASSES)


def _check_counts(where: str, labels: np.ndarray) -> None:
    """Raise ValueError unless the numbers of validation images are the same as in ILSVRC2012."""
    counts = np.bincount(labels, minlength=CLASSES)
    _check(f"{where} has {{}} lines", len(labels), CLASSES * VAL_PER_CLASS)
    _check(f"{where} has {{}} images of class {counts.argmax()}", int(counts.max()), VAL_PER_CLASS)


def _check(template: str, count: int, published: int) -> None:
    if count != published:
        message = f"{template.format(f'{count:,}')}, but ILSVRC2012 has {published:,}"
        raise ValueError(f"{message}. Add --subset if this is intended.")


def _unpacked(stream: Stream) -> dict[str, bytes]:
    """Read the files META and TRUTH, if the archive contains them."""
    files = {}
    try:
        content = gzip.decompress(
            stream.read(LARGEST_DEVKIT_BYTES)
        )  # read the file completely, so that its checksum is verified
        with tarfile.open(fileobj=io.BytesIO(content)) as kit:
            for member in kit:
                name = member.name.partition("/")[2]  # all files are in one folder
                if name in (META, TRUTH) and (file := kit.extractfile(member)):
                    files[name] = file.read()
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise ValueError(
            f"{stream.where} is not a gzip file or is damaged ({error}). Fix: {GET_AGAIN}"
        ) from None
    return files


def _leaves(where: str, content: bytes) -> tuple[dict[int, str], dict[str, str]]:
    """Read the classes from meta.mat. Classes are the synsets without children.

    Reading the file executes no code, because MATLAB's functions and objects are read as data.

    Returns:
        The WordNet id of each ILSVRC2012 id; and the words of each WordNet id, sorted by WordNet id.
    """
    from scipy.io import loadmat

    try:
        synsets = loadmat(io.BytesIO(content), squeeze_me=True, variable_names=["synsets"])["synsets"]
        fields = ("ILSVRC2012_ID", "WNID", "words", "num_children")
        rows = zip(*(np.atleast_1d(synsets)[field] for field in fields), strict=True)
        leaves = [(int(i), str(wnid), str(words)) for i, wnid, words, children in rows if children == 0]
    except Exception as error:  # errors of loadmat have no common base class
        raise ValueError(
            f"{where} can't be read as a list of synsets ({type(error).__name__}). Fix: {GET_AGAIN}"
        ) from None
    wnids = {i: wnid for i, wnid, _ in leaves}
    names = {wnid: words for _, wnid, words in leaves}
    if not len(wnids) == len(names) == len(leaves) > 0 or not all(re.fullmatch(r"n\d{8}", n) for n in names):
        raise ValueError(
            f"{where} has classes without a unique WordNet id or ILSVRC2012 id. Fix: {GET_AGAIN}"
        )
    return wnids, dict(sorted(names.items()))
