"""Mapping of a data set's classes to a model's classes by class name.

Two names match if their Unicode NFC forms are identical, because macOS may store an accent separately from
its letter. NFKC is not used, because it would match names with different meanings, such as m² and m2.
"""

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from onecurve.system.text import plural, printable, some_of

NEW_CLASS = -1  # label of a class that the model was not trained on
SHOWN = 5  # maximum number of class names in a message


@dataclass(frozen=True)
class ClassMatch:
    """Mapping from a data set's classes to a model's classes.

    Attributes:
        model: Class names of the model, in label order.
        data: Class names of the data set, in label order.
        labels: Model label of each data set class (also the row in the model's head), or NEW_CLASS for an
            unknown class, int64 [data classes].
        is_named: False if the model's file contains no class names. In that case, the model's classes are
            assumed to be the data set's classes, in the same order.
    """

    model: tuple[str, ...]
    data: tuple[str, ...]
    labels: np.ndarray
    is_named: bool = True

    @property
    def is_identity(self) -> bool:
        """True if the model and the data have the same classes in the same order."""
        return len(self.model) == len(self.data) and np.array_equal(self.labels, np.arange(len(self.data)))

    @property
    def is_permutation(self) -> bool:
        """True if the model and the data have the same classes, in any order."""
        return not (self.unknown or self.absent)

    @property
    def known(self) -> tuple[str, ...]:
        """Names of the data set's classes that the model was trained on."""
        return tuple(name for name, label in zip(self.data, self.labels, strict=True) if label != NEW_CLASS)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of the data set's classes that the model was not trained on."""
        return tuple(name for name, label in zip(self.data, self.labels, strict=True) if label == NEW_CLASS)

    @cached_property
    def absent(self) -> tuple[str, ...]:
        """Names of the model's classes that are missing from the data."""
        present = set(self.labels.tolist())
        return tuple(name for label, name in enumerate(self.model) if label not in present)

    def refuse_unknown(self, data: str, model: str) -> None:
        """Raise ValueError if the data contains classes that the model was not trained on.

        Args:
            data: Name of the data set for the error message.
            model: Name of the model for the error message.
        """
        if self.unknown:
            raise ValueError(
                f"{printable(data)} contains {plural(len(self.unknown), 'class')} that {model} was not"
                f" trained on: {some_of(self.unknown, SHOWN)}. The model was trained on"
                f" {plural(len(self.model), 'class')}: {some_of(self.model, SHOWN)}"
            )

    def describe(self, data: str, model: str) -> str:
        """Describe how the model's classes differ from the data's, or return "" if they are identical."""
        data, model_classes = printable(data), f"{plural(len(self.model), 'class')} of {model}"
        if not self.is_named:
            return (
                f"{model} contains no class names. The model's classes are assumed to be the classes of"
                f" {data}, in the same order."
            )
        if self.is_identity:
            return ""
        if self.is_permutation:
            return f"{data} contains the {model_classes} in a different order. Classes are matched by name."
        new = f" and {plural(len(self.unknown), 'other class')}" if self.unknown else ""
        return (
            f"{data} contains {len(self.known):,} of the {model_classes}{new}. Classes are matched by name."
        )


def match_classes(model: Sequence[str | Sequence[str]] | None, data: Sequence[str]) -> ClassMatch:
    """Map a data set's classes to a model's classes by name.

    Args:
        model: Class names of the model, in label order. For a class with several names, messages show the
            first name, and alternative names shared by several classes are ignored. None means that the
            model's file contains no class names.
        data: Class names of the data set, in label order.

    Raises:
        ValueError: If two model classes or two data classes have the same name, or if several data classes
            match one model class.
    """
    if model is None:
        return ClassMatch(tuple(data), tuple(data), np.arange(len(data)), is_named=False)
    names_by_class = [(name,) if isinstance(name, str) else tuple(name) for name in model]
    first_names, data = tuple(class_names[0] for class_names in names_by_class), tuple(data)
    if first_names == data:  # allows the evaluation of a run with duplicate class names
        return ClassMatch(first_names, data, np.arange(len(data)))
    refuse_duplicates(first_names, "the model")
    refuse_duplicates(data, "the data")
    aliases = [{_normalised(name) for name in class_names[1:]} for class_names in names_by_class]
    alias_counts = Counter(alias for class_aliases in aliases for alias in class_aliases)
    label_of = {
        alias: label
        for label, class_aliases in enumerate(aliases)
        for alias in class_aliases
        if alias_counts[alias] == 1
    }
    label_of |= {_normalised(name): label for label, name in enumerate(first_names)}
    labels = np.array([label_of.get(_normalised(name), NEW_CLASS) for name in data], np.int64)
    for label, count in Counter(labels.tolist()).items():
        if count > 1 and label != NEW_CLASS:
            same = [name for name, match in zip(data, labels, strict=True) if match == label]
            raise ValueError(
                f"the data contains {some_of(same)} as separate classes, but these names belong to one class"
                " of the model. Merge these classes in the data"
            )
    return ClassMatch(first_names, data, labels)


def refuse_duplicates(names: Sequence[str], source_name: str) -> None:
    """Raise ValueError if two class names are identical after Unicode normalisation.

    Args:
        names: Class names to check.
        source_name: Name of the model or data set for the error message.
    """
    counts = Counter(map(_normalised, names))
    if duplicates := [name for name in names if counts[_normalised(name)] > 1]:
        raise ValueError(
            f"{source_name} contains several classes named {printable(duplicates[0])}. Merge or rename these"
            " classes"
        )


def _normalised(name: str) -> str:
    # Names in a manifest may contain arbitrary bytes, whereas runs store escaped, printable names.
    return unicodedata.normalize("NFC", printable(name))
