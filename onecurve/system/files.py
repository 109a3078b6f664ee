"""Atomic writes, locks, and reading and checking of JSON that may be malformed."""

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

P = ParamSpec("P")
R = TypeVar("R")

READ_BYTES = 16 * 2**20
# Errors of a network mount that a later read may not meet, and how often and when it is tried, as in S3
TRANSIENT = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EAGAIN)
ATTEMPTS = 4
BACKOFF_S = 0.4  # before the second attempt, more before later ones
# A type, list[Kind], tuple[Kind, ...], dict[str, Kind], a TypedDict, a dataclass, or a union of them.
# float: any finite number. [Kind]: a list.
# {key: Kind, "*": Kind of all other keys}: an object whose values may also be null.
Kind = Any


def sync(path: Path) -> None:
    """Waits until a file, or a folder's list of names, is on the disk (fsync).

    Old CIFS, vboxsf and some of FUSE can't do it for a folder, which is said once.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
        _say_unsynced(str(error.strerror))
    finally:
        os.close(descriptor)


@functools.cache
def _say_unsynced(reason: str) -> None:
    log.warning(
        f"warning: this file system can't sync a folder ({reason}): a crash of this host may lose the newest"
        " files"
    )


def retried(read: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that reads files, so that it is called again after TRANSIENT errors."""

    @functools.wraps(read)
    def attempts(*args: P.args, **options: P.kwargs) -> R:
        for attempt in range(1, ATTEMPTS):
            try:
                return read(*args, **options)
            except OSError as error:
                if error.errno not in TRANSIENT:
                    raise
                note_retry(f"{error.filename or 'a file of the data'}: {error.strerror}")
                time.sleep(BACKOFF_S * attempt)
        return read(*args, **options)

    return attempts


_first_retry: list[str] = []  # at most one message


def note_retry(reason: str) -> None:
    """Print a warning after this process's first retry. The trainer prints that of its workers."""
    if not _first_retry:
        _first_retry.append(reason)
        if multiprocessing.parent_process() is None:
            text = f"warning: {printable(reason)}. The read is tried again; further retries are not reported"
            log.warning(text)


def first_retry() -> str:
    """Return why this process's first retried read failed; empty if none was retried."""
    return "".join(_first_retry)


@retried
def sha256_of(path: Path, heartbeat: Callable[[], None] = lambda: None) -> str:
    """The SHA-256 of a file, as hex. Calls heartbeat() after each READ_BYTES."""
    digest = hashlib.sha256()
    check_regular(path)
    with open(path, "rb") as file:
        while chunk := file.read(READ_BYTES):
            digest.update(chunk)
            heartbeat()
    return digest.hexdigest()


def unfetched(content: Path | bytes) -> str:
    """Why a file, or its content, is not itself: a pointer of Git LFS is in its place. Else empty."""
    if isinstance(content, Path):
        if not content.is_file():
            return ""
        with open(content, "rb") as file:
            content = file.read(64)
    is_pointer = content.startswith(b"version https://git-lfs.github.com/")
    return "it is a pointer of Git LFS: run git lfs pull in its repository" if is_pointer else ""


def check_regular(path: Path) -> None:
    """OSError unless the path leads to a regular file: whoever opens a pipe may wait forever."""
    if not path.is_file():
        path.stat()  # FileNotFoundError for one that is missing
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


def read_regular(path: Path) -> bytes:
    check_regular(path)
    return path.read_bytes()


def refuse_link(folder: Path) -> None:
    """ValueError for a link in a run's folder, which may be a stranger's: it could lead to any folder."""
    if folder.is_symlink():
        where = printable(str(folder.readlink()))
        raise ValueError(
            f"{folder} is a link to {where}, and nothing is written there: put a folder in its place"
        )


