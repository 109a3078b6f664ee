"""Read original images and labels from archives, folders and parquet files."""

import contextlib
import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onecurve.data.class_folders import (
    DANGLING_LINKS,
    OUTSIDE_CLASSES,
    IgnoredFiles,
    drop_empty_classes,
    is_hidden,
    is_image,
    list_classes,
    list_images,
    refuse_unknown_classes,
    used_splits,
)
from onecurve.data.decode import IMAGE_EXTENSIONS
from onecurve.data.encoded import SPLITS
from onecurve.data.tables import DEFAULT_COLUMNS, Table, parquet_files, read_images, read_labels
from tools.prepare.archives import ArchiveMember, ByteStream, archive_members, open_stream
from tools.prepare.devkit import (
    MD5_BY_PART,
    VAL_NAME_PATTERN,
    check_class_count,
    read_devkit,
    read_val_labels,
)

WNID_PATTERN = re.compile(r"n\d{8}")
# Files that list the classes of images outside class folders
KAGGLE_LIST, TINY_LIST = "LOC_val_solution.csv", "val_annotations.txt"
BATCH_IMAGES, BATCH_BYTES = 32, 2**23  # a batch ends at whichever limit is reached first
EXTENSION_BY_MAGIC_BYTES = {b"\x89PNG": ".png", b"RIFF": ".webp", b"BM": ".bmp"}

LabelFunction = Callable[[str | None, str], int]  # maps a class name and a file name to a label
# A split's image groups, and the archive's stream, or None for folders
GroupsAndStream = tuple[Iterator["ImageGroup"], ByteStream | None]


class ImageFile(NamedTuple):
    """Image that is not stored in an archive."""

    name: str  # file name
    read: Callable[[], bytes]


class ImageGroup(NamedTuple):
    """Images in a class tar or class folder, or all images in a flat tar or table (class_name is None)."""

    class_name: str | None
    display_name: str
    files: Iterable[ArchiveMember | ImageFile]  # may also contain other files


class RawImage(NamedTuple):
    name: str  # file name
    key: str  # name that is unique within the split, without extension and without dots in its last part
    label: int
    encoded: bytes  # content of the image file


class LabeledFile(NamedTuple):
    group_index: int
    display_name: str  # the group's name in messages
    name: str  # file name, for example n01440764_10026.JPEG
    key: str  # name that is unique within the split
    label: int
    file: Any  # an ArchiveMember or an ImageFile


class ImageBatch(NamedTuple):
    """Batch of consecutive images from one image group."""

    display_name: str  # the group's name in messages
    images: list[RawImage]
    original_bytes: int  # the original images' total size
    group_index: int
    reencoded: list[dict[str, str]]  # image key ("key") and reason ("why") of each re-encoded image


# --- Reading


def class_tars(archive: ArchiveMember) -> Iterator[ImageGroup]:
    """Yield an image group for each class tar (`<class>.tar`) in a tar, in order. Skip hidden files.

    The archive is a stream, so a group's images can be read only before the next group.
    """
    for class_tar in archive_members(archive):
        file_name = class_tar.name.rpartition("/")[2]
        if is_hidden(file_name):
            continue
        if not file_name.endswith(".tar"):
            remedy = "Pass a tar that contains <class>.tar archives of images."
            raise ValueError(f"{class_tar.display_name} is not a class tar. {remedy}")
        yield ImageGroup(file_name.removesuffix(".tar"), class_tar.display_name, archive_members(class_tar))


def class_folders(root: Path) -> Iterator[ImageGroup]:
    """Yield an image group for each class folder, sorted. The image `<class>/a/1.jpg` is named a_1.jpg."""
    for class_name, image_paths in list_images_by_class(root).items():
        # The files are opened later, when an ImageFile is read.
        image_files = (
            ImageFile(path.removeprefix(f"{class_name}/").replace("/", "_"), (root / path).read_bytes)
            for path in image_paths
        )
        yield ImageGroup(class_name, str(root / class_name), image_files)


