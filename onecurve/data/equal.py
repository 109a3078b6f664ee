"""Detection of duplicate images (identical bytes) that occur in two splits or have two labels."""

import hashlib
from collections.abc import Sequence

import numpy as np

from onecurve.data.encoded import EncodedImages
from onecurve.system.text import printable


class DuplicateImages:
    """Groups of images with identical bytes. Only images whose size in bytes is not unique are hashed.

    Args:
        parts: Training images, followed by the images of each evaluated split.

    Attributes:
        hashed_positions: Ascending positions of the hashed images in the concatenation of all `parts`,
            int64 [n].
        group_numbers: Group number of each hashed image, int64 [n]. Images with identical bytes have the same
            group number.
    """

    def __init__(self, parts: Sequence[EncodedImages]):
        self.parts = parts
        # Position of the first image of each part, followed by the total number of images
        self.part_starts = np.cumsum([0, *map(len, parts)])
        sizes_bytes = np.concatenate([[part.size(index) for index in range(len(part))] for part in parts])
        # Images that share their size with another image are read and hashed
        _, size_numbers, size_counts = np.unique(sizes_bytes, return_inverse=True, return_counts=True)
        self.hashed_positions = np.flatnonzero(size_counts[size_numbers] > 1)
        positions = self.hashed_positions.tolist()
        image_hashes = [hashlib.sha256(self._read_content(position)).digest() for position in positions]
        _, self.group_numbers = np.unique(np.array(image_hashes, "S32"), return_inverse=True)

    def split_warnings(self, split_names: Sequence[str | None]) -> list[str]:
        """Return a warning for each evaluated split that contains training images.

        Args:
            split_names: Names of the evaluated splits, in the order of `parts`. Names that have no part, or
                None, may follow.
        """
        warning_messages: list[str] = []
        is_training = self.hashed_positions < self.part_starts[1]  # the first part is the training split
        training_groups = self.group_numbers[is_training]
        evaluated_starts, evaluated_ends = self.part_starts[1:], self.part_starts[2:]
        for split_name, start, end in zip(split_names, evaluated_starts, evaluated_ends, strict=False):
            is_in_split = (start <= self.hashed_positions) & (self.hashed_positions < end)
            shared_indices = np.flatnonzero(is_in_split & np.isin(self.group_numbers, training_groups))
            if len(shared_indices):
                example_index = shared_indices[0]
                is_example_copy = self.group_numbers == self.group_numbers[example_index]
                training_copy = np.flatnonzero(is_training & is_example_copy)[0]
                example_pair = f"{self._display_name(example_index)} and {self._display_name(training_copy)}"
                warning_messages.append(
                    f"{len(shared_indices):,} of the {end - start:,} {split_name} images are also training"
                    f" images, for example {example_pair}. The measured accuracy will be too high."
                    " Remove these images from one of the two splits"
                )
        return warning_messages

    def class_warnings(self, labels: np.ndarray, class_names: Sequence[str]) -> list[str]:
        """Return a warning if images with identical bytes have different labels.

        Args:
            labels: Labels of the images in all `parts`, int64 [N].
            class_names: Class names in label order.
        """
        hashed_labels = labels[self.hashed_positions]
        # Sorting by group and then by label puts different labels of the same group next to each other.
        sorted_indices = np.lexsort((hashed_labels, self.group_numbers))
        is_same_group = np.diff(self.group_numbers[sorted_indices]) == 0
        is_other_label = np.diff(hashed_labels[sorted_indices]) != 0
        conflict_starts = np.flatnonzero(is_same_group & is_other_label)
        if not len(conflict_starts):
            return []
        conflicting_groups = self.group_numbers[sorted_indices[conflict_starts]]
        conflicting_count = np.isin(self.group_numbers, conflicting_groups).sum()
        # Two neighbours with identical bytes and different labels
        first_conflict = sorted_indices[conflict_starts[0] : conflict_starts[0] + 2]
        example_pair = " and ".join(
            f"{self._display_name(hashed_index)} ({printable(class_names[hashed_labels[hashed_index]])})"
            for hashed_index in first_conflict
        )
        return [
            f"{conflicting_count:,} images have contradictory labels,"
            " because identical files belong to different classes,"
            f" for example {example_pair}. Correct the labels or remove these images"
        ]

    def _read_content(self, image_position: int) -> bytes:
        """Read the encoded bytes of the image at a position in the concatenation of all `parts`."""
        part_images, index_in_part = self._locate(image_position)
        return part_images.content(index_in_part)

    def _display_name(self, hashed_index: int) -> str:
        """Return the display name of the image at position `hashed_positions[hashed_index]`."""
        part_images, index_in_part = self._locate(self.hashed_positions[hashed_index])
        return part_images.display_name(index_in_part)

    def _locate(self, image_position: int) -> tuple[EncodedImages, int]:
        """Return the element of `parts` that contains an image position, and the image's index in it."""
        part_index = int(np.searchsorted(self.part_starts, image_position, side="right")) - 1
        return self.parts[part_index], int(image_position - self.part_starts[part_index])
