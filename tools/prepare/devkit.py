"""ILSVRC2012's three archives: their names and MD5 sums, and the content of the development kit."""

import gzip
import io
import re
import tarfile
import zlib

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
LARGEST_DEVKIT_BYTES = 2**28  # another archive that is given in its place may not fit into memory


def read_devkit(stream: Stream, subset: bool = False) -> tuple[dict[str, str], np.ndarray]:
    """Reads DEVKIT: the words of each class by its WordNet id, sorted in the order of the labels, and the
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
    counts = np.bincount(labels, minlength=len(wnids))
    for what, found, published in (
        (f"{stream.where} has {{}} classes", len(wnids), CLASSES),
        (f"{truth} has {{}} lines", len(labels), CLASSES * VAL_PER_CLASS),
        (f"{truth} has {{}} images of class {counts.argmax()}", counts.max(), VAL_PER_CLASS),
    ):
        if found != published and not subset:
            what = f"{what.format(f'{found:,}')} where ILSVRC2012 has {published:,}"
            raise ValueError(f"{what}: --subset, if that is meant")
    return words, labels


def _unpacked(stream: Stream) -> dict[str, bytes]:
    """Reads META and TRUTH, as far as the archive has them."""
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
    """Reads the classes, meta.mat's synsets without children: wnid by id, and words by wnid, sorted.

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
