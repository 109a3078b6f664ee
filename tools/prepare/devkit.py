"""Names and MD5 sums of ILSVRC2012's three archives, and readers for the validation labels."""

import gzip
import io
import re
import tarfile
import zlib
from collections.abc import Sequence

import numpy as np

from tools.prepare.archives import GET_AGAIN, Stream

TRAIN = "ILSVRC2012_img_train.tar"  # contains <wnid>.tar archives of <wnid>_<number>.JPEG
VAL = "ILSVRC2012_img_val.tar"  # contains ILSVRC2012_val_<number>.JPEG files
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
MD5 = {  # from https://image-net.org/challenges/LSVRC/2012/2012-downloads.php, as in torchvision
    "train": "1d675b47d978889d74fa0da5fadfb00e",
    "val": "29b22e2961454d5413ddabcf34fc5622",
    "devkit": "fa75699e90414af021442c21a62c3abf",
}
CLASSES = 1000
VAL_PER_CLASS = 50

META_FILE = "data/meta.mat"
LABELS_FILE = "data/ILSVRC2012_validation_ground_truth.txt"
VAL_NAME = re.compile(r"ILSVRC2012_val_(\d{8})(\.JPEG)?")
LARGEST_DEVKIT_BYTES = 2**28  # larger archives are not the development kit, and may not fit into memory


def read_devkit(stream: Stream, subset: bool = False) -> tuple[dict[str, str], np.ndarray]:
    """Read the classes and the validation labels from the development kit.

    Args:
        stream: The development kit's archive.
        subset: True to accept counts other than CLASSES classes with VAL_PER_CLASS images each.

    Returns:
        A tuple of the words and the labels. The words describe each class by WordNet id, in label order. The
        validation labels, int64 [images], are in image name order.

    Raises:
        ValueError: If a file is missing, damaged or inconsistent. The message contains the archive's name.
    """
    files = _unpack(stream)
    if missing := [name for name in (META_FILE, LABELS_FILE) if name not in files]:
        raise ValueError(f"{stream.where} does not contain {missing[0]}. Pass {DEVKIT} (tasks 1 and 2).")
    wnid_of_id, words = _read_classes(f"{stream.where}: {META_FILE}", files[META_FILE])
    label_of = {wnid: label for label, wnid in enumerate(words)}
    truth_name, ids = f"{stream.where}: {LABELS_FILE}", files[LABELS_FILE].decode(errors="replace").split()
    if unknown := set(ids) - set(map(str, wnid_of_id)):
        problem = f"the id {min(unknown)!a}, which is not a class in {META_FILE}"
        raise ValueError(f"{truth_name} contains {problem}. {GET_AGAIN}.")
    labels = np.array([label_of[wnid_of_id[int(id_)]] for id_ in ids], dtype=np.int64)
    if not subset:
        check_classes(stream.where, len(wnid_of_id))
        _check_counts(truth_name, labels)
    return words, labels


def read_val_labels(stream: Stream, wnids: Sequence[str], subset: bool = False) -> np.ndarray:
    """Read the validation labels from a list.

    Each line contains a class's WordNet id or its index in `wnids`, optionally after the image's name.

    Returns:
        The labels, int64 [images], in image name order.

    Raises:
        ValueError: If a line is wrong. The message contains the line number.
    """
    label_of = {str(label): label for label in range(len(wnids))}
    label_of |= {wnid: label for label, wnid in enumerate(wnids)}
    labels: dict[int, int] = {}  # labels by image number, starting at 1
    content = stream.read(LARGEST_DEVKIT_BYTES).decode(errors="replace")
    rows = [re.split(r"[,\s]+", line) for line in content.splitlines()]
    rows = [row for row in rows if row[0] and row[0] != "ImageId"]  # skips the header line of Kaggle's file
    classes = [row[1] if len(row) > 1 and VAL_NAME.fullmatch(row[0]) else row[0] for row in rows]
    if not rows:
        raise ValueError(f"{stream.where} contains no labels. Write one label per line.")
    if "0" not in classes and str(len(wnids)) in classes and all(name.isdecimal() for name in classes):
        problem = "numbers the classes from 1, like the development kit, which orders the classes differently"
        remedy = f"Pass --devkit {DEVKIT}, or a list of WordNet ids."
        raise ValueError(f"{stream.where} {problem}. {remedy}")
    for line_number, (row, name) in enumerate(zip(rows, classes, strict=True), 1):
        if name not in label_of:
            where = f"{stream.where} line {line_number}"
            raise ValueError(f"{where}: {name} is not one of the {len(wnids):,} classes in {TRAIN}")
        image_match = VAL_NAME.fullmatch(row[0])
        image_number = int(image_match[1]) if image_match else line_number
        labels[image_number] = label_of[name]
    if missing := set(range(1, len(labels) + 1)) - labels.keys():
        raise ValueError(f"{stream.where} has no label for validation image {min(missing)}")
    in_order = np.array([labels[number] for number in sorted(labels)], dtype=np.int64)
    if not subset:
        _check_counts(stream.where, in_order)
    return in_order


