"""Images of equal bytes: in two splits, or with two labels."""

import hashlib
from collections.abc import Sequence

import numpy as np

from onecurve.data.encoded import Encoded
from onecurve.system.text import printable


class EqualImages:
    """The images of a data set whose bytes may equal those of another one: those whose size occurs twice.

    numbers: int64 [n], ascending, through all parts. groups: int64 [n], the same for images of equal bytes.
    """

    def __init__(self, parts: Sequence[Encoded]):
        """parts: the images of training, then those of each evaluated split. Reads those in `numbers`."""
        self.parts, self.starts = parts, np.cumsum([0, *map(len, parts)])
        sizes = np.concatenate([[images.size(i) for i in range(len(images))] for images in parts])
        _, inverse, counts = np.unique(sizes, return_inverse=True, return_counts=True)
        self.numbers = np.flatnonzero(counts[inverse] > 1)
        digests = [hashlib.sha256(self._content(number)).digest() for number in self.numbers.tolist()]
        _, self.groups = np.unique(np.array(digests, "S32"), return_inverse=True)

    def in_two_splits(self, names: Sequence[str | None]) -> list[str]:
        """Return a warning for each evaluated split with images that are trained on, too. names: of these."""
        lines, is_trained = [], self.numbers < self.starts[1]
        for split, start, end in zip(names, self.starts[1:], self.starts[2:], strict=False):
            is_here = (start <= self.numbers) & (self.numbers < end)
            both = np.flatnonzero(is_here & np.isin(self.groups, self.groups[is_trained]))
            if len(both):
                trained = np.flatnonzero(is_trained & (self.groups == self.groups[both[0]]))
                lines.append(
                    f"{len(both):,} of the {end - start:,} {split} images are training images, too, as"
                    f" {self._where(both[0])} and {self._where(trained[0])}: remove them from one split:"
                    " accuracies are too high"
                )
        return lines

    def in_two_classes(self, labels: np.ndarray, classes: Sequence[str]) -> list[str]:
        """Return a warning if images of equal bytes have several labels. labels: of all parts, int64 [N]."""
        labels = labels[self.numbers]
        order = np.lexsort((labels, self.groups))
        differ = np.flatnonzero((np.diff(self.groups[order]) == 0) & (np.diff(labels[order]) != 0))
        if not len(differ):
            return []
        count = np.isin(self.groups, self.groups[order[differ]]).sum()
        pair = order[differ[0] : differ[0] + 2]
        named = " and ".join(f"{self._where(k)} ({printable(classes[labels[k]])})" for k in pair)
        return [
            f"{count:,} images have contradictory labels: the same bytes are in several classes, as {named}."
            " Correct the labels, or remove the images"
        ]

    def _content(self, number: int) -> bytes:
        images, i = self._part(number)
        return images.content(i)

    def _where(self, k: int) -> str:
        """k: the place of an image in `numbers`."""
        images, i = self._part(self.numbers[k])
        return images.where(i)

    def _part(self, number: int) -> tuple[Encoded, int]:
        """Return the part that has this image, and its number there."""
        part = int(np.searchsorted(self.starts, number, side="right")) - 1
        return self.parts[part], int(number - self.starts[part])
