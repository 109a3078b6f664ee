"""Writes files atomically, locks files, and safely reads malformed or malicious JSON and YAML."""

import contextlib
import csv
import dataclasses
import errno
import fcntl
import functools
import hashlib
import io
import json
import multiprocessing
import os
import re
import resource
import shutil
import stat
import time
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, ParamSpec, TypeVar

from onecurve.system.output import log
from onecurve.system.text import printable, shortened

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

READ_BYTES = 16 * 2**20  # number of bytes per read when a file is hashed
# Errors of network file systems
TRANSIENT_ERRORS = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EAGAIN)  # reads are retried after these
MAX_ATTEMPTS = 4  # maximum number of attempts for a read, and for an S3 request
BACKOFF_S = 0.4  # seconds before the second attempt; the wait grows linearly with the number of attempts
# Expected structure of a JSON value: a type, list[Kind], tuple[Kind, ...], dict[str, Kind], a TypedDict, a
# dataclass, or a union. The type float matches every finite number. [Kind] means the same as list[Kind].
# {key: Kind, OTHER_KEYS: Kind of all other keys} describes an object whose values may also be null.
ValueType = Any
OTHER_KEYS = "*"  # key in a description of an object, see ValueType
INT64_LIMIT = 2**63  # numbers with this or a larger absolute value have no valid type
LFS_POINTER_START = b"version https://git-lfs.github.com/"  # first bytes of a Git LFS pointer
FORMULA_STARTS = ("=", "+", "-", "@")  # characters with which a formula in a spreadsheet cell starts


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of file names, is on disk (fsync).

    Log a warning once if the file system can't sync a folder, such as old CIFS, vboxsf and some FUSE file
    systems.
    """
    path_fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(path_fd)
    except OSError as sync_error:
        if sync_error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
        _warn_not_synced(str(sync_error.strerror))
    finally:
        os.close(path_fd)


@functools.cache
def _warn_not_synced(sync_error_text: str) -> None:
    """Log a warning, once for each error text, that a power loss or crash may lose the newest files."""
    log.warning(
        f"warning: this file system can't sync a folder ({sync_error_text})."
        " If this host crashes, the newest files may be lost."
    )


def retried(read: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Decorate a function that reads files, so that a call is retried after TRANSIENT_ERRORS."""

    @functools.wraps(read)
    def read_with_retries(*read_args: Parameters.args, **read_options: Parameters.kwargs) -> Returned:
        for failed_attempts in range(1, MAX_ATTEMPTS):
            try:
                return read(*read_args, **read_options)
            except OSError as read_error:
                if read_error.errno not in TRANSIENT_ERRORS:
                    raise
                note_retry(f"{read_error.filename or 'a data file'}: {read_error.strerror}")
                time.sleep(BACKOFF_S * failed_attempts)
        return read(*read_args, **read_options)  # the caller handles an error of the last attempt

    return read_with_retries


_first_retry: list[str] = []  # empty, or the reason for this process's first retry


def note_retry(reason: str) -> None:
    """Store the reason of the first retry in this process, and log it as a warning.

    A data worker only stores the reason, because the trainer logs the warning for it.
    """
    if not _first_retry:
        _first_retry.append(reason)
        if multiprocessing.parent_process() is None:  # not in a data worker
            log.warning(
                f"warning: {printable(reason)}. Retrying the read. Further retries will not be reported."
            )


def first_retry_error() -> str:
    """Return the error that caused the first retry in this process, or an empty string without retries."""
    return "".join(_first_retry)


@retried
def sha256_of(path: Path, heartbeat: Callable[[], None] = lambda: None) -> str:
    """Return the SHA-256 of a file as hex digits. Call heartbeat() after every READ_BYTES bytes."""
    sha256_digest = hashlib.sha256()
    check_regular(path)
    with open(path, "rb") as hashed_file:
        while file_chunk := hashed_file.read(READ_BYTES):
            sha256_digest.update(file_chunk)
            heartbeat()
    return sha256_digest.hexdigest()


def lfs_pointer_problem(path_or_content: Path | bytes) -> str:
    """Return an error message if a file or its content is a Git LFS pointer, otherwise an empty string."""
    if isinstance(path_or_content, Path):
        if not path_or_content.is_file():
            return ""  # a missing file or a folder
        with open(path_or_content, "rb") as possible_pointer:
            content_start = possible_pointer.read(len(LFS_POINTER_START))
    else:
        content_start = path_or_content
    if not content_start.startswith(LFS_POINTER_START):
        return ""  # not a pointer
    return "the file is a Git LFS pointer. Run `git lfs pull` in the file's repository"


