"""Files that are written whole or not at all, and read whatever is in them."""

import errno
import json
import os
import resource
import shutil
from pathlib import Path
from typing import Any


def sync(path: Path) -> None:
    """Waits until the file, or the folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard(path: Path) -> None:
    """Removes a folder with all that is in it, a file, or a link and not what it leads to; or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def free_space(folder: Path) -> str:
    """How much of the folder's disk is free, as `12 MiB are free`."""
    return f"{shutil.disk_usage(folder).free / 2**20:,.0f} MiB are free"


def not_written(what: str, folder: Path, error: OSError) -> ValueError:
    """What is said where a run can't write: what, where, why, and what to do."""
    advice = "Make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Mend that"
    return ValueError(
        f"{what} can't be written to {folder}: {error.strerror or error} ({free_space(folder)})."
        f" {advice}: the same command continues with the newest checkpoint"
    )


def allow_open_files(count: int) -> int:
    """Raises this process's limit to so many, as far as it may. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        soft = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return count if soft == resource.RLIM_INFINITY else soft


def size_limit() -> str:
    """A hint for errors in writing, where `ulimit -f` bounds each file. Else empty."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return "" if limit == resource.RLIM_INFINITY else f" (a file may have {limit:,} bytes here: ulimit -f)"


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replaces the file, and waits until it is on the disk; when that fails the old one stays."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. OSError when it can't be read, ValueError when it holds none."""
    return parse_json(path.read_bytes(), path)


def parse_json(content: bytes | str, where: object) -> dict[str, Any]:
    """The JSON object in `content`. ValueError that names `where`, and shows nothing of the content, for
    anything else: other text, another encoding, what is nested too deep, numbers of thousands of digits."""
    try:
        found = json.loads(content)
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


def read_accelerate_config(file: Path) -> dict[str, Any]:
    """One of accelerate_configs/. ValueError when it can't be read."""
    import yaml

    try:
        content = yaml.safe_load(file.read_text())
        if not isinstance(content, dict):
            raise ValueError("expected `key: value` lines")
        return content
    except RecursionError:
        raise ValueError(f"--config_file {file}: it is nested too deep") from None
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise ValueError(f"--config_file {file}: {getattr(error, 'strerror', None) or error}") from None


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; a line that was cut by a kill or a full disk is left out."""
    lines = []
    for text in file.read_text(errors="replace").splitlines() if file.exists() else []:
        try:
            lines.append(parse_json(text, file))
        except ValueError:
            continue
    return lines