def list_images_by_class(root: Path, ignored_files: IgnoredFiles | None = None) -> dict[str, list[str]]:
    """Map the class folder names in a folder, sorted, to the relative paths of their images.

    The validation images of Kaggle and Tiny ImageNet are not in class folders. A file lists the classes of
    these images. Class folders without images are left out.

    Args:
        root: Folder with class folders.
        ignored_files: Object to which this function adds the files and empty folders that it leaves out.

    Raises:
        ValueError: If an image has no class, or if a link to an image or folder is dangling, because images
            would be lost unnoticed.
    """
    ignored_files = ignored_files or IgnoredFiles()
    paths_by_class = {
        class_name: [f"{class_name}/{image_path}" for image_path in image_paths]
        for class_name, image_paths in list_classes(root, ignored_files).items()
    }
    if dangling_link := ignored_files.first_path_by_reason.get(DANGLING_LINKS):
        raise ValueError(f"{dangling_link} is a dangling link. Fix or remove the link.")
    if len(paths_by_class) < 2 and (class_list := _find_class_list(root)):
        paths_by_class = _group_images_by_list(root, list_images(root, IgnoredFiles()), class_list)
        del ignored_files.counts[OUTSIDE_CLASSES]  # the list assigns these images to classes
    paths_by_class = drop_empty_classes("", paths_by_class, ignored_files)
    if not paths_by_class:
        if OUTSIDE_CLASSES in ignored_files.first_path_by_reason:
            remedy = f"Put {KAGGLE_LIST}, which lists the classes of the images, next to the folder."
            raise ValueError(f"{root} contains images outside class folders. {remedy}")
        raise ValueError(f"{root} contains no images ({' '.join(IMAGE_EXTENSIONS)})")
    return paths_by_class


def _find_class_list(root: Path) -> Path | None:
    """Find the file that lists the images' classes, in the folder or at most four levels above."""
    kaggle_folders = (root, *root.absolute().parents[:4])
    candidates = (root / TINY_LIST, *(kaggle_folder / KAGGLE_LIST for kaggle_folder in kaggle_folders))
    return next(filter(Path.is_file, candidates), None)


def _group_images_by_list(root: Path, image_paths: list[str], class_list: Path) -> dict[str, list[str]]:
    """Map the class names in a file, sorted, to the paths of their images.

    Each line of the file `class_list` starts with an image's name and class.

    Raises:
        ValueError: If the file does not contain an image.
    """
    list_lines = class_list.read_text().splitlines()
    names_and_classes = [re.split("[,\t ]", list_line)[:2] for list_line in list_lines]
    class_by_stem = {fields[0].removesuffix(".JPEG"): fields[-1] for fields in names_and_classes}
    paths_by_class = defaultdict(list)
    for image_path in image_paths:
        if (class_name := class_by_stem.get(Path(image_path).stem)) is None:
            raise ValueError(f"{class_list} does not contain the class of {root / image_path}")
        paths_by_class[class_name].append(image_path)
    return dict(sorted(paths_by_class.items()))


def labeled_files(groups: Iterable[ImageGroup], label_of: LabelFunction) -> Iterator[LabeledFile]:
    """Yield the images in the groups with labels and unique keys. Skip files that are hidden or not images.

    This generator reads the names of the images, but not their contents.

    Raises:
        ValueError: If a name or class occurs twice, or if a group contains no images.
    """
    class_names = set()
    for group_index, (class_name, display_name, group_files) in enumerate(groups):
        if class_name in class_names:
            raise ValueError(f"{display_name} has the same name as another class. Merge the two classes.")
        class_names.add(class_name)
        name_by_key: dict[str, str] = {}
        for image_file in group_files:
            if not is_image(file_name := image_file.name.rpartition("/")[2]):
                continue
            try:
                label = label_of(class_name, file_name)
            except ValueError as error:
                raise ValueError(f"{display_name}: {error}") from None
            # The key names the image in its shard. ILSVRC2012's file names contain the WordNet id and are
            # unique within a split. Other file names are unique only within a class.
            key = os.path.splitext(file_name)[0].replace(".", "_")
            has_wnid = WNID_PATTERN.fullmatch(class_name or "") and key.startswith(f"{class_name}_")
            if class_name is not None and not has_wnid:
                key = f"{class_name}/{key}"
            if name_by_key.get(key, file_name) != file_name:  # the key of 1.png is 1_png if 1.jpg exists
                key = f"{key}_{file_name.rpartition('.')[2]}"
            if key in name_by_key:
                raise ValueError(
                    f"{display_name}: {file_name} and another image have the same key, {key}."
                    " Rename one of the images."
                    " (A key is the image's name without the extension, with _ instead of other dots.)"
                )
            name_by_key[key] = file_name
            yield LabeledFile(group_index, display_name, file_name, key, label, image_file)
        if not name_by_key:  # the tar or folder contains no images
            raise ValueError(f"{display_name} contains no images ({' '.join(IMAGE_EXTENSIONS)})")


