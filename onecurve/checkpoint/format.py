"""The checkpoint format: atomic writes, verification, and the same files from every strategy.

    checkpoints/index.json                   {"latest": "step_00000390", "best": "step_00000260"}
    checkpoints/step_00000390/
        model.safetensors                    fp32, the model's own parameter names; BatchNorm's statistics
        optimizer.safetensors                `<parameter>/exp_avg`, ...
        ema.safetensors                      if the recipe has averaged weights
        state.json                           step, best evaluation, state of the log
        manifest.json                        last: size and SHA-256 of each file, recipe, classes, writer

No file holds code. Data order and random numbers are functions of seed, epoch and step, and not stored.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from onecurve.checkpoint.snapshot import DTYPE_NAMES, DTYPES, Snapshot, Specs, write_chunks
from onecurve.system.files import (
    check_regular,
    discard,
    fits,
    parse_json,
    sha256_of,
    sync,
    unfetched,
    write_json,
)
from onecurve.system.output import log
from onecurve.system.paths import shortest
from onecurve.system.threads import Heartbeat

FORMAT_VERSION = 1  # docs/checkpoints.md: when it rises, and which versions are read
MODEL_FILE, OPTIMIZER_FILE, EMA_FILE = "model.safetensors", "optimizer.safetensors", "ema.safetensors"
STATE_FILE, MANIFEST_FILE, INDEX_FILE = "state.json", "manifest.json", "index.json"
JSON_LIMIT_BYTES = 16 * 2**20  # limit of a manifest; 22,000 class names take 1.2 MB


class OptimizerScalars(TypedDict):
    """The optimizer's part of state.json."""

    scalars: dict[str, dict[str, Any]]  # parameter -> name -> value
    groups: list[dict[str, Any]]  # values that the optimizer changed in its parameter groups


class DamagedCheckpoint(ValueError):
    """Raised when a checkpoint does not verify."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that verified."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        return self.manifest["step"]


def can_store(value: Any) -> bool:
    """True for a value that a safetensors file or state.json can hold."""
    if isinstance(value, Tensor):
        return value.dtype in DTYPE_NAMES
    return value is None or type(value) in (bool, int, float, str)


def encode_value(value: Any) -> Any:
    """Makes a scalar or a small tensor fit for JSON."""
    if not isinstance(value, Tensor):
        return value
    return {"dtype": DTYPE_NAMES[value.dtype], "value": value.tolist()}


def decode_value(value: Any) -> Any:
    """Reverses encode(); tensors are on the CPU. ValueError for anything that encode() does not make."""
    if not isinstance(value, dict):
        return value
    try:
        return torch.tensor(value["value"], dtype=DTYPES[value["dtype"]])
    except (KeyError, TypeError, RuntimeError):
        raise ValueError(f"{value} in state.json is not a tensor") from None


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's name: 390 for step_00000390; None for any other name."""
    found = re.fullmatch(r"step_([0-9]{8}|[1-9][0-9]{8,17})", name)
    return int(found[1]) if found else None


def steps_in(parent: Path) -> list[int]:
    """The steps of a run's checkpoints, newest first, damaged ones included."""
    if not parent.is_dir():
        return []
    steps = (step_of(path.name) for path in parent.iterdir())
    return sorted((step for step in steps if step is not None), reverse=True)


# --- Writing


def commit(
    parent: Path, step: int, snapshots: dict[str, Snapshot], state: dict[str, Any], about: dict[str, Any]
) -> Path:
    """Writes parent/step_N atomically and syncs it. about: further keys of the manifest.

    OSError if that fails; earlier checkpoints stay.
    """
    folder = parent / step_name(step)
    temporary = parent / f".{folder.name}.tmp"
    discard(temporary)
    try:
        temporary.mkdir(parents=True)
        files = {name: snapshot.write(temporary / name) for name, snapshot in snapshots.items()}
        files[STATE_FILE] = write_chunks(temporary / STATE_FILE, [json.dumps(state, indent=1).encode()])
        manifest = {"format_version": FORMAT_VERSION, "step": step, "files": files, **about}
        manifest["digest"] = _digest(manifest)
        write_chunks(temporary / MANIFEST_FILE, [json.dumps(manifest, indent=1).encode()])
        sync(temporary)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(parent)
    return folder


