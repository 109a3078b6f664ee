"""Mapping of a data set's classes to a model's classes by class name.

Two names match if their Unicode NFC forms are identical, because macOS may store an accent separately from
its letter. NFKC is not used, because it would match names with different meanings, such as m² and m2.
"""

import itertools
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from onecurve.system.text import plural, printable, some_of

NEW_CLASS = -1  # label of a class that the model was not trained on
MAX_SHOWN_CLASSES = 5  # maximum number of class names in a message
ClassNames = str | Sequence[str]  # name of one class, or its displayed name followed by alternative names


@dataclass(frozen=True)
class ClassMatch:
    """Mapping from a data set's classes to a model's classes.

    Attributes:
        model: Class names of the model, in label order.
        data_classes: Class names of the data set, in label order.
        labels: Model label of each data set class (also the row in the model's head), or NEW_CLASS for an
            unknown class, int64 [data classes].
        has_model_names: False if the model's file contains no class names. In that case, the model's classes
            are assumed to be the data set's classes, in the same order.
    """

    model: tuple[str, ...]  # class names
    data_classes: tuple[str, ...]
    labels: np.ndarray  # model label of each data set class
    has_model_names: bool = True

    @property
    def is_identity(self) -> bool:
        """True if the model and the data have the same classes in the same order."""
        return len(self.model) == len(self.labels) and np.array_equal(
            self.labels, np.arange(len(self.labels))
        )

    @property
    def is_permutation(self) -> bool:
        """True if the model and the data have the same classes, in any order."""
        return not (self.unknown_classes or self.absent)

    @property
    def known_classes(self) -> tuple[str, ...]:
        """Names of the data set's classes that the model was trained on."""
        return tuple(itertools.compress(self.data_classes, self.labels != NEW_CLASS))

    @property
    def unknown_classes(self) -> tuple[str, ...]:
        """Names of the data set's classes that the model was not trained on."""
        return tuple(itertools.compress(self.data_classes, self.labels == NEW_CLASS))

    @cached_property
    def absent(self) -> tuple[str, ...]:
        """Names of the model's classes that are missing from the data."""
        present_labels = set(self.labels.tolist())
        return tuple(class_name for label, class_name in enumerate(self.model) if label not in present_labels)

    def refuse_unknown(self, data_name: str, model_name: str) -> None:
        """Raise ValueError if the data contains classes that the model was not trained on.

        Args:
            data_name: Name of the data set for the error message.
            model_name: Name of the model for the error message.
        """
        if self.unknown_classes:
            raise ValueError(
                f"{printable(data_name)} contains {plural(len(self.unknown_classes), 'class')}"
                f" that {model_name} was not trained on: {some_of(self.unknown_classes, MAX_SHOWN_CLASSES)}."
                f" The model was trained on {plural(len(self.model), 'class')}:"
                f" {some_of(self.model, MAX_SHOWN_CLASSES)}"
            )

    def describe(self, data_name: str, model_name: str) -> str:
        """Return a message about how the model's classes differ from the data's, or "" if they are identical.

        Args:
            data_name: Name of the data set for the message.
            model_name: Name of the model for the message.
        """
        data_name = printable(data_name)
        if not self.has_model_names:
            return (
                f"{model_name} contains no class names."
                f" The model's classes are assumed to be the classes of {data_name}, in the same order."
            )
        if self.is_identity:
            return ""
        model_phrase = f"{plural(len(self.model), 'class')} of {model_name}"
        if self.is_permutation:
            return (
                f"{data_name} contains the {model_phrase} in a different order. Classes are matched by name."
            )
        unknown_count = len(self.unknown_classes)
        other_phrase = f" and {plural(unknown_count, 'other class')}" if unknown_count else ""
        return (
            f"{data_name} contains {len(self.known_classes):,} of the {model_phrase}{other_phrase}."
            " Classes are matched by name."
        )


