"""Matching of a model's classes with the classes of a data set, by name.

Two names are equal if their Unicode NFC forms are equal. For example, macOS may store an accent separately
from its letter. NFKC would also equate names that differ in meaning, such as m² and m2.
"""

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from onecurve.system.text import plural, printable, some_of

NEW = -1  # label of a class that the model does not have
SHOWN = 5  # maximum number of names in a message


@dataclass(frozen=True)
class ClassMatch:
    """Match between the classes of a model and of a data set.

    Attributes:
        model: The model's class names in label order.
        data: The data's class names in label order.
        labels: The model's label (also the row of its head) of each class of the data, or NEW, int64
            [data classes].
        is_named: False if the model's file contains no class names. The classes are then assumed to be the
            data's classes in the same order.
    """

    model: tuple[str, ...]
    data: tuple[str, ...]
    labels: np.ndarray
    is_named: bool = True

    @property
    def is_identity(self) -> bool:
        """True if model and data have the same classes in the same order."""
        return len(self.model) == len(self.data) and np.array_equal(self.labels, np.arange(len(self.data)))

    @property
    def is_permutation(self) -> bool:
        """True if model and data have the same classes in any order."""
        return not (self.unknown or self.absent)

    @property
    def known(self) -> tuple[str, ...]:
        """Classes of the data that the model has."""
        return tuple(name for name, label in zip(self.data, self.labels, strict=True) if label != NEW)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Classes of the data that the model does not have."""
        return tuple(name for name, label in zip(self.data, self.labels, strict=True) if label == NEW)

    @cached_property
    def absent(self) -> tuple[str, ...]:
        """Classes of the model that the data does not have."""
        present = set(self.labels.tolist())
        return tuple(name for label, name in enumerate(self.model) if label not in present)

    def refuse_unknown(self, data: str, model: str) -> None:
        """Raise ValueError if the model lacks classes of the data.

        Args:
            data: Name of the data for the message.
            model: Name of the model for the message.
        """
        if self.unknown:
            raise ValueError(
                f"{printable(data)} has {plural(len(self.unknown), 'class')} that {model} was not trained on:"
                f" {some_of(self.unknown, SHOWN)}. The model's {plural(len(self.model), 'class')}:"
                f" {some_of(self.model, SHOWN)}"
            )

    def describe(self, data: str, model: str) -> str:
        """Return a sentence on how the classes differ, or "" if they are the same in the same order."""
        data, model_classes = printable(data), f"{plural(len(self.model), 'class')} of {model}"
        if not self.is_named:
            return (
                f"{model} does not name its classes. They are assumed to be the classes of {data}, in the"
                " same order."
            )
        if self.is_identity:
            return ""
        if self.is_permutation:
            return f"{data} has the {model_classes} in another order. They are matched by name."
        new = f" and {len(self.unknown):,} others" if self.unknown else ""
        return f"{data} has {len(self.known):,} of the {model_classes}{new}. They are matched by name."


def match_classes(model: Sequence[str | Sequence[str]] | None, data: Sequence[str]) -> ClassMatch:
    """Match the classes of a data set with the classes of a model, by name.

    Args:
        model: The model's classes in label order. A class has one name or several, and messages show the
            first. Alternative names shared by several classes are ignored. None means that the model's file
            contains no class names.
        data: The data's class names in label order.

    Raises:
        ValueError: Two classes in one list have the same name, or one class of the model matches several
            classes of the data.
    """
    if model is None:
        return ClassMatch(tuple(data), tuple(data), np.arange(len(data)), is_named=False)
    names = [(name,) if isinstance(name, str) else tuple(name) for name in model]
    first_names, data = tuple(class_names[0] for class_names in names), tuple(data)
    if first_names == data:  # a run with duplicate class names can still be evaluated
        return ClassMatch(first_names, data, np.arange(len(data)))
    refuse_duplicates(first_names, "the model")
    refuse_duplicates(data, "the data")
    aliases = [{_normal(name) for name in class_names[1:]} for class_names in names]
    counts = Counter(alias for class_aliases in aliases for alias in class_aliases)
    label_of = {
        alias: label
        for label, class_aliases in enumerate(aliases)
        for alias in class_aliases
        if counts[alias] == 1
    }
    label_of |= {_normal(name): label for label, name in enumerate(first_names)}
    labels = np.array([label_of.get(_normal(name), NEW) for name in data], np.int64)
    for label, count in Counter(labels.tolist()).items():
        if count > 1 and label != NEW:
            same = [name for name, match in zip(data, labels, strict=True) if match == label]
            raise ValueError(
                f"the data has {some_of(same)} as separate classes, but they are one class of the model"
            )
    return ClassMatch(first_names, data, labels)


def refuse_duplicates(names: Sequence[str], owner: str) -> None:
    """Raise ValueError if two class names are equal after normalisation.

    Args:
        names: Class names.
        owner: Name of the model or data for the message.
    """
    counts = Counter(map(_normal, names))
    if duplicates := [name for name in names if counts[_normal(name)] > 1]:
        raise ValueError(
            f"{owner} has several classes named {printable(duplicates[0])}. Merge or rename them"
        )


def _normal(name: str) -> str:
    # A manifest contains names of any bytes; runs store their printable form.
    return unicodedata.normalize("NFC", printable(name))
