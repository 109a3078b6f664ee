"""Index existing WebDataset shards on this host or in S3, without copying them.

A shard is a tar (https://github.com/webdataset/webdataset). Consecutive members with the same key form a
sample. The key is the member's path up to the first dot in the file name, and the rest is the field. For
example, `n01440764/a.jpg` and `n01440764/a.cls` are two fields of one sample. A sample contains one image
(jpg, png, ...) and a class, either as digits (cls) or as "label" or "cls" in JSON (json). Other fields are
ignored.
"""

import fnmatch
import glob
import itertools
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from onecurve.data.decode import IMAGE_EXTENSIONS
from onecurve.data.encoded import SPLITS
from onecurve.system.files import parse_json
from onecurve.system.s3 import ObjectStore
from tools.prepare.archives import ArchiveMember, archive_members, open_stream
from tools.prepare.originals import OriginalImages, hash_of_rows

# Words in the names of a split's shards or folders
KEYWORDS_BY_SPLIT = {"train": ("train",), "val": ("val", "test")}
WILDCARD_PATTERN = re.compile(r"[*?[]")
BRACES_PATTERN = re.compile(r"\{(\d+)\.\.(\d+)\}")  # for WebDataset patterns such as train-{0000..1023}.tar
IMAGE_FIELDS = tuple(extension.removeprefix(".") for extension in IMAGE_EXTENSIONS)
CLASS_FIELDS = ("cls", "json")
JSON_CLASS_KEYS = ("label", "cls")
MAX_FIELD_BYTES = 2**20
CLASS_LIMIT = 2**20  # labels are smaller than this number
MAX_CLASS_DIGITS = 8  # maximum number of digits of a label, including leading zeros
READER_THREADS = 8  # number of threads that read shards. The threads mostly wait for S3


class ShardTar(NamedTuple):
    url: str  # absolute path or s3://bucket/key
    bytes: int  # size of the shard
    version: str | None  # text that changes when the shard is replaced


class IndexRow(NamedTuple):
    offset: int  # the image's position in the shard, in bytes
    length: int  # size of the image, in bytes
    label: int
    name: str  # name of the archive member that contains the image


def bucket_client(url: str) -> ObjectStore | None:
    """Return a client of the bucket in an s3:// URL, or None for a path."""
    return ObjectStore("/".join(url.split("/")[:3])) if url.startswith("s3://") else None


class WebDataset(OriginalImages):
    """Train and val shards, specified by shell patterns or brace patterns."""

    def __init__(self, patterns: dict[str, str], class_file: str | None):
        """Find the shards.

        `class_file` contains one class name per line. If class_file is None, the class names are numbers.
        """
        self.class_file = class_file
        super().__init__(patterns)

    def inspect_parts(self) -> None:
        """Find all shards, and set the sizes and versions of the splits.

        Raises:
            ValueError: If a shard is missing, if a shard is in both splits, or if the splits are in different
                buckets or only one split is in S3.
        """
        first_store, *other_stores = map(bucket_client, self.locations.values())
        self.store = first_store  # one client for all shards
        first_url = first_store and first_store.url
        if any((store and store.url) != first_url for store in other_stores):
            remedy = "Put all shards on this host or into one bucket."
            raise ValueError(f"train and val are in different places. {remedy}")
        split_patterns = self.locations.items()
        self.shards_by_split = {split: find_shards(pattern, self.store) for split, pattern in split_patterns}
        urls_by_split = [{shard.url for shard in shards} for shards in self.shards_by_split.values()]
        if len(urls_by_split) == 2 and (common_urls := set.intersection(*urls_by_split)):
            raise ValueError(f"{min(common_urls)} is in both train and val. Pass --train and --val.")
        for split, shards in self.shards_by_split.items():
            self.bytes_by_part[split] = sum(shard.bytes for shard in shards)
            self.version_by_part[split] = hash_of_rows([*map(tuple, shards)])

    def read_classes(self) -> None:
        """Set the classes from `class_file`, which contains one class name per line, in label order.

        Without a file, complete_class_names() derives the names from the labels.
        """
        if self.class_file is None:
            return
        with open_stream(self.class_file) as stream:
            class_lines = stream.read(MAX_FIELD_BYTES).decode(errors="replace").splitlines()
        self.classes = [
            {"wnid": str(label), "name": class_line.strip()} for label, class_line in enumerate(class_lines)
        ]

    def complete_class_names(self, largest_label: int) -> None:
        """Without a class file, name the classes by their labels. Otherwise, check the number of names.

        Raises:
            ValueError: If the class file contains no name for `largest_label`, the largest label in a sample.
        """
        if self.class_file is None:
            self.classes = [{"wnid": str(label), "name": str(label)} for label in range(largest_label + 1)]
        elif largest_label >= len(self.classes):
            raise ValueError(
                f"{self.class_file} contains {len(self.classes):,} class names, but a sample has the label"
                f" {largest_label}. Write one class name per line."
            )

    def index_shard(self, shard: ShardTar) -> tuple[list[IndexRow], str | None]:
        """Read the headers of a shard's members, and return the shard's index.

        Returns:
            A tuple of one row per image and a SHA-256. A shard in S3 is read completely to compute the
            SHA-256. For a local shard, the SHA-256 is None.

        Raises:
            ValueError: If a sample has no image, several images or no class. The message contains the
                sample's key.
        """
        hash_name = "sha256" if self.store else None
        with open_stream(shard.url, hash_name, self.store, headers_only=True) as stream:
            index_rows = list(_index_rows(stream.archive))
            sha256 = stream.digest() if self.store else None
        if not index_rows:
            raise ValueError(
                f"{shard.url} contains no sample with an image ({' '.join(IMAGE_FIELDS)}) and a class"
            )
        return index_rows, sha256