def image_batches(groups: Iterable[ImageGroup], label_of: LabelFunction) -> Iterator[ImageBatch]:
    """Read all images, and yield them in batches. Each batch contains images from only one group.

    Args:
        groups: Image groups. Each group is read completely before the next one.
        label_of: Function that returns an image's label.

    Raises:
        ValueError: If an image is empty, or if labeled_files() refuses a name.
    """
    images: list[RawImage] = []  # images of the current batch
    batch_bytes, previous_file = 0, None
    for labeled_file in labeled_files(groups, label_of):
        is_batch_full = len(images) == BATCH_IMAGES or batch_bytes >= BATCH_BYTES
        if previous_file and (labeled_file.group_index > previous_file.group_index or is_batch_full):
            yield ImageBatch(previous_file.display_name, images, batch_bytes, previous_file.group_index, [])
            images, batch_bytes = [], 0
        if not (encoded_image := labeled_file.file.read()):
            raise ValueError(f"{labeled_file.display_name}: {labeled_file.name} is empty. Remove the file.")
        images.append(RawImage(labeled_file.name, labeled_file.key, labeled_file.label, encoded_image))
        batch_bytes, previous_file = batch_bytes + len(encoded_image), labeled_file
    if previous_file:
        yield ImageBatch(previous_file.display_name, images, batch_bytes, previous_file.group_index, [])


# --- Data sets


class OriginalImages:
    """Train and val images in class tars (`<class>.tar`) or class folders (`<class>/`).

    Subclasses read images in other arrangements.
    """

    checks_md5 = False  # True to compare MD5 sums with the published MD5 sums

    def __init__(self, locations: dict[str, str]):
        """Inspect the data set's parts: open and close each archive, and list the images in folders.

        `locations` maps the parts train, val, devkit and val_labels, if available, to paths or URLs.
        """
        self.locations = locations
        self.bytes_by_part: dict[str, int] = {}  # size of each archive, or of all images in each folder
        # Text that changes with a part's content, or None if unknown
        self.version_by_part: dict[str, str | None] = {}
        # Hash of all class names, file names and sizes in each folder
        self.listing_hashes: dict[str, str] = {}
        self.classes: list[dict[str, str]] = []  # keys "wnid" and "name" for each class, in label order
        self.label_functions: dict[str, LabelFunction] = {}  # by split, set by read_classes()
        self.inspect_parts()

    def inspect_parts(self) -> None:
        """Set the sizes, versions and listing hashes of all parts, and print the files left out.

        Raises:
            ValueError: If a part does not exist, or if a folder can't be used.
        """
        images_by_part = {}
        for part, location in self.locations.items():
            if Path(location).is_dir():
                print(f"listing the images in {location}", flush=True)
                ignored_files = IgnoredFiles()
                images_by_class = list_images_by_class(Path(location), ignored_files)
                if ignored_text := str(ignored_files):
                    print(f"left out: {ignored_text}", flush=True)
                paths = [image_path for class_paths in images_by_class.values() for image_path in class_paths]
                self.bytes_by_part[part], self.version_by_part[part] = size_and_version(Path(location), paths)
                paths_and_sizes = [(path, os.stat(Path(location) / path).st_size) for path in paths]
                self.listing_hashes[part] = hash_of_rows(paths_and_sizes)[:16]  # 64 bits reveal a change
                images_by_part[part] = images_by_class
            else:
                with open_stream(location) as stream:
                    self.bytes_by_part[part], self.version_by_part[part] = stream.size, stream.version
        if len(images_by_part) == 2:  # both splits are folders, so the classes are already known
            refuse_unknown_classes(
                self.locations["val"], "val", images_by_part["val"], images_by_part["train"]
            )

    def read_classes(self) -> None:
        """Set the classes and label functions from the sorted names of class tars or class folders.

        Reading the names in a tar requires reading the headers of the entire tar.
        """
        split = "train" if "train" in self.locations else "val"
        if "://" in self.locations[split]:  # reading a class name takes one or more requests
            print(f"reading the class names in {self.locations[split]}", flush=True)
        with self.open_split(split, computes_md5=False) as (groups, _):
            class_names = sorted(group.class_name or "" for group in groups)
        self.classes = [{"wnid": class_name, "name": class_name} for class_name in class_names]
        self.label_functions = dict.fromkeys(SPLITS, class_name_labeler(class_names))

    @contextlib.contextmanager
    def open_split(self, split: str, computes_md5: bool) -> Iterator[GroupsAndStream]:
        """Open a split for the context. Yield its image groups, and the archive's stream or None for folders.

        Iterating over the groups reads the stream. `computes_md5` makes the stream compute its MD5 sum.
        """
        if Path(self.locations[split]).is_dir():
            yield class_folders(Path(self.locations[split])), None
            return
        with open_stream(self.locations[split], "md5" if computes_md5 else None) as stream:
            yield self.image_groups(split, stream.archive), stream

    def image_groups(self, split: str, archive: ArchiveMember) -> Iterator[ImageGroup]:
        """Return the image groups in a split's archive, which are the archive's class tars."""
        return class_tars(archive)

    def check_content(
        self, split: str, group_count: int, image_count: int, stream: ByteStream | None
    ) -> None:
        """Compare a split with the published split, if the data set has been published.

        Args:
            split: Split name.
            group_count: Number of image groups that were read.
            image_count: Number of images that were read.
            stream: The archive's stream, which this method reads to the end, or None for folders.

        Raises:
            ValueError: If the archive's MD5 sum differs from the published MD5 sum.
        """
        if self.checks_md5 and stream is not None:
            self.check_md5(split, stream)

    def check_md5(self, part: str, stream: ByteStream) -> None:
        """Read the stream to the end. Raise ValueError unless it has the part's published MD5 sum."""
        if (md5 := stream.digest()) != MD5_BY_PART[part]:
            md5_problem = f"The file's MD5 is {md5}, but {MD5_BY_PART[part]} is expected"
            remedy = "Download the file again, or add --no_verify to use a different file."
            raise ValueError(f"{stream.display_name} is not the published file. {md5_problem}. {remedy}")

    def complete_class_names(self, largest_label: int) -> None:
        """Do nothing, because read_classes() has read all class names.

        Subclasses that learn the class names only from the labels override this method.
        """