def check_classes(where: str, count: int) -> None:
    """Raise ValueError unless the number of classes matches ILSVRC2012."""
    _check_count(f"{where} contains {{}} classes", count, CLASSES)


def _check_counts(where: str, labels: np.ndarray) -> None:
    """Raise ValueError unless the number of validation images per class matches ILSVRC2012."""
    counts = np.bincount(labels, minlength=CLASSES)
    _check_count(f"{where} contains {{}} lines", len(labels), CLASSES * VAL_PER_CLASS)
    _check_count(f"{where} contains {{}} images of class {counts.argmax()}", int(counts.max()), VAL_PER_CLASS)


def _check_count(template: str, count: int, published: int) -> None:
    if count != published:
        message = f"{template.format(f'{count:,}')}, but ILSVRC2012 has {published:,}"
        raise ValueError(f"{message}. Add --subset to accept a subset.")


def _unpack(stream: Stream) -> dict[str, bytes]:
    """Return the contents of the files META_FILE and LABELS_FILE, if the archive contains them."""
    files = {}
    try:
        # Decompress the whole file, so that its checksum is verified.
        content = gzip.decompress(stream.read(LARGEST_DEVKIT_BYTES))
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            for member in archive:
                name = member.name.partition("/")[2]  # all files are in a single folder
                if name in (META_FILE, LABELS_FILE) and (file := archive.extractfile(member)):
                    files[name] = file.read()
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise ValueError(f"{stream.where} is damaged or is not a gzip file ({error}). {GET_AGAIN}.") from None
    return files


def _read_classes(where: str, content: bytes) -> tuple[dict[int, str], dict[str, str]]:
    """Read the classes, which are the synsets without children, from meta.mat.

    Reading meta.mat executes no code, because MATLAB's functions and objects are read as data.

    Returns:
        A tuple of two mappings: from ILSVRC2012 ids to WordNet ids, and from WordNet ids, sorted, to words.
    """
    from scipy.io import loadmat

    try:
        synsets = loadmat(io.BytesIO(content), squeeze_me=True, variable_names=["synsets"])["synsets"]
        fields = ("ILSVRC2012_ID", "WNID", "words", "num_children")
        synset_rows = zip(*(np.atleast_1d(synsets)[field] for field in fields), strict=True)
        leaf_rows = [row[:3] for row in synset_rows if row[3] == 0]
        leaves = [(int(id_), str(wnid), str(words)) for id_, wnid, words in leaf_rows]
    except Exception as error:  # loadmat's errors have no common base class
        problem = f"can't be read as a list of synsets ({type(error).__name__})"
        raise ValueError(f"{where} {problem}. {GET_AGAIN}.") from None
    wnids = {id_: wnid for id_, wnid, _ in leaves}
    names = {wnid: words for _, wnid, words in leaves}
    are_unique = len(wnids) == len(names) == len(leaves) > 0
    if not are_unique or not all(re.fullmatch(r"n\d{8}", wnid) for wnid in names):
        problem = "contains classes without a unique WordNet id or ILSVRC2012 id"
        raise ValueError(f"{where} {problem}. {GET_AGAIN}.")
    return wnids, dict(sorted(names.items()))