def find_patterns(base: str) -> dict[str, str]:
    """Return a pattern that matches each split's shards in a folder or prefix, such as `BASE/*train*.tar`.

    The result omits a split without shards. The folder or bucket is listed for each tried pattern.
    """
    escaped_base = glob.escape(base.rstrip("/"))
    store = bucket_client(base)
    pattern_by_split = {}
    for split in SPLITS:
        keywords = KEYWORDS_BY_SPLIT[split]
        patterns = [
            f"{escaped_base}/*{keyword}*{ending}" for keyword in keywords for ending in (".tar", "/*.tar")
        ]
        matching_patterns = (pattern for pattern in patterns if match_pattern(pattern, store))
        if pattern := next(matching_patterns, None):
            pattern_by_split[split] = pattern
    return pattern_by_split


def match_pattern(pattern: str, store: ObjectStore | None) -> list[str]:
    """Return the paths or URLs that match a shell pattern, sorted.

    A pattern without wildcards is returned as an absolute path or as a URL, even if no such file exists.

    Args:
        pattern: Path or s3:// URL with wildcards.
        store: Client of the URL's bucket, or None for a path.
    """
    if store is None:
        pattern = os.path.abspath(os.path.expanduser(pattern))
        return sorted(glob.glob(pattern)) if WILDCARD_PATTERN.search(pattern) else [pattern]
    if not WILDCARD_PATTERN.search(pattern):
        return [pattern]
    store_prefix = f"{store.url}/"
    key_prefix = WILDCARD_PATTERN.split(pattern.removeprefix(store_prefix))[0]
    object_urls = [store_prefix + object_key for object_key in store.list(key_prefix)]
    # Wildcards match neither a slash nor a leading dot, as on a disk.
    separators = re.findall("/[.]?", pattern)
    return [url for url in fnmatch.filter(object_urls, pattern) if re.findall("/[.]?", url) == separators]


def find_shards(pattern: str, store: ObjectStore | None) -> list[ShardTar]:
    """Return the shards that match a shell or brace pattern, in order, with their sizes and versions.

    Args:
        pattern: Path or s3:// URL with wildcards or braces.
        store: Client of the URL's bucket, or None for a path.

    Raises:
        ValueError: If no shard matches, or if a shard that the pattern names is missing.
    """

    def inspect_shard(path_or_url: str) -> ShardTar:
        with open_stream(path_or_url, store=store) as stream:
            return ShardTar(path_or_url, stream.size, stream.version)

    patterns = _expand_braces(pattern)
    shard_locations = [location for expanded in patterns for location in match_pattern(expanded, store)]
    if not shard_locations:
        raise ValueError(
            f"{pattern} matches no shards. Pass paths or s3:// URLs with *, ? or braces, for example"
            " 'FOLDER/train-{0000..1023}.tar'."
        )
    with ThreadPoolExecutor(READER_THREADS) as thread_pool:  # because S3 needs one request per object
        unique_locations = dict.fromkeys(shard_locations)  # expanded patterns may match the same shard
        return list(thread_pool.map(inspect_shard, unique_locations))


