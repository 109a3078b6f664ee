"""Listing of images in class folders that may be nested, linked, split, or mixed with other files.

This module does not use `datasets` or torchvision, because these libraries treat the innermost folder as the
class or follow cyclic links. They also take seconds to import at every start and don't report ignored files.
"""

import contextlib
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from onecurve.data.decode import HEIC_ADVICE, HEIC_EXTENSIONS, IMAGE_EXTENSIONS
from onecurve.system.text import printable, some_of

# Folder names of evaluation splits, in order of preference, mapped to the reported split name
VAL_NAMES = {"val": "val", "validation": "val", "valid": "val", "test": "test"}
SPLIT_SPELLINGS = {"training": "train", "testing": "test"}  # alternative folder names, used on Kaggle
# Matches names of split folders, such as train_images
SPLIT_WORD = re.compile("(?<![a-z])(train|valid|validation|val|test)(?:ing)?(?![a-z])")
IGNORED_FOLDERS = ("__MACOSX", "@eaDir", "lost+found")  # from macOS zip files, network drives and ext4
DANGLING_LINKS = "dangling links"  # reason to ignore a file, as shown in messages
SPECIAL_FILES = "special files"  # reason to ignore a file, as shown in messages
OUTSIDE_CLASSES = "outside class folders"  # reason to ignore a file, as shown in messages
LIST_EXTENSIONS = (".csv", ".tsv", ".jsonl")  # file extensions of image lists
TABLE_EXTENSIONS = (*LIST_EXTENSIONS, ".parquet")  # file extensions of image lists and Parquet tables
METADATA_FILES = ("metadata.csv", "metadata.jsonl")  # image lists in the Hugging Face Hub's format

ImagesByClass = dict[str, list[str]]  # image paths relative to the class folder, by class name
ListedSplits = tuple[dict[str, str], dict[str, ImagesByClass]]  # folder name and images of each split


class IgnoredFiles:
    """Counts of ignored files by reason, and names of empty class folders."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # number of ignored files by reason
        self.first_path_by_reason: dict[str, str] = {}  # first ignored path for each reason
        self.empty_folders: list[str] = []  # class folders without images

    def add(self, reason: str, path: str) -> None:
        """Count one ignored path, and store the first path for each reason."""
        self.counts[reason] += 1
        self.first_path_by_reason.setdefault(reason, path)

    def accept_or_record(self, path: str) -> bool:
        """Return True for an image path. Record any other path as ignored unless the file is hidden."""
        if is_hidden(os.path.basename(path)):
            return False
        file_extension = os.path.splitext(path)[1].lower()
        has_image_extension = file_extension in IMAGE_EXTENSIONS
        if os.path.isfile(path):
            ignored_reason = "" if has_image_extension else file_extension or "without an extension"
        elif os.path.islink(path):  # the link's target does not exist
            ignored_reason = DANGLING_LINKS if has_image_extension else file_extension or DANGLING_LINKS
        else:
            ignored_reason = SPECIAL_FILES
        if ignored_reason:
            self.add(ignored_reason, path)
        return not ignored_reason

    def __str__(self) -> str:
        """Return the counts and reasons for a message, for example "12 .txt, 3 dangling links"."""
        file_note = ", ".join(f"{count:,} {printable(reason)}" for reason, count in self.counts.most_common())
        heic_advice = f" ({HEIC_ADVICE})" if self.counts.keys() & {*HEIC_EXTENSIONS} else ""
        empty_folders_note = f"{some_of(self.empty_folders)} without images" if self.empty_folders else ""
        return ", ".join(filter(None, (file_note + heic_advice, empty_folders_note)))


def is_image(file_name: str) -> bool:
    """Return True for a visible file whose name has an image extension."""
    return not is_hidden(file_name) and file_name.lower().endswith(IMAGE_EXTENSIONS)


def is_hidden(name: str) -> bool:
    """Return True for the name of a hidden file, or of a folder that an operating system creates."""
    return name.startswith(".") or name in IGNORED_FOLDERS


def folder_names(parent: Path) -> list[str]:
    """Return the sorted names of a folder's visible subfolders, including links to folders."""
    with os.scandir(parent) as entries:
        return sorted(entry.name for entry in entries if not is_hidden(entry.name) and entry.is_dir())


def split_folders(data_folder: Path) -> dict[str, str]:
    """Return the name of each split's folder in a data folder, for example {"train": "Train"}.

    Upper case and the spellings in SPLIT_SPELLINGS are accepted, but the usual spelling takes precedence.
    """
    subfolder_names = folder_names(data_folder)
    folder_by_split = {}
    for split in ("train", *VAL_NAMES):
        matching_folders = [
            name for name in subfolder_names if SPLIT_SPELLINGS.get(name.lower(), name.lower()) == split
        ]
        if matching_folders:
            folder_by_split[split] = split if split in matching_folders else matching_folders[0]
    return folder_by_split