def write_step_index(parent: Path, latest: int, best: int | None) -> None:
    """Writes index.json, for people, `--weights` and validate.py. Resuming does not read it."""
    names = {"latest": step_name(latest)} | ({"best": step_name(best)} if best is not None else {})
    write_json(parent / INDEX_FILE, names)


def parse_step_index(content: bytes, where: Path | str) -> dict[str, int]:
    """The steps that index.json names: {"latest": 390, "best": 260}. ValueError for other content."""
    try:
        steps = {label: step_of(name) for label, name in parse_json(content, where).items()}
        return {label: step for label, step in steps.items() if step is not None}
    except (ValueError, TypeError):
        raise ValueError(f"{where} is not an index of checkpoints") from None


def best_in(parent: Path) -> Path | None:
    """The folder of the best checkpoint, which index.json names; None where it is not there."""
    index = parent / INDEX_FILE
    best = parse_step_index(index.read_bytes(), shortest(index)).get("best") if index.is_file() else None
    folder = None if best is None else parent / step_name(best)
    return folder if folder and folder.is_dir() else None


def to_keep(steps: Iterable[int], best: int | None, every: int | None) -> set[int]:
    """The steps to keep: the last two, the best, and the multiples of --keep_every."""
    steps = sorted(steps)
    return {s for s in steps if s in steps[-2:] or s == best or (every and s % every == 0)}


def remove(folder: Path) -> None:
    """Removes a checkpoint. An interrupted removal leaves no folder that looks complete.

    Of a symbolic link only the link is removed: somebody has moved the checkpoint to its target.
    """
    if folder.is_symlink():
        log.info(f"{folder} is a link to {folder.readlink()}: the link is removed, not what it leads to")
        folder.unlink()
        return
    doomed = folder.with_name(f".{folder.name}.old")
    discard(doomed)
    folder.rename(doomed)
    discard(doomed)


def remove_temporary(parent: Path) -> None:
    """Removes leftovers of interrupted writes and removals. Only the run's owner may call it."""
    for path in parent.glob(".step_*"):
        with contextlib.suppress(OSError):
            discard(path)


# --- Verifying and choosing


def verify(folder: Path, heartbeat: Heartbeat = lambda: None) -> Checkpoint:
    """Checks the manifest, and size and SHA-256 of every file. Damaged names the file and the fault."""
    try:
        with open(_own(folder / MANIFEST_FILE), "rb") as file:
            manifest = check_manifest(file.read(JSON_LIMIT_BYTES), folder)
        for name, expected in manifest["files"].items():
            path = _own(folder / name)
            if path.stat().st_size != expected["size"]:
                raise DamagedCheckpoint(
                    f"{path} has {path.stat().st_size:,} bytes instead of {expected['size']:,}"
                )
            if sha256_of(path, heartbeat) != expected["sha256"]:
                raise DamagedCheckpoint(f"{path} has changed since it was written (SHA-256)")
    except OSError as error:  # a disk error or a permission: the file may be intact
        raise ValueError(f"{error.filename} can't be read: {error.strerror}") from None
    return Checkpoint(folder, manifest)


def _own(path: Path) -> Path:
    """The path of a regular file. Damaged for anything else: a link, or a pipe that would never be read."""
    if path.is_symlink() or not path.is_file():
        raise DamagedCheckpoint(f"{path} is {'no regular file' if os.path.lexists(path) else 'missing'}")
    return path


class FileEntry(TypedDict):
    size: int  # bytes
    sha256: str


class CheckpointManifest(TypedDict):
    digest: str
    format_version: Any
    step: int
    files: dict[str, FileEntry]