def open_to_append(path: Path) -> BinaryIO:
    """Opens a run's file, or makes it. OSError where it is a link or no regular file."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "a+b")


def discard(path: Path) -> None:
    """Removes a folder with its content, a file, or a link but not its target. Absent paths are fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Takes a file's lock (flock) without waiting. False when another process holds it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def free_space(folder: Path, error: OSError) -> str:
    """Return the free space of the folder's disk, as `12 MiB are free`. A quota has nothing to do with it."""
    if error.errno == errno.EDQUOT:
        return "the quota of this user, group or project, whatever is free on the disk"
    return f"{shutil.disk_usage(folder).free / 2**20:,.0f} MiB are free"


def not_written(what: str, folder: Path, error: OSError) -> ValueError:
    """The error for a failed write: what, where, why, and what to do."""
    advice = "Make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Mend that"
    return ValueError(
        f"{what} can't be written to {folder}: {error.strerror or error} ({free_space(folder, error)})."
        f" {advice}: the same command continues with the newest checkpoint"
    )


@contextlib.contextmanager
def writing(what: str, folder: Path) -> Iterator[None]:
    """Turns an OSError into a ValueError that says what to do."""
    try:
        yield
    except OSError as error:
        raise not_written(what, folder, error) from error


def allow_open_files(count: int) -> int:
    """Raises this process's limit of open files to `count`, or to the hard limit. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        soft = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return count if soft == resource.RLIM_INFINITY else soft


def size_limit() -> str:
    """A hint for write errors under a file size limit (`ulimit -f`); empty without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return "" if limit == resource.RLIM_INFINITY else f" (a file may have {limit:,} bytes here: ulimit -f)"


def own_files(folder: Path, pattern: str) -> list[Path]:
    """The regular files below the folder that match, in order: no pipes, and nothing that a link leads to."""
    return [file for file in sorted(folder.glob(pattern)) if _is_own(file, folder)]


def read_own(folder: Path, name: str, most_bytes: int) -> bytes:
    """The content of a file of own_files(). OSError for any other file, and for a larger one."""
    file = folder / name
    if not _is_own(file, folder):
        file.lstat()  # FileNotFoundError for one that is missing
        raise OSError(errno.EINVAL, "it is no regular file of this folder")
    if file.stat().st_size > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes")
    return file.read_bytes()


def _is_own(file: Path, folder: Path) -> bool:
    return file.is_file() and file.resolve() == folder.resolve() / file.relative_to(folder)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_csv(path: Path, rows: Iterable[Iterable[object]]) -> None:
    """Writes a table. Spreadsheets compute no cell of it (OWASP, CSV Injection)."""
    table = io.StringIO()
    for cells in (map(printable, row) for row in rows):
        shown = [f"'{cell}" if cell.startswith(("=", "+", "-", "@")) else cell for cell in cells]
        csv.writer(table, lineterminator="\n").writerow(shown)
    write_text(path, table.getvalue())


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replaces the file atomically and waits until it is on the disk. On an error the old file stays."""
    temporary = path.with_name(f".{path.name}.tmp")
    discard(temporary)  # left by a kill, or a stranger's link
    try:
        with open(temporary, "xb") as file:  # follows no link
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. OSError if it can't be read, ValueError if it contains no object."""
    return parse_json(read_regular(path), path)


def parse_json(content: bytes | str, where: object, pairs_hook: Any = None) -> dict[str, Any]:
    """The JSON object in `content`.

    ValueError for anything else: other text, another encoding, too deep nesting, numbers with thousands of
    digits. The error names `where` and quotes nothing from the content. pairs_hook: as json.loads has it.
    """
    try:
        found = json.loads(content, object_pairs_hook=pairs_hook)
    except RecursionError:
        raise ValueError(f"{where} can't be read: its JSON is nested too deep") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}, line {error.lineno}, is no JSON: {error.msg}") from None
    except ValueError as error:
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else error
        raise ValueError(f"{where} can't be read as JSON: {reason}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{where} holds no JSON object")
    return found