def list_splits(data_folder: Path, ignored_files: IgnoredFiles) -> ListedSplits:
    """List the images in `train/<class>/`, `val/<class>/` (or validation/, valid/) and `test/<class>/`.

    If there are no split folders, the images in `<class>/` form the training split.

    A test/ folder without class folders is ignored, because its images have no labels. A test/ folder next to
    val/ is also ignored if test/ and train/ have no class in common. Class folders without images are
    ignored.

    Args:
        data_folder: Folder that contains the data set.
        ignored_files: Record to which this function adds ignored files and folders.

    Returns:
        The name of each split's folder ("" if there are no split folders), and for each split and class the
        image paths relative to the class folder.

    Raises:
        ValueError: If the folders contain no images or can't be used for training.
    """
    folder_by_split = split_folders(data_folder)
    if not folder_by_split or _is_class_folder(data_folder, folder_by_split):
        return {"train": ""}, {"train": _list_without_splits(data_folder, ignored_files)}
    if "train" not in folder_by_split:
        folder_name = next(iter(folder_by_split.values()))
        raise ValueError(
            f"--data {data_folder} contains {folder_name}/ but no train/. A folder named {folder_name}"
            f" is treated as a split. Rename the folder if it is a class{_layout_advice(data_folder)}"
        )
    images_by_split = {}
    for split in used_splits(folder_by_split).values():
        images_by_split[split] = list_classes(data_folder / folder_by_split[split], ignored_files)
    test_classes = images_by_split.get("test", {}).keys()
    # Without val/, test/ is the only evaluation split, so any class folder in test/ is enough.
    expected_classes = images_by_split["train"].keys() if len(images_by_split) == 3 else test_classes
    if "test" in images_by_split and not test_classes & expected_classes:
        test_folder = data_folder / folder_by_split.pop("test")
        for class_name, image_paths in images_by_split.pop("test").items():
            for image_path in image_paths:
                ignored_files.add(OUTSIDE_CLASSES, str(test_folder / class_name / image_path))
    for split, images_by_class in images_by_split.items():
        folder_name = folder_by_split[split]
        split_folder = data_folder / folder_name
        if not images_by_class:
            raise ValueError(
                f"{split_folder} contains no class folders. A folder named {folder_name} is treated as a"
                " split and needs a separate folder for each class."
                f" Rename the folder if it is a class{_layout_advice(data_folder)}"
            )
        images_by_split[split] = drop_empty_classes(folder_name, images_by_class, ignored_files)
        if not images_by_split[split]:
            image_extensions = " ".join(IMAGE_EXTENSIONS)
            raise ValueError(f"the class folders in {split_folder} contain no images ({image_extensions})")
        train_classes = images_by_split["train"].keys()
        refuse_unknown_classes(f"--data {data_folder}", folder_name, images_by_split[split], train_classes)
    return folder_by_split, images_by_split


def drop_empty_classes(
    folder_name: str, images_by_class: ImagesByClass, ignored_files: IgnoredFiles
) -> ImagesByClass:
    """Return the classes that contain images, and add the folders of empty classes to ignored_files."""
    empty_classes = [class_folder for class_folder, image_paths in images_by_class.items() if not image_paths]
    ignored_files.empty_folders += [os.path.join(folder_name, class_name, "") for class_name in empty_classes]
    return {class_name: image_paths for class_name, image_paths in images_by_class.items() if image_paths}


def refuse_unknown_classes(
    data_name: str, split: str, split_classes: Iterable[str], train_classes: Iterable[str]
) -> None:
    """Raise ValueError if a split contains classes that are missing from the training split.

    A class that occurs only in the training split is reported by a startup warning instead.

    Args:
        data_name: Name of the data set for the error message.
        split: Name of the split to check.
        split_classes: Class names in the split to check.
        train_classes: Class names in the training split.
    """
    if unknown_classes := sorted({*split_classes} - {*train_classes}):
        raise ValueError(
            f"{data_name}: {printable(split)} contains classes that are not in train:"
            f" {some_of(unknown_classes)}. Rename or remove these classes, or add training images for them"
        )


def _is_class_folder(data_folder: Path, folder_by_split: dict[str, str]) -> bool:
    """Return True if the only folder that is named like a split is actually a class folder.

    The folder is a class folder if it and at least two other folders directly contain images. A single other
    folder is not enough, because a data set with training images in train/*.jpg may store test images in
    test1/.
    """
    if len(folder_by_split) != 1:
        return False
    folders_with_images = {*_folders_with_images(data_folder)}
    return {*folder_by_split.values()} < folders_with_images and len(folders_with_images) > 2