def check_manifest(content: bytes, folder: Path | str) -> dict[str, Any]:
    """Parses and checks a checkpoint's manifest, without reading its other files. Damaged if wrong."""
    where = f"{folder}/{MANIFEST_FILE}"
    try:
        manifest = parse_json(content, where)
    except ValueError:
        manifest = {}
    if not fits(manifest, CheckpointManifest) or any(file["size"] < 0 for file in manifest["files"].values()):
        raise DamagedCheckpoint(f"{where} is not a manifest")
    if manifest.pop("digest") != _digest(manifest):
        raise DamagedCheckpoint(f"{where} has changed since it was written")
    version, names = manifest["format_version"], manifest["files"].keys()
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise ValueError(
            f"{where} has format version {version}, and this code reads 1 to {FORMAT_VERSION}: update it"
        )
    needed = {MODEL_FILE, OPTIMIZER_FILE, STATE_FILE}
    if not needed <= names <= needed | {EMA_FILE}:
        raise DamagedCheckpoint(
            f"{where} names other files than those of a checkpoint: {', '.join(sorted(names))}"
        )
    if step_of(Path(folder).name) != manifest["step"]:
        raise DamagedCheckpoint(f"{where} belongs to step {manifest['step']}")
    return manifest


def newest(parent: Path, heartbeat: Heartbeat = lambda: None, ours: bool = True) -> Checkpoint | None:
    """The newest checkpoint that verifies; None where there are no checkpoints.

    Damaged ones are printed and, if the folder is `ours`, renamed to damaged_*. ValueError when there are
    checkpoints and none verifies.
    """
    steps, damaged = steps_in(parent), []
    for step in steps:
        folder = parent / step_name(step)
        try:
            found = verify(folder, heartbeat)
        except DamagedCheckpoint as error:
            damaged.append(folder)
            log.info(f"checkpoint of step {step:,} is damaged: {error}")
            continue
        for bad in damaged if ours else ():
            discard(bad.with_name(f"damaged_{bad.name}"))
            bad.rename(bad.with_name(f"damaged_{bad.name}"))
        return found
    if damaged:
        raise ValueError(
            f"none of the {len(damaged)} checkpoints in {parent} verifies: put back an intact copy, or give"
            " another --output_dir to start afresh"
        )
    return None


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


# --- Reading


class TensorFile:
    """Reads a verified safetensors file, one tensor at a time. ValueError for another file."""

    def __init__(self, path: Path):
        from safetensors import SafetensorError, safe_open

        self.path = path
        try:
            check_regular(path)
            self.file = safe_open(path, "pt")
        except (OSError, SafetensorError) as error:
            reason = unfetched(path) or error
            raise ValueError(f"{path} is not a safetensors file: {reason}") from None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(self.file.get_slice(name).get_shape()) for name in self.file.keys()}  # noqa: SIM118

    def specs(self) -> Specs:
        """Type and shape of each tensor. ValueError for a type that no run writes."""
        kinds = {name: self.file.get_slice(name).get_dtype() for name in self.file.keys()}  # noqa: SIM118
        if unknown := [name for name, kind in kinds.items() if kind not in DTYPES]:
            raise ValueError(f"{self.path}: {unknown[0]} has the unknown type {kinds[unknown[0]]}")
        return {name: (DTYPES[kinds[name]], shape) for name, shape in self.shapes().items()}

    def expect(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raises ValueError unless the file has exactly these names and shapes."""
        own = self.shapes()
        wrong = [name for name in shapes if name in own and own[name] != shapes[name]]
        wrong += sorted(own.keys() ^ shapes.keys())
        if wrong:
            theirs, ours = (list(d[wrong[0]]) if wrong[0] in d else "nothing" for d in (own, shapes))
            raise ValueError(
                f"{self.path} belongs to another model: {len(wrong)} tensors differ, the first is {wrong[0]}"
                f" ({theirs} in the file, {ours} in the model): give that model's flags"
            )

    def tensor(self, name: str) -> Tensor:
        return self.file.get_tensor(name)