def check_regular(path: Path) -> None:
    """Raise OSError if the path is not a regular file. For example, opening a pipe may block forever."""
    if not path.is_file():
        path.stat()  # raises FileNotFoundError if the file is missing
        raise OSError(errno.EINVAL, "the path is not a regular file", str(path))


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file. Raise OSError for a folder, a pipe or a missing file."""
    check_regular(path)
    return path.read_bytes()


def refuse_link(folder: Path) -> None:
    """Raise ValueError if a subfolder of a run folder is a symbolic link.

    A run folder that another person created may contain links to arbitrary folders.
    """
    if folder.is_symlink():
        link_target = printable(str(folder.readlink()))
        raise ValueError(
            f"{folder} is a symbolic link to {link_target}. Files are never written through symbolic links."
            " Replace the link with a folder."
        )


def open_to_append(path: Path) -> BinaryIO:
    """Open a file in a run folder for appending and reading, and create it if it is missing.

    Raises:
        OSError: If the path is a symbolic link or not a regular file.
    """
    # O_NOFOLLOW rejects links. With O_NONBLOCK, opening a pipe does not wait for another process.
    open_flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    file_fd = os.open(path, open_flags, 0o666)
    if not stat.S_ISREG(os.fstat(file_fd).st_mode):
        os.close(file_fd)
        raise OSError(errno.EINVAL, "the path is not a regular file", str(path))
    return os.fdopen(file_fd, "a+b")


def discard(path: Path) -> None:
    """Remove a file, a folder and its content, or a link but not its target. Ignore missing paths."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def try_lock(file_fd: int, lock_mode: int = fcntl.LOCK_EX) -> bool:
    """Lock a file with flock. Return False immediately if another process holds the lock.

    `lock_mode` is fcntl.LOCK_EX for an exclusive or fcntl.LOCK_SH for a shared lock.
    """
    try:
        fcntl.flock(file_fd, lock_mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False  # another process holds the lock
    return True


def describe_free_space(folder: Path, error: OSError) -> str:
    """Describe the free space on a folder's disk, such as `12 MiB are free`, or an exhausted quota."""
    if error.errno == errno.EDQUOT:
        return "the user, group or project quota is exhausted, even if the disk has free space"
    try:
        free_mib = shutil.disk_usage(folder).free / 2**20
        return f"{free_mib:,.0f} MiB are free"
    except OSError:  # The folder may be on a disk that no longer responds
        return "the free space is unknown"


def write_error(subject: str, folder: Path, error: OSError) -> ValueError:
    """Return an error that explains why `subject` could not be written, and states the remedy."""
    is_disk_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "Make room" if is_disk_full else "Correct the problem"
    free_space = describe_free_space(folder, error)
    return ValueError(
        f"{subject} can't be written to {folder}: {error.strerror or error} ({free_space})."
        f" {remedy}, then run the same command again to continue from the newest checkpoint"
    )


@contextlib.contextmanager
def explaining_write_errors(subject: str, folder: Path) -> Iterator[None]:
    """Convert an OSError in the context to the ValueError of write_error()."""
    try:
        yield
    except OSError as error:
        raise write_error(subject, folder, error) from error


def allow_open_files(file_count: int) -> int:
    """Raise this process's limit on open files to `file_count`, or at most to the hard limit.

    Return the limit.
    """
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit != resource.RLIM_INFINITY and soft_limit < file_count:
        soft_limit = file_count if hard_limit == resource.RLIM_INFINITY else min(file_count, hard_limit)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit, hard_limit))
    return file_count if soft_limit == resource.RLIM_INFINITY else soft_limit


def ulimit_hint() -> str:
    """Return a hint about the limit on file sizes (`ulimit -f`) for write errors, or an empty string."""
    max_file_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if max_file_bytes == resource.RLIM_INFINITY:
        return ""  # file sizes are unlimited
    return f" (ulimit -f limits file sizes to {max_file_bytes:,} bytes)"


def files_inside(folder: Path, pattern: str) -> list[Path]:
    """Return the sorted regular files in a folder that match a glob pattern.

    Exclude pipes and link targets.
    """
    return [file_path for file_path in sorted(folder.glob(pattern)) if _is_file_inside(file_path, folder)]