class Ilsvrc(OriginalImages):
    """Data set in ILSVRC2012's archives.

    Without the development kit, class names come from the training archive.
    """

    def __init__(self, locations: dict[str, str], checks_md5: bool, accepts_subset: bool):
        """Inspect the archives.

        Args:
            locations: Path or URL of each archive by part.
            checks_md5: True to compare MD5 sums with the published MD5 sums.
            accepts_subset: True to accept numbers of classes and images that differ from ILSVRC2012's.
        """
        super().__init__(locations)
        self.checks_md5, self.accepts_subset = checks_md5, accepts_subset

    def read_classes(self) -> None:
        """Set the classes, the label functions and the expected numbers of classes and images.

        The development kit contains all of them. Without the kit, read the training archive's class names.
        """
        if "devkit" not in self.locations:
            self._read_classes_of_train()
            return
        if self.checks_md5:  # before the development kit is parsed
            with open_stream(self.locations["devkit"], "md5") as stream:
                self.check_md5("devkit", stream)
        with open_stream(self.locations["devkit"]) as stream:
            words_by_wnid, val_labels = read_devkit(stream, self.accepts_subset)
        self.classes = [{"wnid": wnid, "name": class_words} for wnid, class_words in words_by_wnid.items()]
        train_labeler, val_labeler = class_name_labeler([*words_by_wnid]), image_number_labeler(val_labels)
        self.label_functions = {"train": train_labeler, "val": val_labeler}
        self.expected_counts = {"train": len(words_by_wnid), "val": len(val_labels)}

    def _read_classes_of_train(self) -> None:
        """Set the classes from the training archive, and the labels of val from --val_labels."""
        super().read_classes()
        wnids = [class_entry["wnid"] for class_entry in self.classes]
        if not self.accepts_subset:
            check_class_count(self.locations["train"], len(wnids))
        self.expected_counts = {"train": len(wnids)}
        if "val_labels" in self.locations:
            with open_stream(self.locations["val_labels"]) as stream:
                val_labels = read_val_labels(stream, wnids, self.accepts_subset)
            self.label_functions["val"] = image_number_labeler(val_labels)
            self.expected_counts["val"] = len(val_labels)

    def image_groups(self, split: str, archive: ArchiveMember) -> Iterator[ImageGroup]:
        """Return the class tars of train, or a single group with all images of val."""
        if split == "val":
            return iter([ImageGroup(None, archive.display_name, archive_members(archive))])
        return class_tars(archive)

    def check_content(
        self, split: str, group_count: int, image_count: int, stream: ByteStream | None
    ) -> None:
        """Compare the number of classes in train or images in val, and then the MD5 sum."""
        content_count, count_noun = (group_count, "classes") if split == "train" else (image_count, "images")
        if not self.accepts_subset and content_count != self.expected_counts[split]:
            problem = f"contains {content_count:,} {count_noun} instead of {self.expected_counts[split]:,}"
            remedy = "Download the archive again, or add --subset to use a subset."
            raise ValueError(f"{self.locations[split]} {problem}. {remedy}")
        super().check_content(split, group_count, image_count, stream)