def _expand_braces(pattern: str) -> list[str]:
    """Expand the number ranges in braces. For example, `{8..9}-{0..1}` expands to four patterns."""
    if (braces := BRACES_PATTERN.search(pattern)) is None:
        return [pattern]
    first_number, last_number = braces.groups()
    shard_numbers = range(int(first_number), int(last_number) + 1)
    padded_numbers = [str(shard_number).zfill(len(first_number)) for shard_number in shard_numbers]
    patterns = [pattern.replace(braces[0], padded_number, 1) for padded_number in padded_numbers]
    return [expanded for shorter_pattern in patterns for expanded in _expand_braces(shorter_pattern)]


def _index_rows(archive: ArchiveMember) -> Iterator[IndexRow]:
    """Yield an index row for each sample with an image, without reading the images.

    Raises:
        ValueError: If a sample contains several images, an empty image or no class, or a class but no image.
    """
    for sample_key, sample_members in itertools.groupby(archive_members(archive), _sample_key):
        images, class_fields = [], {}
        sample_name = f"{archive.display_name}: {sample_key}"  # for messages
        for member in sample_members:
            field_name = member.name[len(sample_key) + 1 :].lower()
            if field_name in IMAGE_FIELDS:
                if not member.size:
                    raise ValueError(f"{sample_name} contains an empty image. Remove the sample.")
                images.append(member)
            elif field_name in CLASS_FIELDS:
                if member.size > MAX_FIELD_BYTES:
                    field_problem = f"has {member.size:,} bytes, which is too large for a class"
                    raise ValueError(f"{sample_name}.{field_name} {field_problem}")
                class_fields[field_name] = member.read()
        if len(images) > 1 or (class_fields and not images):
            raise ValueError(
                f"{sample_name} contains {len(images)} images ({' '.join(IMAGE_FIELDS)}) instead of one"
            )
        if images:
            (image,) = images
            yield IndexRow(image.offset, image.size, _sample_label(class_fields, sample_name), image.name)


def _sample_key(member: ArchiveMember) -> str:
    """Return the member's path up to the first dot in the file name, which all fields of a sample share."""
    folder, slash, file_name = member.name.rpartition("/")
    stem, _, _ = file_name.partition(".")
    return f"{folder}{slash}{stem}"


def _sample_label(class_fields: dict[str, bytes], sample_name: str) -> int:
    """Return a sample's label, which is a string of digits or a JSON integer.

    Args:
        class_fields: Content of the sample's .cls and .json members by field name. .cls takes precedence.
        sample_name: The sample's name in messages.

    Raises:
        ValueError: If there is no label, or if the label is not a number below CLASS_LIMIT.
    """
    label: object = None
    if "cls" in class_fields:
        label = class_fields["cls"].decode(errors="replace").strip()
    elif "json" in class_fields:
        metadata = parse_json(class_fields["json"], f"{sample_name}.json")
        label = next((metadata[json_key] for json_key in JSON_CLASS_KEYS if json_key in metadata), None)
    if label is None:
        json_keys = " or ".join(JSON_CLASS_KEYS)
        remedy = f"Add digits in a .cls file, or a number as {json_keys} in a .json file."
        raise ValueError(f"{sample_name} contains no class. {remedy}")
    label_digits = "" if isinstance(label, bool) else str(label)  # True is an int in Python, but not a label
    is_number = label_digits.isascii() and label_digits.isdigit() and len(label_digits) <= MAX_CLASS_DIGITS
    if not (is_number and int(label_digits) < CLASS_LIMIT):
        expected_text = f"a number from 0 to {CLASS_LIMIT:,}"
        raise ValueError(f"the class of {sample_name} is {ascii(label)[:80]} instead of {expected_text}")
    return int(label_digits)