def read_file_inside(folder: Path, file_name: str, max_bytes: int) -> bytes:
    """Return the content of a regular file in a folder.

    Raises:
        OSError: If the path is not a regular file in the folder, such as a pipe or a link, or if the file is
            larger than max_bytes bytes.
    """
    file_path = folder / file_name
    if not _is_file_inside(file_path, folder):
        file_path.lstat()  # raises FileNotFoundError if the file is missing
        raise OSError(errno.EINVAL, "the path is not a regular file in this folder")
    if file_path.stat().st_size > max_bytes:
        raise OSError(errno.EFBIG, f"the file is larger than {max_bytes:,} bytes")
    return file_path.read_bytes()


def _is_file_inside(file_path: Path, folder: Path) -> bool:
    """Return True if the path is a regular file in the folder, and not a link to a file elsewhere."""
    return file_path.is_file() and file_path.resolve() == folder.resolve() / file_path.relative_to(folder)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file atomically with a JSON object, and wait until the new file is on disk."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_csv(path: Path, rows: Iterable[Iterable[object]]) -> None:
    """Replace a CSV file atomically.

    An apostrophe precedes each cell that a spreadsheet would evaluate as a formula (OWASP, CSV Injection).
    """
    csv_text = io.StringIO()
    csv_writer = csv.writer(csv_text, lineterminator="\n")
    for csv_row in rows:
        row_cells = map(printable, csv_row)
        csv_writer.writerow([f"'{cell}" if cell.startswith(FORMULA_STARTS) else cell for cell in row_cells])
    write_text(path, csv_text.getvalue())


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically with a UTF-8 text, and wait until the new file is on disk."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file atomically, and wait until the new file is on disk.

    An error leaves the old file unchanged.
    """
    temporary_path = path.with_name(f".{path.name}.tmp")
    discard(temporary_path)  # left behind by a killed process, or a link created by another person
    try:
        with open(temporary_path, "xb") as temporary_file:  # mode x fails if the path is a link
            temporary_file.write(content)
            temporary_file.flush()
            os.fsync(temporary_file.fileno())
        temporary_path.replace(path)
        sync(path.parent)
    except OSError:
        temporary_path.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        OSError: If the file can't be read.
        ValueError: If the file does not contain a JSON object.
    """
    return parse_json(read_regular(path), path)


def parse_json(content: bytes | str, source: object, pairs_hook: Any = None) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        content: JSON text, in UTF-8 if it is bytes.
        source: Name of the source for error messages.
        pairs_hook: Function for json.loads's `object_pairs_hook` argument.

    Raises:
        ValueError: If the content is not a JSON object, is not UTF-8, is nested too deeply, or contains a
            number with thousands of digits. The message contains `source`, but does not quote the content.
    """
    try:
        json_object = json.loads(content, object_pairs_hook=pairs_hook)
    except RecursionError:
        raise ValueError(f"{source} can't be read because the JSON is nested too deeply") from None
    except json.JSONDecodeError as json_error:
        raise ValueError(f"{source}, line {json_error.lineno}, is not valid JSON: {json_error.msg}") from None
    except ValueError as json_error:
        parse_problem = "the text is not UTF-8" if isinstance(json_error, UnicodeDecodeError) else json_error
        raise ValueError(f"{source} can't be read as JSON: {parse_problem}") from None
    if not isinstance(json_object, dict):
        raise ValueError(f"{source} does not contain a JSON object")
    return json_object


@functools.cache
def _strict_loader() -> type:
    """Return a safe YAML loader that rejects aliases, repeated keys, and base-8 and base-60 numbers.

    A few nested aliases can expand to gigabytes. Users do not expect YAML to accept repeated keys, or to
    convert text such as 1:30 to a number.
    """
    import yaml

    class StrictLoader(yaml.SafeLoader):
        def compose_node(self, parent, index):
            if self.check_event(yaml.AliasEvent):
                mark, alias_problem = self.peek_event().start_mark, "YAML aliases (*name) are not supported"
                raise yaml.composer.ComposerError(None, None, alias_problem, mark)
            return super().compose_node(parent, index)

        def construct_mapping(self, node, deep=False):
            seen_keys = set()
            for key_node, _ in node.value:
                if key_node.value in seen_keys:
                    key_problem = f"the key {shortened(str(key_node.value))} appears more than once"
                    raise yaml.constructor.ConstructorError(None, None, key_problem, key_node.start_mark)
                seen_keys.add(key_node.value)
            return super().construct_mapping(node, deep)

        def construct_number(self, node):
            is_integer = node.tag.endswith("int")
            parsed_number = self.construct_yaml_int(node) if is_integer else self.construct_yaml_float(node)
            is_base_8 = is_integer and re.fullmatch("[+-]?0[0-9_]+", node.value)
            is_base_60 = ":" in node.value
            if is_base_8 or is_base_60:
                number_problem = (
                    f"YAML reads {node.value} as the number {parsed_number}."
                    f" Write {parsed_number}, or put quotes around the text"
                )
                raise yaml.constructor.ConstructorError(None, None, number_problem, node.start_mark)
            return parsed_number

    for number_type in ("int", "float"):
        StrictLoader.add_constructor(f"tag:yaml.org,2002:{number_type}", StrictLoader.construct_number)
    return StrictLoader


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Convert the pairs from json.loads to a dict. Raise ValueError if a key appears more than once."""
    key_counts = Counter(json_key for json_key, _ in pairs)
    for json_key, key_count in key_counts.items():
        if key_count > 1:
            raise ValueError(f"the key {shortened(json_key)} appears more than once")
    return dict(pairs)


