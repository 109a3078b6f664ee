"""Tests that classes are matched by name and that each difference between two class lists is reported."""

import numpy as np
import pytest

from onecurve.models.class_names import NEW_CLASS, match_classes

NUMBERS = tuple(map(str, range(12)))
AS_TEXT = tuple(sorted(NUMBERS))  # Class names in lexicographic order, as for class folders
SYNSETS = [("n1", "tench"), ("n2", "crane", "bird"), ("n3", "crane", "machine")]

# Model's classes, data's classes, labels, number of known classes, unknown and absent classes, and message
CASES = {
    "the same": ("ab", "ab", [0, 1], 2, "", "", ""),
    "another order": (
        *("abc", "cab", [2, 0, 1], 3, "", ""),
        "D contains the 3 classes of M in a different order. Classes are matched by name.",
    ),
    "a subset": (
        *("abc", "cb", [2, 1], 2, "", "a"),
        "D contains 2 of the 3 classes of M. Classes are matched by name.",
    ),
    "one class": (
        *("abc", "b", [1], 1, "", "ac"),
        "D contains 1 of the 3 classes of M. Classes are matched by name.",
    ),
    "new classes": (
        *("ab", "xby", [NEW_CLASS, 1, NEW_CLASS], 1, "xy", "a"),
        "D contains 1 of the 2 classes of M and 2 other classes. Classes are matched by name.",
    ),
    "no common class": (
        *("ab", "xy", [NEW_CLASS, NEW_CLASS], 0, "xy", "ab"),
        "D contains 0 of the 2 classes of M and 2 other classes. Classes are matched by name.",
    ),
    "no names": (
        *(None, "ba", [0, 1], 2, "", ""),
        "M contains no class names. The model's classes are assumed to be the classes of D, in the same"
        " order.",
    ),
    "accents apart": (["cafe\u0301", "x"], ["caf\u00e9", "x"], [0, 1], 2, "", "", ""),
    "other characters": (["m\u00b2"], ["m2"], [NEW_CLASS], 0, ["m2"], ["m\u00b2"], None),
    "identical lists with equal names": ("aa", "aa", [0, 1], 2, "", "", ""),
    "further names": (SYNSETS, ["machine", "n1", "bird"], [2, 0, 1], 3, "", "", None),
    "a shared further name": (SYNSETS, ["crane", "tench"], [NEW_CLASS, 0], 1, ["crane"], ["n2", "n3"], None),
    "a first name is another's further one": ([("a", "b"), ("b",)], ["b"], [1], 1, "", "a", None),
    "no classes": ("", "", [], 0, "", "", ""),
}


@pytest.mark.parametrize("case", CASES)
def test_two_lists_of_classes(case):
    model, data, labels, known, unknown, absent, sentence = CASES[case]
    match = match_classes(model, data)
    assert match.labels.dtype == np.int64
    assert match.labels.tolist() == labels
    assert len(match.known_classes) == known
    assert (match.unknown_classes, match.absent) == (tuple(unknown), tuple(absent))
    assert match.is_identity == (labels == list(range(len(model or data))))
    assert match.is_permutation == (not unknown and not absent)
    assert sentence is None or match.describe("D", "M") == sentence


def test_labels_and_rows_follow_the_names():
    # Match a model trained on class folders with the same images in Parquet files.
    match = match_classes(AS_TEXT, NUMBERS)
    assert [AS_TEXT[label] for label in match.labels] == list(NUMBERS)
    head = np.array([int(name) for name in AS_TEXT])  # Each row of this head contains its class index
    assert head[match.labels].tolist() == list(range(12))


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        ("ab", ["a", "a"], "the data contains several classes named a. Merge or rename these"),
        ("aab", "ab", "the model contains several classes named a"),
        (["x"], ["caf\u00e9", "cafe\u0301"], "the data contains several classes named caf\u00e9"),
        (
            SYNSETS,
            ["n1", "tench"],
            "the data contains n1, tench as separate classes, but these names belong to one class",
        ),
    ],
)
def test_equal_names_are_refused(model, data, message):
    with pytest.raises(ValueError, match=message):
        match_classes(model, data)


def test_unknown_classes_are_reported():
    match_classes("abc", "cb").refuse_unknown("D", "M")
    message = r"D contains 2 classes that M was not trained on: x, y\. .* trained on 3 classes: a, b, c$"
    with pytest.raises(ValueError, match=message):
        match_classes("abc", "xay").refuse_unknown("D", "M")
