"""Matching of a model's classes with a data set's classes by name.

Two names are equal if their Unicode NFC forms are equal. For example, macOS may store an accent separately
from its letter. NFKC is not used because it would equate names with different meanings, such as m² and m2.
"""

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from onecurve.system.text import plural, printable, some_of

NEW = -1  # label of a class that the model was not trained on
SHOWN = 5  # maximum number of names in a message


@dataclass(frozen=True)
class ClassMatch:
    """Mapping between a model's classes and a data set's classes.

    Attributes:
        model: The model's class names in label order.
        data: The data's class names in label order.
        labels: For each class of the data, the model's label (also the row of the model's head) or NEW, int64
            [data classes].
        is_named: False if the model's file contains no class names. The model's classes are then assumed to
            equal the data's classes, in the same order.
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
        """Names of the data's classes that the model was trained on."""
        return tuple(name for name, label in zip(self.data, self.labels, strict=True) if label != NEW)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of the data's classes that the model was not trained on."""
        return tuple(name for name, label in zip(self.data, self.labels, strict=True) if label == NEW)

    @cached_property
    def absent(self) -> tuple[str, ...]:
        """Names of the model's classes that do not occur in the data."""
        present = set(self.labels.tolist())
        return tuple(name for label, name in enumerate(self.model) if label not in present)

    def refuse_unknown(self, data: str, model: str) -> None:
        """Raise ValueError if the data contains classes that the model was not trained on.

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
        """Return a sentence that describes how the classes differ, or "" if names and order are the same."""
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
    """Match a data set's classes with a model's classes by name.

    Args:
        model: The model's classes in label order. A class may have several names, of which messages show the
            first. Alternative names that several classes share are ignored. None means that the model's file
            contains no class names.
        data: The data's class names in label order.

    Raises:
        ValueError: Two classes in one list have the same name, or a class of the model matches several
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
    # Names in a manifest may contain arbitrary bytes, but runs store the printable form of names.
    return unicodedata.normalize("NFC", printable(name))
