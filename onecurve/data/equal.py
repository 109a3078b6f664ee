"""Detection of duplicate images (identical bytes) that occur in two splits or have two labels."""

import hashlib
from collections.abc import Sequence

import numpy as np

from onecurve.data.encoded import EncodedImages
from onecurve.system.text import printable


class EqualImages:
    """Groups of images with identical bytes. Only images whose size in bytes is not unique are hashed.

    Args:
        parts: Training images, followed by the images of each evaluated split.

    Attributes:
        positions: Ascending positions of the hashed images in the concatenation of all `parts`, int64 [n].
        groups: Group number of each hashed image, int64 [n]. Images with identical bytes have the same group
            number.
    """

    def __init__(self, parts: Sequence[EncodedImages]):
        self.parts, self.part_starts = parts, np.cumsum([0, *map(len, parts)])
        sizes = np.concatenate([[images.size(i) for i in range(len(images))] for images in parts])
        _, inverse, counts = np.unique(sizes, return_inverse=True, return_counts=True)
        self.positions = np.flatnonzero(counts[inverse] > 1)
        digests = [hashlib.sha256(self._content(position)).digest() for position in self.positions.tolist()]
        _, self.groups = np.unique(np.array(digests, "S32"), return_inverse=True)

    def split_warnings(self, names: Sequence[str | None]) -> list[str]:
        """Return a warning for each evaluated split that contains training images.

        Args:
            names: Names of the evaluated splits, in the order of `parts`.
        """
        messages, is_trained = [], self.positions < self.part_starts[1]
        for split, start, end in zip(names, self.part_starts[1:], self.part_starts[2:], strict=False):
            is_in_split = (start <= self.positions) & (self.positions < end)
            shared = np.flatnonzero(is_in_split & np.isin(self.groups, self.groups[is_trained]))
            if len(shared):
                trained = np.flatnonzero(is_trained & (self.groups == self.groups[shared[0]]))
                messages.append(
                    f"{len(shared):,} of the {end - start:,} {split} images are also training images, for"
                    f" example {self._display_name(shared[0])} and {self._display_name(trained[0])}. The"
                    " measured accuracy will be too high. Remove these images from one of the two splits"
                )
        return messages

    def class_warnings(self, labels: np.ndarray, classes: Sequence[str]) -> list[str]:
        """Return a warning if images with identical bytes have different labels.

        Args:
            labels: Labels of the images in all `parts`, int64 [N].
            classes: Class names in label order.
        """
        labels = labels[self.positions]
        order = np.lexsort((labels, self.groups))
        conflicts = np.flatnonzero((np.diff(self.groups[order]) == 0) & (np.diff(labels[order]) != 0))
        if not len(conflicts):
            return []
        count = np.isin(self.groups, self.groups[order[conflicts]]).sum()
        example_pair = order[conflicts[0] : conflicts[0] + 2]
        example = " and ".join(
            f"{self._display_name(index)} ({printable(classes[labels[index]])})" for index in example_pair
        )
        return [
            f"{count:,} images have contradictory labels, because identical files belong to different"
            f" classes, for example {example}. Correct the labels or remove these images"
        ]

    def _content(self, position: int) -> bytes:
        images, index = self._locate(position)
        return images.content(index)

    def _display_name(self, index: int) -> str:
        """Return the display name of the image at position `positions[index]`."""
        images, index_in_part = self._locate(self.positions[index])
        return images.display_name(index_in_part)

    def _locate(self, position: int) -> tuple[EncodedImages, int]:
        """Return the element of `parts` that contains an image position, and the image's index in it."""
        part = int(np.searchsorted(self.part_starts, position, side="right")) - 1
        return self.parts[part], int(position - self.part_starts[part])
