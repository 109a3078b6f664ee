"""Names and MD5 sums of ILSVRC2012's three archives, and readers for the validation labels."""

import gzip
import io
import re
import tarfile
import zlib
from collections.abc import Sequence

import numpy as np

from tools.prepare.archives import DOWNLOAD_AGAIN, ByteStream

TRAIN_ARCHIVE = "ILSVRC2012_img_train.tar"  # contains <wnid>.tar archives of <wnid>_<number>.JPEG
VAL_ARCHIVE = "ILSVRC2012_img_val.tar"  # contains ILSVRC2012_val_<number>.JPEG files
DEVKIT_ARCHIVE = "ILSVRC2012_devkit_t12.tar.gz"
MD5_BY_PART = {  # from https://image-net.org/challenges/LSVRC/2012/2012-downloads.php, as in torchvision
    "train": "1d675b47d978889d74fa0da5fadfb00e",
    "val": "29b22e2961454d5413ddabcf34fc5622",
    "devkit": "fa75699e90414af021442c21a62c3abf",
}
CLASS_COUNT = 1000
VAL_IMAGES_PER_CLASS = 50

CLASSES_FILE = "data/meta.mat"
LABELS_FILE = "data/ILSVRC2012_validation_ground_truth.txt"
VAL_NAME_PATTERN = re.compile(r"ILSVRC2012_val_(\d{8})(\.JPEG)?")
MAX_DEVKIT_BYTES = 2**28  # larger archives are not the development kit, and may not fit into memory


def read_devkit(stream: ByteStream, subset: bool = False) -> tuple[dict[str, str], np.ndarray]:
    """Read the classes and the validation labels from the development kit.

    Args:
        stream: The development kit's archive.
        subset: True to accept counts other than CLASS_COUNT classes with VAL_IMAGES_PER_CLASS images each.

    Returns:
        A tuple of the words and the labels. The words describe each class by WordNet id, in label order. The
        validation labels, int64 [images], are in image name order.

    Raises:
        ValueError: If a file is missing, damaged or inconsistent. The message contains the archive's name.
    """
    content_by_file = _read_devkit_files(stream)
    if missing_files := [name for name in (CLASSES_FILE, LABELS_FILE) if name not in content_by_file]:
        devkit_problem = f"does not contain {missing_files[0]}. Pass {DEVKIT_ARCHIVE} (tasks 1 and 2)"
        raise ValueError(f"{stream.display_name} {devkit_problem}.")
    # Names of the two files in messages
    classes_name, labels_name = (f"{stream.display_name}: {file}" for file in (CLASSES_FILE, LABELS_FILE))
    wnid_by_id, words_by_wnid = _read_classes(classes_name, content_by_file[CLASSES_FILE])
    # A label is the class's index in the order of WordNet ids. LABELS_FILE contains ILSVRC2012 ids instead.
    label_by_wnid = {wnid: label for label, wnid in enumerate(words_by_wnid)}
    class_ids = content_by_file[LABELS_FILE].decode(errors="replace").split()
    if unknown_ids := set(class_ids) - set(map(str, wnid_by_id)):
        label_problem = f"the id {min(unknown_ids)!a}, which is not a class in {CLASSES_FILE}"
        raise ValueError(f"{labels_name} contains {label_problem}. {DOWNLOAD_AGAIN}.")
    labels = np.array([label_by_wnid[wnid_by_id[int(class_id)]] for class_id in class_ids], dtype=np.int64)
    if not subset:
        check_class_count(stream.display_name, len(wnid_by_id))
        _check_image_counts(labels_name, labels)
    return words_by_wnid, labels


def read_val_labels(stream: ByteStream, wnids: Sequence[str], subset: bool = False) -> np.ndarray:
    """Read the validation labels from a --val_labels file.

    Each line contains a class's WordNet id or its index in `wnids`, optionally after the image's name. Lines
    without image names are in image name order.

    Args:
        stream: The file's content.
        wnids: WordNet ids of all classes, in label order.
        subset: True to accept numbers of images other than VAL_IMAGES_PER_CLASS per class.

    Returns:
        The labels, int64 [images], in image name order.

    Raises:
        ValueError: If a line is wrong. The message contains the line number.
    """
    label_by_key = {str(label): label for label in range(len(wnids))}
    label_by_key |= {wnid: label for label, wnid in enumerate(wnids)}
    label_by_image_number: dict[int, int] = {}  # image numbers start at 1
    label_lines = stream.read(MAX_DEVKIT_BYTES).decode(errors="replace").splitlines()
    rows = [re.split(r"[,\s]+", label_line) for label_line in label_lines]
    # Skip empty lines and the header line of Kaggle's file.
    rows = [row for row in rows if row[0] and row[0] != "ImageId"]
    # A WordNet id or an index, in the second field if the first field is the image's name
    class_keys = [row[1] if len(row) > 1 and VAL_NAME_PATTERN.fullmatch(row[0]) else row[0] for row in rows]
    if not rows:
        raise ValueError(f"{stream.display_name} contains no labels. Write one label per line.")
    # Indices in `wnids` start at 0, but the ids in the development kit's file start at 1.
    is_one_based = "0" not in class_keys and str(len(wnids)) in class_keys
    if is_one_based and all(class_key.isdecimal() for class_key in class_keys):
        problem = "numbers the classes from 1, like the development kit, which orders the classes differently"
        remedy = f"Pass --devkit {DEVKIT_ARCHIVE}, or a list of WordNet ids."
        raise ValueError(f"{stream.display_name} {problem}. {remedy}")
    for line_number, (row, class_key) in enumerate(zip(rows, class_keys, strict=True), 1):
        if class_key not in label_by_key:
            label_problem = f"{class_key} is not one of the {len(wnids):,} classes in {TRAIN_ARCHIVE}"
            raise ValueError(f"{stream.display_name} line {line_number}: {label_problem}")
        image_match = VAL_NAME_PATTERN.fullmatch(row[0])
        image_number = int(image_match[1]) if image_match else line_number
        label_by_image_number[image_number] = label_by_key[class_key]
    expected_numbers = set(range(1, len(label_by_image_number) + 1))
    if missing_numbers := expected_numbers - label_by_image_number.keys():
        raise ValueError(f"{stream.display_name} has no label for validation image {min(missing_numbers)}")
    labels = np.array([label for _, label in sorted(label_by_image_number.items())], dtype=np.int64)
    if not subset:
        _check_image_counts(stream.display_name, labels)
    return labels