@functools.cache
def _strict_loader() -> type:
    """Return YAML's safe loader without what surprises: aliases, repeated keys, numbers in base 8 or 60.

    A few aliases of aliases are gigabytes once they are expanded.
    """
    import yaml

    class StrictLoader(yaml.SafeLoader):
        def compose_node(self, parent, index):
            if self.check_event(yaml.AliasEvent):
                mark = self.peek_event().start_mark
                raise yaml.composer.ComposerError(None, None, "aliases (*name) are not accepted", mark)
            return super().compose_node(parent, index)

        def construct_mapping(self, node, deep=False):
            keys = set()
            for key, _ in node.value:
                if key.value in keys:
                    problem = f"the key {shortened(str(key.value))} occurs twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                keys.add(key.value)
            return super().construct_mapping(node, deep)

        def construct_number(self, node):
            is_integer = node.tag.endswith("int")
            value = self.construct_yaml_int(node) if is_integer else self.construct_yaml_float(node)
            if ":" in node.value or (is_integer and re.fullmatch("[+-]?0[0-9_]+", node.value)):
                problem = f"YAML reads {node.value} as {value}. Write that number, or quote the text"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
            return value

    for kind in ("int", "float"):
        StrictLoader.add_constructor(f"tag:yaml.org,2002:{kind}", StrictLoader.construct_number)
    return StrictLoader


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs, for json.loads. ValueError where a key occurs twice."""
    if repeated := [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]:
        raise ValueError(f"the key {shortened(repeated[0])} occurs twice")
    return dict(pairs)


def read_yaml(flag: str, file: Path) -> dict[str, Any]:
    """The keys and values of a YAML file. ValueError names the flag, the file, and the line where it can."""
    import yaml

    where = f"{flag} {file}"
    try:
        content = yaml.load(file.read_text(), _strict_loader())
    except RecursionError:
        raise ValueError(f"{where}: it is nested too deep") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{where}{line}: {getattr(error, 'problem', None) or error}") from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a date that does not exist
        raise ValueError(f"{where}: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{where}: expected `key: value` lines")
    return content


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; [] without the file."""
    return list(json_lines(file)) if file.exists() else []


def json_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSON-lines file, without lines truncated by a kill or a full disk."""
    check_regular(file)
    with open(file, errors="replace") as texts:
        for text in texts:
            with contextlib.suppress(ValueError):
                yield parse_json(text, file)


def typed_values(content: dict[str, Any], kinds: dict[str, Kind]) -> tuple[dict[str, Any], list[str]]:
    """The values with the expected type, and the names of those with another type.

    Unknown keys and nulls are in neither.
    """
    kept, wrong = {}, []
    for key, value in content.items():
        kind = kinds.get(key, kinds.get("*"))
        if kind is None or value is None:
            continue
        if fits(value, kind):
            kept[key] = value
        else:
            wrong.append(key)
    return kept, wrong


def fits(value: Any, kind: Kind) -> bool:
    """True if the value, read from JSON, is of that kind."""
    if kind is Any:
        return True
    if isinstance(kind, types.UnionType):
        return any(fits(value, member) for member in typing.get_args(kind))
    if isinstance(kind, dict):
        return isinstance(value, dict) and not typed_values(value, kind)[1]
    if typing.is_typeddict(kind) or dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return isinstance(value, dict) and all(key in value and fits(value[key], hints[key]) for key in hints)
    if isinstance(kind, list) or typing.get_origin(kind) in (list, tuple):
        item_kind = kind[0] if isinstance(kind, list) else typing.get_args(kind)[0]
        return isinstance(value, list) and all(fits(item, item_kind) for item in value)
    if typing.get_origin(kind) is dict:
        return isinstance(value, dict) and all(fits(v, typing.get_args(kind)[1]) for v in value.values())
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    if kind in (int, float):
        return isinstance(value, int if kind is int else int | float) and -(2**63) < value < 2**63
    return isinstance(value, kind)