class ParquetFolder(OriginalImages):
    """Parquet files of train and val in a folder. An image's name is its row number in the split."""

    def inspect_parts(self) -> None:
        """Find the parquet files of train and val, and set the sizes and versions of both splits.

        Raises:
            ValueError: If the folder lacks the files of a split.
        """
        folder = Path(self.locations["train"])
        if not folder.is_dir() or (files_by_name := parquet_files(folder)) is None:
            raise ValueError(f"--data {folder} contains no train-*.parquet. Pass a folder with such files.")
        if (val_name := used_splits(files_by_name).get("val")) is None:
            missing_files = "no val-, valid- or test-*.parquet"
            raise ValueError(f"--data {folder} contains train-*.parquet, but {missing_files}")
        files_by_split = {"train": files_by_name["train"], "val": files_by_name[val_name]}
        self.tables_by_split: dict[str, list[Table]] = {}
        for split, table_files in files_by_split.items():
            self.tables_by_split[split] = [Table(str(table_file), table_file) for table_file in table_files]
            file_names = [str(table_file.relative_to(folder)) for table_file in table_files]
            self.bytes_by_part[split], self.version_by_part[split] = size_and_version(folder, file_names)

    def read_classes(self) -> None:
        """Set the classes and label functions from the label columns, which are kept in memory."""
        class_names, labels_by_split = read_labels(self.tables_by_split, DEFAULT_COLUMNS, _no_heartbeat)
        self.classes = [{"wnid": class_name, "name": class_name} for class_name in class_names]
        self.label_functions = {
            split: partial(_label_in_row, labels_by_split[split].labels) for split in self.tables_by_split
        }

    @contextlib.contextmanager
    def open_split(self, split: str, computes_md5: bool) -> Iterator[GroupsAndStream]:
        """Yield all images in the split's tables as one group without a class, and None as the stream."""

        def image_file(row: int, encoded: bytes) -> ImageFile:
            """Return a file named by its row, for example 000000012.png. Unknown formats are named .jpg.

            The decoder refuses unknown formats later.
            """
            magic_bytes = next(filter(encoded.startswith, EXTENSION_BY_MAGIC_BYTES), b"")
            extension = EXTENSION_BY_MAGIC_BYTES.get(magic_bytes, ".jpg")
            return ImageFile(f"{row:09d}{extension}", partial(bytes, encoded))  # read() returns `encoded`

        table_images = read_images(self.tables_by_split[split], DEFAULT_COLUMNS, _no_heartbeat)
        image_files = (image_file(row, encoded) for row, (encoded, _) in enumerate(table_images))
        yield iter([ImageGroup(None, self.locations[split], image_files)]), None


def _no_heartbeat() -> None:
    """Do nothing where training reports to other processes that reading continues."""


def size_and_version(folder: Path, paths: list[str]) -> tuple[int, str]:
    """Return the total size in bytes and a version of files in a folder.

    The version changes when the path, size or modification time of any file changes.
    """
    path_size_time = []
    for path in paths:
        file_stat = os.stat(folder / path)
        path_size_time.append((path, file_stat.st_size, file_stat.st_mtime_ns))
    return sum(size for _, size, _ in path_size_time), hash_of_rows(path_size_time)


def hash_of_rows(rows: Sequence[tuple[Any, ...]]) -> str:
    """Return the SHA-256 of a list of tuples as hex digits, for example of (path, size, time) tuples."""
    return hashlib.sha256(repr(rows).encode(errors="surrogateescape")).hexdigest()


# --- Labels


def class_name_labeler(class_names: Sequence[str]) -> LabelFunction:
    """Return a function that maps the class name of an image group to its index in `class_names`."""
    label_by_class = {known_class: label for label, known_class in enumerate(class_names)}

    def label_of(class_name: str | None, file_name: str) -> int:
        if class_name not in label_by_class:
            raise ValueError(f"class {class_name} is not one of the {len(label_by_class):,} classes")
        return label_by_class[class_name]

    return label_of


def image_number_labeler(labels: np.ndarray) -> LabelFunction:
    """Return a function that maps the file name ILSVRC2012_val_00000001.JPEG to the first label and so on."""

    def label_of(_class_name: str | None, file_name: str) -> int:
        name_match = VAL_NAME_PATTERN.fullmatch(file_name)
        image_number = int(name_match[1]) if name_match else 0
        if not 1 <= image_number <= len(labels):
            raise ValueError(f"{file_name} is not one of the {len(labels):,} images that have labels")
        return int(labels[image_number - 1])

    return label_of


def _label_in_row(labels: np.ndarray, _class_name: str | None, file_name: str) -> int:
    """Return the label in the table row that the file name contains, for example 12 for 000000012.png."""
    table_row = int(file_name.partition(".")[0])
    return int(labels[table_row])
