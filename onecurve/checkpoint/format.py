"""Defines, writes and verifies the checkpoint format, which is the same for every strategy.

    checkpoints/index.json                   {"latest": "step_00000390", "best": "step_00000260"}
    checkpoints/step_00000390/
        model.safetensors                    fp32 parameters under the model's names; BatchNorm statistics
        optimizer.safetensors                `<parameter>/exp_avg`, ...
        ema.safetensors                      averaged weights, if the recipe enables them
        state.json                           step, best evaluation, log state
        manifest.json                        size and SHA-256 of each file, recipe, classes, writer

A checkpoint is written atomically, and its manifest is written last. Checkpoint files contain no executable
code. A checkpoint stores neither the data order nor any random generator state, because a run derives both
from the seed, epoch and step.
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
    has_type,
    lfs_pointer_problem,
    parse_json,
    sha256_of,
    sync,
    write_json,
)
from onecurve.system.output import log
from onecurve.system.paths import shortest
from onecurve.system.threads import Heartbeat

FORMAT_VERSION = 1  # docs/checkpoints.md lists the readable versions and the reasons for a new version
MODEL_FILE, OPTIMIZER_FILE, EMA_FILE = "model.safetensors", "optimizer.safetensors", "ema.safetensors"
STATE_FILE, MANIFEST_FILE, INDEX_FILE = "state.json", "manifest.json", "index.json"
JSON_LIMIT_BYTES = 16 * 2**20  # maximum size of a manifest; 22,000 class names occupy 1.2 MB


class OptimizerScalars(TypedDict):
    """Content of the optimizer section in state.json."""

    scalars: dict[str, dict[str, Any]]  # parameter name -> state name -> value
    groups: list[dict[str, Any]]  # each parameter group's settings that the optimizer changed


class DamagedCheckpoint(ValueError):
    """Error raised when a checkpoint fails verification."""


@dataclass(frozen=True)
class Checkpoint:
    """Folder and manifest of a verified checkpoint."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        return self.manifest["step"]


def can_store(value: Any) -> bool:
    """Return True if a checkpoint can store the value in a safetensors file or in state.json."""
    if isinstance(value, Tensor):
        return value.dtype in DTYPE_NAMES
    return value is None or type(value) in (bool, int, float, str)


def encode_value(value: Any) -> Any:
    """Convert a scalar or a small tensor to a JSON value."""
    if not isinstance(value, Tensor):
        return value
    return {"dtype": DTYPE_NAMES[value.dtype], "value": value.tolist()}


def decode_value(encoded: Any) -> Any:
    """Convert the output of encode_value() back to a scalar or a CPU tensor.

    Raises:
        ValueError: If the value is not a valid output of encode_value().
    """
    if not isinstance(encoded, dict):
        return encoded
    try:
        return torch.tensor(encoded["value"], dtype=DTYPES[encoded["dtype"]])
    except (KeyError, TypeError, RuntimeError):
        raise ValueError(f"the entry {encoded} in state.json can't be converted to a tensor") from None


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step number in a checkpoint's name (390 for step_00000390), or None for other names."""
    match = re.fullmatch(r"step_([0-9]{8}|[1-9][0-9]{8,17})", name)
    return int(match[1]) if match else None


def steps_in(folder: Path) -> list[int]:
    """Return the steps of all checkpoints in the folder, including damaged checkpoints, newest first."""
    if not folder.is_dir():
        return []
    steps = (step_of(path.name) for path in folder.iterdir())
    return sorted((step for step in steps if step is not None), reverse=True)


# --- Writing


def commit(
    parent: Path, step: int, snapshots: dict[str, Snapshot], state: dict[str, Any], entries: dict[str, Any]
) -> Path:
    """Atomically write the checkpoint folder parent/step_N and sync the folder to disk.

    Args:
        entries: Additional entries for the manifest.

    Raises:
        OSError: If the write fails. Earlier checkpoints are not affected.
    """
    folder = parent / step_name(step)
    temporary = parent / f".{folder.name}.tmp"
    discard(temporary)
    try:
        temporary.mkdir(parents=True)
        files = {name: snapshot.write(temporary / name) for name, snapshot in snapshots.items()}
        files[STATE_FILE] = write_chunks(temporary / STATE_FILE, [json.dumps(state, indent=1).encode()])
        manifest = {"format_version": FORMAT_VERSION, "step": step, "files": files, **entries}
        manifest["digest"] = _manifest_digest(manifest)
        write_chunks(temporary / MANIFEST_FILE, [json.dumps(manifest, indent=1).encode()])
        sync(temporary)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(parent)
    return folder