def read_yaml(flag: str, file: Path) -> dict[str, Any]:
    """Return the content of a YAML file that contains a mapping.

    Raises:
        ValueError: If the file can't be read. The message contains the flag, the file and, if known, the line
            number.
    """
    import yaml

    source_label = f"{flag} {file}"
    try:
        yaml_content = yaml.load(file.read_text(), _strict_loader())
    except RecursionError:
        raise ValueError(f"{source_label} can't be read because the YAML is nested too deeply") from None
    except yaml.YAMLError as error:
        error_position = getattr(error, "problem_mark", None)
        line_text = f", line {error_position.line + 1}" if error_position else ""
        raise ValueError(f"{source_label}{line_text}: {getattr(error, 'problem', None) or error}") from None
    except (OSError, ValueError) as error:  # invalid UTF-8 and nonexistent dates raise ValueError
        raise ValueError(f"{source_label}: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(yaml_content, dict):
        raise ValueError(f"{source_label}: the file must contain `key: value` lines")
    return yaml_content


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the objects in a JSON-lines file, or [] if the file does not exist."""
    return list(json_lines(file)) if file.exists() else []


def json_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects in a JSON-lines file. Skip lines truncated by a kill or a full disk."""
    check_regular(file)
    with open(file, errors="replace") as json_stream:
        for json_line in json_stream:
            with contextlib.suppress(ValueError):
                yield parse_json(json_line, file)


def split_by_type(
    content: dict[str, Any], type_by_key: dict[str, ValueType]
) -> tuple[dict[str, Any], list[str]]:
    """Split a JSON object into the values that match `type_by_key`, and the keys of the values that do not.

    Unknown keys and null values are in neither result.
    """
    matching_values, mistyped_keys = {}, []
    for json_key, json_value in content.items():
        value_type = type_by_key.get(json_key, type_by_key.get(OTHER_KEYS))
        if value_type is None or json_value is None:
            continue  # in neither result
        if has_type(json_value, value_type):
            matching_values[json_key] = json_value
        else:
            mistyped_keys.append(json_key)
    return matching_values, mistyped_keys


def has_type(value: Any, value_type: ValueType) -> bool:
    """Return True if a JSON value has the structure that `value_type` describes."""
    if value_type is Any:
        return True
    if isinstance(value_type, types.UnionType):
        return any(has_type(value, member_type) for member_type in typing.get_args(value_type))
    if isinstance(value_type, dict):
        if not isinstance(value, dict):
            return False
        _, mistyped_keys = split_by_type(value, value_type)
        return not mistyped_keys
    if typing.is_typeddict(value_type) or dataclasses.is_dataclass(value_type):
        type_by_key = typing.get_type_hints(value_type)
        return isinstance(value, dict) and all(
            key in value and has_type(value[key], key_type) for key, key_type in type_by_key.items()
        )
    if isinstance(value_type, list) or typing.get_origin(value_type) in (list, tuple):
        # [Kind], list[Kind] and tuple[Kind, ...] start with the type of all items.
        item_type, *_ = value_type if isinstance(value_type, list) else typing.get_args(value_type)
        return isinstance(value, list) and all(has_type(json_item, item_type) for json_item in value)
    if typing.get_origin(value_type) is dict:
        _, item_type = typing.get_args(value_type)
        return isinstance(value, dict) and all(has_type(json_item, item_type) for json_item in value.values())
    if isinstance(value, bool) or value_type is bool:  # bool is a subclass of int
        return isinstance(value, bool) and value_type is bool
    if value_type in (int, float):
        is_number = isinstance(value, int if value_type is int else int | float)
        return is_number and -INT64_LIMIT < value < INT64_LIMIT
    return isinstance(value, value_type)
