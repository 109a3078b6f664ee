"""Compares a model's classes with a data set's, by name: labels, rows of the head, missing and new classes.

Names are equal when their NFC forms are: Unicode then calls them the same characters, such as an accent that
a Mac stores apart from its letter. NFKC would also equate names that people tell apart, such as m² and m2.
"""

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from onecurve.system.text import plural, printable, some_of

NEW = -1  # in place of a label: the model does not have the class
SHOWN = 5  # names in a message


@dataclass(frozen=True)
class ClassMatch:
    """The classes of a data set, found among a model's. Both lists are in label order."""

    model: tuple[str, ...]
    data: tuple[str, ...]
    labels: np.ndarray  # int64 [data classes]: the model's label, and row of its head, of each class, or NEW
    is_named: bool = True  # False: the model has no names, and its classes are taken in the data's order

    @property
    def is_identity(self) -> bool:
        """True when both have the same classes in the same order."""
        return len(self.model) == len(self.data) and np.array_equal(self.labels, np.arange(len(self.data)))

    @property
    def is_permutation(self) -> bool:
        """True when both have the same classes, in any order."""
        return not (self.unknown or self.absent)

    @property
    def known(self) -> tuple[str, ...]:
        """The data's classes that the model has."""
        return tuple(name for name, label in zip(self.data, self.labels, strict=True) if label != NEW)

    @property
    def unknown(self) -> tuple[str, ...]:
        """The data's classes that the model does not have."""
        return tuple(name for name, label in zip(self.data, self.labels, strict=True) if label == NEW)

    @cached_property
    def absent(self) -> tuple[str, ...]:
        """The model's classes that the data does not have."""
        present = set(self.labels.tolist())
        return tuple(name for label, name in enumerate(self.model) if label not in present)

    def refuse_unknown(self, data: str, model: str) -> None:
        """Raise ValueError for classes that the model does not have. data, model: their names, for people."""
        if self.unknown:
            raise ValueError(
                f"{printable(data)} has {plural(len(self.unknown), 'class')} that {model} was not trained on:"
                f" {some_of(self.unknown, SHOWN)}. The model's {plural(len(self.model), 'class')}:"
                f" {some_of(self.model, SHOWN)}"
            )

    def describe(self, data: str, model: str) -> str:
        """Return a sentence on how the classes differ; empty when they are the same in the same order."""
        data, its_classes = printable(data), f"{plural(len(self.model), 'class')} of {model}"
        if not self.is_named:
            return f"{model} does not name its classes: they are taken to be those of {data}, in its order."
        if self.is_identity:
            return ""
        if self.is_permutation:
            return f"{data} has the {its_classes} in another order: they are matched by name."
        new = f", and {len(self.unknown):,} others" if self.unknown else ""
        return f"{data} has {len(self.known):,} of the {its_classes}{new}, matched by name."


def match_classes(model: Sequence[str | Sequence[str]] | None, data: Sequence[str]) -> ClassMatch:
    """Find the data's classes among the model's, by name.

    model: in label order, each class by its name or by several, of which the first is shown; None: its file
    names no classes. A further name that several classes share stands for none of them. Raises ValueError
    when two classes of one list have the same name.
    """
    if model is None:
        return ClassMatch(tuple(data), tuple(data), np.arange(len(data)), is_named=False)
    names = [(name,) if isinstance(name, str) else tuple(name) for name in model]
    first, data = tuple(each[0] for each in names), tuple(data)
    if first == data:  # so a run whose classes share a name can still be evaluated
        return ClassMatch(first, data, np.arange(len(data)))
    refuse_duplicates(first, "the model")
    refuse_duplicates(data, "the data")
    further = [{_normal(name) for name in each[1:]} for each in names]
    times = Counter(name for each in further for name in each)
    label_of = {name: label for label, each in enumerate(further) for name in each if times[name] == 1}
    label_of |= {_normal(name): label for label, name in enumerate(first)}
    labels = np.array([label_of.get(_normal(name), NEW) for name in data], np.int64)
    for label, count in Counter(labels.tolist()).items():
        if count > 1 and label != NEW:
            same = [name for name, its in zip(data, labels, strict=True) if its == label]
            raise ValueError(f"the data has {some_of(same)} as different classes: to the model they are one")
    return ClassMatch(first, data, labels)


def refuse_duplicates(names: Sequence[str], owner: str) -> None:
    """Raise ValueError when two names are equal after normalisation. owner: who has them, for people."""
    times = Counter(map(_normal, names))
    if same := [name for name in names if times[_normal(name)] > 1]:
        raise ValueError(
            f"{owner} has several classes with the same name, {printable(same[0])}: merge or rename them"
        )


def _normal(name: str) -> str:
    return unicodedata.normalize(
        "NFC", printable(name)
    )  # a manifest has names of any bytes, a run shows them