def match_resumed_classes(
    saved_classes: Sequence[str], run_classes: Sequence[str], checkpoint_name: str
) -> ClassMatch:
    """Match a resumed run's classes to the checkpoint's. The classes may be in a different order.

    Raises:
        ValueError: If the class names differ.
    """
    class_match = match_classes(saved_classes, run_classes)
    if class_match.is_permutation:
        return class_match
    differing_classes = {"new": class_match.unknown_classes, "missing": class_match.absent}
    class_differences = "; ".join(
        f"{class_status}: {some_of(class_names, MAX_SHOWN_CLASSES)}"
        for class_status, class_names in differing_classes.items()
        if class_names
    )
    raise ValueError(
        f"{checkpoint_name} was trained on different classes ({class_differences})."
        " A resumed run can't change its classes."
        " To start a new run with the head rows of known classes, use train_vit.py --weights."
    )


def match_classes(model_classes: Sequence[ClassNames] | None, data_classes: Sequence[str]) -> ClassMatch:
    """Map a data set's classes to a model's classes by name.

    Args:
        model_classes: Class names of the model, in label order. For a class with several names, messages show
            the first name, and alternative names shared by several classes are ignored. None means that the
            model's file contains no class names.
        data_classes: Class names of the data set, in label order.

    Raises:
        ValueError: If two model classes or two data classes have the same name, or if several data classes
            match one model class.
    """
    data_classes = tuple(data_classes)
    identity_labels = np.arange(len(data_classes))
    if model_classes is None:
        return ClassMatch(data_classes, data_classes, identity_labels, has_model_names=False)
    first_names: list[str] = []
    label_by_alias: dict[str, int] = {}
    alias_counts: Counter[str] = Counter()  # number of classes with each alias
    for label, class_names in enumerate(model_classes):
        first_name, *aliases = [class_names] if isinstance(class_names, str) else class_names
        first_names.append(first_name)
        unique_aliases = set(map(_normalise, aliases))  # the names of one class may contain duplicates
        alias_counts.update(unique_aliases)
        label_by_alias.update(dict.fromkeys(unique_aliases, label))
    if tuple(first_names) == data_classes:  # allows the evaluation of a run with duplicate class names
        return ClassMatch(data_classes, data_classes, identity_labels)
    refuse_duplicates(first_names, "the model")
    refuse_duplicates(data_classes, "the data")
    # Aliases of several classes are ambiguous. A first name takes precedence over another class's alias.
    label_by_name = {alias: label for alias, label in label_by_alias.items() if alias_counts[alias] == 1}
    label_by_name |= {_normalise(first_name): label for label, first_name in enumerate(first_names)}
    model_labels = np.array(
        [label_by_name.get(_normalise(data_class), NEW_CLASS) for data_class in data_classes], np.int64
    )
    for label, match_count in Counter(model_labels.tolist()).items():
        if match_count > 1 and label != NEW_CLASS:
            same_class_names = [data_classes[index] for index in np.flatnonzero(model_labels == label)]
            raise ValueError(
                f"the data contains {some_of(same_class_names)} as separate classes,"
                " but these names belong to one class of the model. Merge these classes in the data"
            )
    return ClassMatch(tuple(first_names), data_classes, model_labels)


def refuse_duplicates(class_names: Sequence[str], owner_name: str) -> None:
    """Raise ValueError if two class names are identical after Unicode normalisation.

    Args:
        class_names: Class names to check.
        owner_name: Name of the model or data set for the error message.
    """
    name_counts = Counter(map(_normalise, class_names))
    if duplicate_names := [name for name in class_names if name_counts[_normalise(name)] > 1]:
        raise ValueError(
            f"{owner_name} contains several classes named {printable(duplicate_names[0])}."
            " Merge or rename these classes"
        )


def _normalise(class_name: str) -> str:
    """Return the form in which two spellings of a class name are identical.

    Names in a manifest may contain arbitrary bytes, whereas runs store escaped, printable names.
    """
    return unicodedata.normalize("NFC", printable(class_name))