def _folders_with_images(data_folder: Path) -> list[str]:
    """Return the folders that directly contain images, except unreadable folders such as lost+found."""
    folders_with_images = []
    for folder_name in folder_names(data_folder):
        with contextlib.suppress(PermissionError):
            if any(map(is_image, os.listdir(data_folder / folder_name))):
                folders_with_images.append(folder_name)
    return folders_with_images


def folders_beside_splits(data_folder: Path) -> list[str]:
    """Return the names of folders that contain images but are not split folders."""
    split_folder_names = split_folders(data_folder).values()
    return [folder for folder in _folders_with_images(data_folder) if folder not in split_folder_names]


def used_splits(available_splits: Iterable[str]) -> dict[str, str]:
    """Map the roles "train", "val" and "test" to the splits that are read.

    The "val" role uses the first available split in VAL_NAMES. The "test" role exists only if "val" uses a
    split other than "test".
    """
    val_split = next((split for split in VAL_NAMES if split in available_splits), None)
    split_by_role = {"train": "train"} | ({"val": val_split} if val_split else {})
    has_separate_test = "test" in available_splits and val_split != "test"
    return split_by_role | ({"test": "test"} if has_separate_test else {})


def _list_without_splits(data_folder: Path, ignored_files: IgnoredFiles) -> ImagesByClass:
    """List the images in `<class>/` folders without splits, or raise ValueError if there are no images."""
    images_by_class = drop_empty_classes("", list_classes(data_folder, ignored_files), ignored_files)
    if not images_by_class:
        _raise_no_classes(data_folder)
    # Class names such as train_images and test_images suggest that the folders are splits
    word_matches = [SPLIT_WORD.search(class_name.lower()) for class_name in images_by_class]
    split_words = {word_match[1] for word_match in word_matches if word_match}
    if "train" in split_words and all(word_matches) and len(images_by_class) > 1:
        layout_advice = _layout_advice(data_folder) or (
            ". Rename the split folders to train/, val/ and test/,"
            " and create a folder for each class in each split folder"
        )
        raise ValueError(
            f"--data {data_folder}: the folder names {some_of(sorted(images_by_class))} refer to splits,"
            f" not classes{layout_advice}"
        )
    return images_by_class


def training_problem(data_folder: Path, class_name: str, image_paths: Sequence[str]) -> str:
    """Return an error message for data with only one class folder, which can't be used for training.

    Args:
        data_folder: Folder that contains the data set.
        class_name: Name of the only class folder.
        image_paths: Image paths, relative to the class folder.
    """
    class_folder = data_folder / class_name
    data_advice = f"If the class folders are in {printable(class_name)}, use --data {printable(class_folder)}"
    if not any(os.sep in image_path for image_path in image_paths):  # the class folder has no subfolders
        data_advice = "A classifier needs at least two class folders"
    return (
        f"--data {data_folder} contains images in only one folder, {printable(class_name)}."
        f" {data_advice}{_layout_advice(data_folder)}"
    )


def _raise_no_classes(data_folder: Path) -> NoReturn:
    """Raise ValueError for a folder without class folders, with advice for the folder's layout."""
    if parquet_files := sorted((*data_folder.glob("*.parquet"), *data_folder.glob("*/*.parquet"))):
        parquet_names = [parquet_file.relative_to(data_folder) for parquet_file in parquet_files]
        raise ValueError(
            f"--data {data_folder} contains parquet files ({some_of(parquet_names, 3)})"
            " but no train-*.parquet. Rename the training files to train-*.parquet"
            " and the evaluation files to val-*.parquet or test-*.parquet"
        )
    raise ValueError(
        f"--data {data_folder} contains neither parquet files (train-*.parquet, test-*.parquet)"
        f" nor class folders (train/<class>/*.jpg, val/<class>/*.jpg){_layout_advice(data_folder)}"
    )


def _layout_advice(data_folder: Path) -> str:
    """Return advice about a folder's tar files, image lists or HEIC files, or "" if there are none.

    The advice continues an error message about the folder, so it starts with a full stop.
    """
    if sorted((*data_folder.glob("*.tar"), *data_folder.glob("*/*.tar"))):
        quoted_data, quoted_index = map(shlex.quote, (str(data_folder), f"{data_folder}_index"))
        return printable(
            ". To use tar files in WebDataset format, run python prep_imagenet.py --from shards"
            f" --format index --data {quoted_data} --out {quoted_index}, and then use --data {quoted_index}"
        )
    table_files = find_table_files(data_folder)
    if list_files := [str(table) for table in table_files if table.suffix.lower() in LIST_EXTENSIONS]:
        return printable(f". To use a list of images, pass --data {' or '.join(list_files)}")
    ignored_files = IgnoredFiles()
    list_images(data_folder, ignored_files)  # counts the HEIC files, which are ignored without pillow_heif
    return f". Left out: {ignored_files}" if ignored_files.counts.keys() & {*HEIC_EXTENSIONS} else ""