def check_class_count(archive_name: str, class_count: int) -> None:
    """Raise ValueError unless an archive contains as many classes as ILSVRC2012."""
    _check_count(f"{archive_name} contains {{}} classes", class_count, CLASS_COUNT)


def _check_image_counts(file_name: str, labels: np.ndarray) -> None:
    """Raise ValueError unless the label file contains 50,000 labels and at most 50 per class.

    Together, the two limits require 50 labels of each class. `labels` is int64 [images].
    """
    image_counts = np.bincount(labels, minlength=CLASS_COUNT)
    largest_class, max_images = image_counts.argmax(), int(image_counts.max())
    _check_count(f"{file_name} contains {{}} lines", len(labels), CLASS_COUNT * VAL_IMAGES_PER_CLASS)
    images_format = f"{file_name} contains {{}} images of class {largest_class}"
    _check_count(images_format, max_images, VAL_IMAGES_PER_CLASS)


def _check_count(message_format: str, count: int, published_count: int) -> None:
    """Raise ValueError if the counts differ. `message_format` contains {} in place of `count`."""
    if count != published_count:
        count_message = f"{message_format.format(f'{count:,}')}, but ILSVRC2012 has {published_count:,}"
        raise ValueError(f"{count_message}. Add --subset to accept a subset.")


def _read_devkit_files(stream: ByteStream) -> dict[str, bytes]:
    """Return the contents of the files CLASSES_FILE and LABELS_FILE, if the archive contains them.

    Raises:
        ValueError: If the archive is damaged or is not a gzip file.
    """
    content_by_file = {}
    try:
        # Decompress the whole file, so that its checksum is verified.
        tar_content = gzip.decompress(stream.read(MAX_DEVKIT_BYTES))
        with tarfile.open(fileobj=io.BytesIO(tar_content)) as archive:
            for member in archive:
                _, _, file_name = member.name.partition("/")  # all files are in a single folder
                if file_name in (CLASSES_FILE, LABELS_FILE) and (member_file := archive.extractfile(member)):
                    content_by_file[file_name] = member_file.read()
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        devkit_problem = f"is damaged or is not a gzip file ({error})"
        raise ValueError(f"{stream.display_name} {devkit_problem}. {DOWNLOAD_AGAIN}.") from None
    return content_by_file


def _read_classes(file_name: str, mat_content: bytes) -> tuple[dict[int, str], dict[str, str]]:
    """Parse the content of meta.mat, whose synsets without children are the classes.

    Parsing executes no code, because scipy reads MATLAB's functions and objects as data.

    Args:
        file_name: The file's name in messages.
        mat_content: The file's content.

    Returns:
        A tuple of two mappings: from ILSVRC2012 ids to WordNet ids, and from WordNet ids, sorted, to words.

    Raises:
        ValueError: If the content is not a list of synsets, or if an id occurs twice.
    """
    from scipy.io import loadmat

    try:
        synsets = loadmat(io.BytesIO(mat_content), squeeze_me=True, variable_names=["synsets"])["synsets"]
        field_names = ("ILSVRC2012_ID", "WNID", "words", "num_children")
        synset_rows = zip(*(np.atleast_1d(synsets)[field_name] for field_name in field_names), strict=True)
        leaf_rows = [leaf_fields for *leaf_fields, child_count in synset_rows if child_count == 0]
        leaf_classes = [(int(class_id), str(wnid), str(words)) for class_id, wnid, words in leaf_rows]
    except Exception as error:  # loadmat's errors have no common base class
        classes_problem = f"can't be read as a list of synsets ({type(error).__name__})"
        raise ValueError(f"{file_name} {classes_problem}. {DOWNLOAD_AGAIN}.") from None
    wnid_by_id = {class_id: wnid for class_id, wnid, _ in leaf_classes}
    words_by_wnid = {wnid: words for _, wnid, words in leaf_classes}
    are_ids_unique = len(wnid_by_id) == len(words_by_wnid) == len(leaf_classes) > 0
    if not are_ids_unique or not all(re.fullmatch(r"n\d{8}", wnid) for wnid in words_by_wnid):
        classes_problem = "contains classes without a unique WordNet id or ILSVRC2012 id"
        raise ValueError(f"{file_name} {classes_problem}. {DOWNLOAD_AGAIN}.")
    return wnid_by_id, dict(sorted(words_by_wnid.items()))