def write_step_index(parent: Path, latest: int, best: int | None) -> None:
    """Write index.json for users, `--weights` and validate.py. A resumed run does not read index.json."""
    index = {"latest": step_name(latest)} | ({"best": step_name(best)} if best is not None else {})
    write_json(parent / INDEX_FILE, index)


def parse_step_index(content: bytes, location: Path | str) -> dict[str, int]:
    """Return the checkpoint steps listed in index.json, for example {"latest": 390, "best": 260}.

    Raises:
        ValueError: If the content is not a checkpoint index.
    """
    try:
        steps = {label: step_of(name) for label, name in parse_json(content, location).items()}
        return {label: step for label, step in steps.items() if step is not None}
    except (ValueError, TypeError):
        raise ValueError(f"{location} is not a valid checkpoint index") from None


def best_in(parent: Path) -> Path | None:
    """Return the folder of the best checkpoint in index.json, or None if that folder does not exist."""
    index_file = parent / INDEX_FILE
    if not index_file.is_file():
        return None
    best = parse_step_index(index_file.read_bytes(), shortest(index_file)).get("best")
    if best is None or not (parent / step_name(best)).is_dir():
        return None
    return parent / step_name(best)


def steps_to_keep(steps: Iterable[int], best: int | None, keep_every: int | None) -> set[int]:
    """Return the checkpoint steps to keep: the latest two, the best, and multiples of --keep_every."""
    steps = sorted(steps)
    kept_steps = {*steps[-2:]} | {step for step in steps if step == best}
    if keep_every:
        kept_steps |= {step for step in steps if step % keep_every == 0}
    return kept_steps


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint. An interrupted removal leaves no folder that looks like a complete checkpoint.

    If a user has moved the checkpoint and left a symbolic link, only the link is removed.
    """
    if folder.is_symlink():
        log.info(f"Removing only the symbolic link {folder}. The linked folder {folder.readlink()} is kept.")
        folder.unlink()
        return
    renamed_folder = folder.with_name(f".{folder.name}.old")
    discard(renamed_folder)
    folder.rename(renamed_folder)
    discard(renamed_folder)


def remove_temporary(parent: Path) -> None:
    """Remove leftovers of interrupted writes and removals. Only the run's owner may call this function."""
    for path in parent.glob(".step_*"):
        with contextlib.suppress(OSError):
            discard(path)


# --- Verifying and choosing


def verify(folder: Path, heartbeat: Heartbeat = lambda: None) -> Checkpoint:
    """Verify a checkpoint's manifest and every file's size and SHA-256.

    Raises:
        DamagedCheckpoint: If a file is missing or does not match the manifest. The error message names the
            file and the problem.
        ValueError: If a file can't be read.
    """
    try:
        with open(_regular_file(folder / MANIFEST_FILE), "rb") as file:
            manifest = check_manifest(file.read(JSON_LIMIT_BYTES), folder)
        for name, expected in manifest["files"].items():
            path = _regular_file(folder / name)
            if path.stat().st_size != expected["size"]:
                raise DamagedCheckpoint(
                    f"{path} contains {path.stat().st_size:,} bytes, but the manifest lists"
                    f" {expected['size']:,} bytes"
                )
            if sha256_of(path, heartbeat) != expected["sha256"]:
                raise DamagedCheckpoint(f"{path} does not match the SHA-256 in the manifest")
    except OSError as error:  # after a disk or permission error, for example, the file may be intact
        raise ValueError(f"{error.filename} can't be read: {error.strerror}") from None
    return Checkpoint(folder, manifest)


def _regular_file(path: Path) -> Path:
    """Return the path if it refers to a regular file.

    Raises:
        DamagedCheckpoint: If the file is missing or is not a regular file. Symbolic links are refused. Pipes
            are also refused, because a read from a pipe would block.
    """
    if path.is_symlink() or not path.is_file():
        raise DamagedCheckpoint(f"{path} is {'not a regular file' if os.path.lexists(path) else 'missing'}")
    return path


class FileEntry(TypedDict):
    size: int  # file size in bytes
    sha256: str


class CheckpointManifest(TypedDict):
    digest: str
    format_version: Any
    step: int
    files: dict[str, FileEntry]