def metadata_files(data_folder: Path) -> dict[str, Path]:
    """Return the path of each split folder's image list in the Hugging Face Hub's format.

    The result is empty if the training folder contains no list or more than one subfolder.
    """
    folder_by_split = {split: data_folder / folder for split, folder in split_folders(data_folder).items()}
    if "train" not in folder_by_split or len(folder_names(folder_by_split["train"])) > 1:
        return {}
    possible_lists = [
        (split, parent / name) for split, parent in folder_by_split.items() for name in METADATA_FILES
    ]
    # metadata.jsonl is used in a folder with both lists, because the later entry replaces the earlier one.
    list_by_split = {split: list_file for split, list_file in possible_lists if list_file.is_file()}
    return list_by_split if "train" in list_by_split else {}


def find_table_files(data_folder: Path) -> list[Path]:
    """Return a folder's table files, training tables first, excluding Kaggle's sample submissions."""

    def sort_key(table_path: Path) -> tuple[bool, str]:
        is_training_table = table_path.name.lower().startswith(("train", "label"))
        return not is_training_table, table_path.name

    visible_files = [file_path for file_path in data_folder.iterdir() if not is_hidden(file_path.name)]
    table_files = [file_path for file_path in visible_files if file_path.suffix.lower() in TABLE_EXTENSIONS]
    return sorted((table for table in table_files if "submission" not in table.name.lower()), key=sort_key)


def find_lone_table(data_folder: Path) -> Path | None:
    """Return the only table file in a folder, or None if the folder may contain class folders."""
    table_files = find_table_files(data_folder)
    subfolders = folder_names(data_folder)
    has_nested_folders = any(folder_names(data_folder / subfolder) for subfolder in subfolders)
    # Two or more folders that are not all splits may be class folders next to an unrelated table
    may_be_classes = len(subfolders) > len(split_folders(data_folder)) and len(subfolders) > 1
    return table_files[0] if len(table_files) == 1 and not has_nested_folders and not may_be_classes else None


def list_classes(parent: Path, ignored_files: IgnoredFiles) -> ImagesByClass:
    """List the images in each class folder below a folder, including nested and linked folders.

    Args:
        parent: Folder that directly contains the class folders.
        ignored_files: Record to which this function adds non-image files, pipes, dangling links and images
            outside class folders.

    Returns:
        Sorted image paths of each class, relative to the class folder. The classes are sorted by name.

    Raises:
        ValueError: If a link points to one of its parent folders.
    """
    with os.scandir(parent) as dir_entries:
        paths_outside_classes = [dir_entry.path for dir_entry in dir_entries if not dir_entry.is_dir()]
    # accept_or_record() records other files, and returns True for images, which are recorded here
    for image_path in filter(ignored_files.accept_or_record, paths_outside_classes):
        ignored_files.add(OUTSIDE_CLASSES, image_path)
    return {folder: list_images(parent / folder, ignored_files) for folder in folder_names(parent)}


def list_images(folder: Path, ignored_files: IgnoredFiles) -> list[str]:
    """Return the sorted paths of all images in a folder and its subfolders, relative to that folder."""
    image_paths: list[str] = []
    for parent_folder, subfolder_names, file_names in os.walk(folder, onerror=_raise_error, followlinks=True):
        # os.walk skips the removed names
        subfolder_names[:] = [child for child in subfolder_names if not is_hidden(child)]
        for subfolder in (Path(parent_folder, child) for child in subfolder_names):
            if is_link_to_parent(subfolder):
                raise ValueError(f"{subfolder} is a link to one of its parent folders. Remove the link")
        file_paths = (os.path.join(parent_folder, file_name) for file_name in file_names)
        image_paths += filter(ignored_files.accept_or_record, file_paths)
    folder_prefix = os.path.join(folder, "")
    return sorted(image_path.removeprefix(folder_prefix) for image_path in image_paths)


def is_link_to_parent(path: Path) -> bool:
    """Return True if a path is a link to one of its parent folders."""
    return path.is_symlink() and path.resolve() in map(Path.resolve, path.absolute().parents)


def _raise_error(error: OSError) -> NoReturn:
    """Raise an error that os.walk would otherwise ignore."""
    raise error