def check_manifest(content: bytes, folder: Path | str) -> dict[str, Any]:
    """Parse and check a checkpoint's manifest without reading the checkpoint's other files.

    Raises:
        DamagedCheckpoint: If the manifest is malformed, has been modified, or belongs to a different step.
        ValueError: If this version of the code does not support the manifest's format version.
    """
    location = f"{folder}/{MANIFEST_FILE}"
    try:
        manifest = parse_json(content, location)
    except ValueError:
        manifest = {}
    if not has_type(manifest, CheckpointManifest) or any(
        file["size"] < 0 for file in manifest["files"].values()
    ):
        raise DamagedCheckpoint(f"{location} is not a valid checkpoint manifest")
    if manifest.pop("digest") != _manifest_digest(manifest):
        raise DamagedCheckpoint(f"{location} does not match the digest that the file contains")
    version, listed_files = manifest["format_version"], manifest["files"].keys()
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise ValueError(
            f"{location} uses checkpoint format version {version}, but this version of onecurve supports only"
            f" versions 1 to {FORMAT_VERSION}. Update onecurve."
        )
    required_files = {MODEL_FILE, OPTIMIZER_FILE, STATE_FILE}
    if not required_files <= listed_files <= required_files | {EMA_FILE}:
        raise DamagedCheckpoint(
            f"{location} does not list the files of a checkpoint. The listed files are"
            f" {', '.join(sorted(listed_files))}"
        )
    if step_of(Path(folder).name) != manifest["step"]:
        raise DamagedCheckpoint(f"{location} belongs to the checkpoint of step {manifest['step']}")
    return manifest


def newest(parent: Path, heartbeat: Heartbeat = lambda: None, ours: bool = True) -> Checkpoint | None:
    """Return the newest checkpoint that passes verification, or None if the folder contains no checkpoints.

    Args:
        heartbeat: Function called about once per second while files are hashed.
        ours: True if this process owns the folder and must therefore rename damaged checkpoints to damaged_*.

    Raises:
        ValueError: If checkpoints exist but none of them passes verification.
    """
    steps, damaged = steps_in(parent), []
    for step in steps:
        folder = parent / step_name(step)
        try:
            checkpoint = verify(folder, heartbeat)
        except DamagedCheckpoint as error:
            damaged.append(folder)
            log.warning(f"warning: the checkpoint of step {step:,} is damaged: {error}")
            continue
        for damaged_folder in damaged if ours else ():
            renamed_folder = damaged_folder.with_name(f"damaged_{damaged_folder.name}")
            discard(renamed_folder)
            damaged_folder.rename(renamed_folder)
        return checkpoint
    if damaged:
        raise ValueError(
            f"none of the {len(damaged)} checkpoints in {parent} passes verification. Restore an intact copy"
            " of a checkpoint, or start a new run with a different --output_dir."
        )
    return None


def _manifest_digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


# --- Reading


class TensorFile:
    """Reader that loads a verified safetensors file one tensor at a time.

    Raises:
        ValueError: If the file is not a safetensors file.
    """

    def __init__(self, path: Path):
        from safetensors import SafetensorError, safe_open

        self.path = path
        try:
            check_regular(path)
            self.file = safe_open(path, "pt")
        except (OSError, SafetensorError) as error:
            reason = lfs_pointer_problem(path) or error
            raise ValueError(f"{path} is not a valid safetensors file: {reason}") from None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(self.file.get_slice(name).get_shape()) for name in self.file.keys()}  # noqa: SIM118

    def specs(self) -> Specs:
        """Return the dtype and shape of each tensor in the file.

        Raises:
            ValueError: If the file contains a dtype that runs never write.
        """
        dtypes = {name: self.file.get_slice(name).get_dtype() for name in self.file.keys()}  # noqa: SIM118
        if unknown := [name for name, dtype in dtypes.items() if dtype not in DTYPES]:
            raise ValueError(
                f"{self.path}: tensor {unknown[0]} has the unsupported dtype {dtypes[unknown[0]]}"
            )
        return {name: (DTYPES[dtypes[name]], shape) for name, shape in self.shapes().items()}

    def expect(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raise ValueError unless the file contains exactly these tensor names and shapes."""
        stored_shapes = self.shapes()
        mismatches = [name for name in shapes if stored_shapes.get(name, shapes[name]) != shapes[name]]
        mismatches += sorted(stored_shapes.keys() ^ shapes.keys())
        if mismatches:
            first_name = mismatches[0]
            stored, expected = (
                list(shapes_by_name[first_name]) if first_name in shapes_by_name else "nothing"
                for shapes_by_name in (stored_shapes, shapes)
            )
            raise ValueError(
                f"{self.path} does not match this model: {len(mismatches)} tensors have different names or"
                f" shapes. The first mismatch is {first_name} ({stored} in the file, {expected} in the"
                " model). Set the model flags to the values with which the file's model was trained."
            )

    def tensor(self, name: str) -> Tensor:
        return self.file.get_tensor(name)
