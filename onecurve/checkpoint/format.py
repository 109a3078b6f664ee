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
import shlex
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from onecurve.checkpoint.snapshot import DTYPE_BY_NAME, DTYPE_NAMES, Snapshot, Specs, write_chunks
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
PICKLE_PREFIXES = (b"PK", b"\x80")  # first bytes of files in torch's new and old pickle formats
# Python code of a command that converts a pickle file to safetensors. Only the user runs this command, never
# onecurve. timm prefers averaged weights in a checkpoint, and allows torch to load only tensors.
PICKLE_CONVERSION_CODE = (
    "import sys; from timm.models import load_state_dict as load; from safetensors.torch import save_file;"
    " save_file({n: t.clone().contiguous() for n, t in load(sys.argv[1]).items()}, sys.argv[2])"
)
WRAPPER_PREFIXES = ("_orig_mod.", "module.", "model.")  # added by torch.compile, DDP and Lightning
LATEST_KEPT_COUNT = 2  # number of latest checkpoints that steps_to_keep() keeps


class OptimizerScalars(TypedDict):
    """Content of the optimizer section in state.json."""

    scalars: dict[str, dict[str, Any]]  # parameter name -> state name -> scalar
    groups: list[dict[str, Any]]  # each parameter group's settings that the optimizer changed


class DamagedCheckpoint(ValueError):
    """Error raised when a checkpoint fails verification."""


@dataclass(frozen=True)
class Checkpoint:
    """Folder and manifest of a verified checkpoint."""

    folder: Path
    manifest: dict[str, Any]  # content of manifest.json without the digest

    @property
    def step(self) -> int:
        return self.manifest["step"]


def can_store(value: Any) -> bool:
    """Return True if a checkpoint can store the value in a safetensors file or in state.json."""
    if isinstance(value, Tensor):
        return value.dtype in DTYPE_NAMES
    return value is None or type(value) in (bool, int, float, str)


def scalar_to_json(scalar: Any) -> Any:
    """Convert a scalar or a small tensor to a JSON value that scalar_from_json() converts back."""
    if not isinstance(scalar, Tensor):
        return scalar
    return {"dtype": DTYPE_NAMES[scalar.dtype], "value": scalar.tolist()}


def scalar_from_json(json_value: Any) -> Any:
    """Convert the output of scalar_to_json() back to a scalar or a CPU tensor.

    Raises:
        ValueError: If the value is not a valid output of scalar_to_json().
    """
    if not isinstance(json_value, dict):
        return json_value
    try:
        return torch.tensor(json_value["value"], dtype=DTYPE_BY_NAME[json_value["dtype"]])
    except (KeyError, TypeError, RuntimeError):
        raise ValueError(f"the entry {json_value} in state.json can't be converted to a tensor") from None


def parameter_of(state_tensor_name: str) -> str:
    """Return the parameter's name from a state tensor's name `<parameter>/<state>`."""
    parameter_name, _, _ = state_tensor_name.rpartition("/")
    return parameter_name


def step_name(step: int) -> str:
    """Return the name of a checkpoint's folder, for example step_00000390 for step 390."""
    return f"step_{step:08d}"


def step_from_name(name: str) -> int | None:
    """Return the step number in a checkpoint's name (390 for step_00000390), or None for other names."""
    step_match = re.fullmatch(r"step_(?P<step>[0-9]{8}|[1-9][0-9]{8,17})", name)
    return int(step_match["step"]) if step_match else None


def steps_in(folder: Path) -> list[int]:
    """Return the steps of all checkpoints in the folder, including damaged checkpoints, newest first."""
    if not folder.is_dir():
        return []
    steps_or_none = (step_from_name(child_path.name) for child_path in folder.iterdir())
    return sorted((step for step in steps_or_none if step is not None), reverse=True)


# --- Writing


def write_checkpoint(
    checkpoints_folder: Path,
    step: int,
    snapshots: dict[str, Snapshot],
    state: dict[str, Any],
    manifest_entries: dict[str, Any],
) -> Path:
    """Atomically write the folder checkpoints_folder/step_N, sync it to disk, and return its path.

    Args:
        checkpoints_folder: The run's checkpoints/ folder.
        step: Step of the checkpoint.
        snapshots: Complete snapshots, by file name.
        state: Content of state.json.
        manifest_entries: Additional entries for the manifest.

    Raises:
        OSError: If the write fails. Earlier checkpoints are not affected.
    """
    step_folder = checkpoints_folder / step_name(step)
    temporary_folder = checkpoints_folder / f".{step_folder.name}.tmp"
    discard(temporary_folder)  # left by an interrupted write
    try:
        temporary_folder.mkdir(parents=True)
        file_entries = {
            file_name: snapshot.write(temporary_folder / file_name)
            for file_name, snapshot in snapshots.items()
        }
        state_json = json.dumps(state, indent=1).encode()
        file_entries[STATE_FILE] = write_chunks(temporary_folder / STATE_FILE, [state_json])
        manifest = {"format_version": FORMAT_VERSION, "step": step, "files": file_entries, **manifest_entries}
        manifest["digest"] = _manifest_digest(manifest)
        write_chunks(temporary_folder / MANIFEST_FILE, [json.dumps(manifest, indent=1).encode()])
        sync(temporary_folder)
        temporary_folder.rename(step_folder)
    except BaseException:
        shutil.rmtree(temporary_folder, ignore_errors=True)
        raise
    sync(checkpoints_folder)
    return step_folder


def write_step_index(checkpoints_folder: Path, latest_step: int, best_step: int | None) -> None:
    """Write index.json for users, `--weights` and validate.py. A resumed run does not read index.json."""
    write_json(checkpoints_folder / INDEX_FILE, make_step_index(latest_step, best_step))


def make_step_index(latest_step: int, best_step: int | None) -> dict[str, str]:
    """Return the content of index.json. `best_step` is None if there is no best checkpoint."""
    best_entry = {} if best_step is None else {"best": step_name(best_step)}
    return {"latest": step_name(latest_step)} | best_entry


def parse_step_index(index_bytes: bytes, location: Path | str) -> dict[str, int]:
    """Return the checkpoint steps listed in index.json, for example {"latest": 390, "best": 260}.

    Raises:
        ValueError: If the content is not a checkpoint index.
    """
    try:
        folder_by_label = parse_json(index_bytes, location)
        step_by_label = {label: step_from_name(folder_name) for label, folder_name in folder_by_label.items()}
        return {label: step for label, step in step_by_label.items() if step is not None}
    except (ValueError, TypeError):
        raise ValueError(f"{location} is not a valid checkpoint index") from None


def best_checkpoint_folder(checkpoints_folder: Path) -> Path | None:
    """Return the folder of the best checkpoint listed in index.json.

    If index.json or the folder does not exist, or index.json lists no best checkpoint, the result is None.
    """
    index_file = checkpoints_folder / INDEX_FILE
    if not index_file.is_file():
        return None
    best_step = parse_step_index(index_file.read_bytes(), shortest(index_file)).get("best")
    if best_step is None or not (checkpoints_folder / step_name(best_step)).is_dir():
        return None
    return checkpoints_folder / step_name(best_step)


def steps_to_keep(saved_steps: Iterable[int], best_step: int | None, keep_every: int | None) -> set[int]:
    """Return the checkpoint steps to keep: the latest two, the best, and multiples of --keep_every."""
    sorted_steps = sorted(saved_steps)
    latest_steps = sorted_steps[-LATEST_KEPT_COUNT:]
    kept_steps = {step for step in sorted_steps if step in latest_steps or step == best_step}
    if keep_every:
        kept_steps |= {step for step in sorted_steps if step % keep_every == 0}
    return kept_steps


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint's folder, after renaming it so that it no longer looks like a checkpoint.

    An interrupted removal therefore leaves no folder that looks complete. If a user has moved the checkpoint
    and left a symbolic link, only the link is removed.
    """
    if folder.is_symlink():
        log.info(f"Removing only the symbolic link {folder}. The linked folder {folder.readlink()} is kept.")
        folder.unlink()
        return
    hidden_folder = folder.with_name(f".{folder.name}.old")
    discard(hidden_folder)  # left by an interrupted removal
    folder.rename(hidden_folder)
    discard(hidden_folder)


def remove_temporary_folders(checkpoints_folder: Path) -> None:
    """Remove leftovers of interrupted writes and removals. Only the run's owner may call this function."""
    for leftover_folder in checkpoints_folder.glob(".step_*"):
        with contextlib.suppress(OSError):
            discard(leftover_folder)


# --- Verifying and choosing


def verify_checkpoint(step_folder: Path, heartbeat: Heartbeat = lambda: None) -> Checkpoint:
    """Verify a checkpoint's manifest and every file's size and SHA-256, calling heartbeat() meanwhile.

    Raises:
        DamagedCheckpoint: If a file is missing or does not match the manifest. The error message names the
            file and the problem.
        ValueError: If a file can't be read.
    """
    try:
        with open(_require_regular_file(step_folder / MANIFEST_FILE), "rb") as manifest_file:
            manifest = parse_checkpoint_manifest(manifest_file.read(JSON_LIMIT_BYTES), step_folder)
        for file_name, file_entry in manifest["files"].items():
            checkpoint_file = _require_regular_file(step_folder / file_name)
            if checkpoint_file.stat().st_size != file_entry["size"]:
                raise DamagedCheckpoint(
                    f"{checkpoint_file} contains {checkpoint_file.stat().st_size:,} bytes,"
                    f" but the manifest lists {file_entry['size']:,} bytes"
                )
            if sha256_of(checkpoint_file, heartbeat) != file_entry["sha256"]:
                raise DamagedCheckpoint(f"{checkpoint_file} does not match the SHA-256 in the manifest")
    except OSError as error:  # after a disk or permission error, for example, the file may be intact
        raise ValueError(f"{error.filename} can't be read: {error.strerror}") from None
    return Checkpoint(step_folder, manifest)


def _require_regular_file(checkpoint_file: Path) -> Path:
    """Return the path if it refers to a regular file.

    Raises:
        DamagedCheckpoint: If the file is missing or is not a regular file. Symbolic links are refused. Pipes
            are also refused, because a read from a pipe would block.
    """
    if checkpoint_file.is_symlink() or not checkpoint_file.is_file():
        file_problem = "not a regular file" if os.path.lexists(checkpoint_file) else "missing"
        raise DamagedCheckpoint(f"{checkpoint_file} is {file_problem}")
    return checkpoint_file


class FileEntry(TypedDict):
    """Entry in the manifest for one of the checkpoint's files."""

    size: int  # file size in bytes
    sha256: str


class CheckpointManifest(TypedDict):
    """Required entries of manifest.json, with which its structure is checked."""

    digest: str  # SHA-256 of the other entries
    format_version: Any  # an int, checked separately so that an unknown version has a clear error message
    step: int
    files: dict[str, FileEntry]


def parse_checkpoint_manifest(manifest_bytes: bytes, step_folder: Path | str) -> dict[str, Any]:
    """Parse and check a checkpoint's manifest without reading the checkpoint's other files.

    Args:
        manifest_bytes: Content of manifest.json.
        step_folder: The checkpoint's folder or URL, which contains the step and appears in error messages.

    Returns:
        The manifest without its `digest` entry.

    Raises:
        DamagedCheckpoint: If the manifest is malformed, has been modified, or belongs to a different step.
        ValueError: If this version of the code does not support the manifest's format version.
    """
    location = f"{step_folder}/{MANIFEST_FILE}"
    try:
        manifest = parse_json(manifest_bytes, location)
    except ValueError:
        manifest = {}  # not JSON, and therefore not valid
    is_manifest_valid = has_type(manifest, CheckpointManifest)
    if not is_manifest_valid or any(file_entry["size"] < 0 for file_entry in manifest["files"].values()):
        raise DamagedCheckpoint(f"{location} is not a valid checkpoint manifest")
    if manifest.pop("digest") != _manifest_digest(manifest):
        raise DamagedCheckpoint(f"{location} does not match the digest that the file contains")
    format_version = manifest["format_version"]
    if type(format_version) is not int or not 1 <= format_version <= FORMAT_VERSION:
        raise ValueError(
            f"{location} uses checkpoint format version {format_version},"
            f" but this version of onecurve supports only versions 1 to {FORMAT_VERSION}. Update onecurve."
        )
    listed_files = manifest["files"].keys()
    required_files = {MODEL_FILE, OPTIMIZER_FILE, STATE_FILE}
    if not required_files <= listed_files <= required_files | {EMA_FILE}:
        raise DamagedCheckpoint(
            f"{location} does not list the files of a checkpoint."
            f" The listed files are {', '.join(sorted(listed_files))}"
        )
    if step_from_name(Path(step_folder).name) != manifest["step"]:
        raise DamagedCheckpoint(f"{location} belongs to the checkpoint of step {manifest['step']}")
    return manifest


def newest(
    checkpoints_folder: Path, heartbeat: Heartbeat = lambda: None, is_owner: bool = True
) -> Checkpoint | None:
    """Return the newest checkpoint that passes verification, or None if the folder contains no checkpoints.

    Args:
        heartbeat: Function called about once per second while files are hashed.
        is_owner: True if this process owns the folder. If the owner finds an intact checkpoint, it renames
            newer, damaged checkpoints to damaged_*.

    Raises:
        ValueError: If checkpoints exist but none of them passes verification.
    """
    damaged_folders: list[Path] = []
    for step in steps_in(checkpoints_folder):
        step_folder = checkpoints_folder / step_name(step)
        try:
            checkpoint = verify_checkpoint(step_folder, heartbeat)
        except DamagedCheckpoint as error:
            damaged_folders.append(step_folder)
            log.warning(f"warning: the checkpoint of step {step:,} is damaged: {error}")
            continue
        if is_owner:
            for damaged_folder in damaged_folders:
                renamed_folder = damaged_folder.with_name(f"damaged_{damaged_folder.name}")
                discard(renamed_folder)
                damaged_folder.rename(renamed_folder)
        return checkpoint
    if damaged_folders:
        raise ValueError(
            f"none of the {len(damaged_folders)} checkpoints in {checkpoints_folder} passes verification."
            " Restore an intact copy of a checkpoint, or start a new run with a different --output_dir."
        )
    return None


def _manifest_digest(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest that does not contain a `digest` entry."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


# --- Reading


class TensorFile:
    """Reader that loads a safetensors file one tensor at a time. The file stays open.

    Raises:
        ValueError: If the file is not a safetensors file.
    """

    def __init__(self, path: Path):
        from safetensors import SafetensorError, safe_open

        self.path = path
        try:
            check_regular(path)
            self.safetensors_reader = safe_open(path, "pt")
        except (OSError, SafetensorError) as error:
            invalid_reason = lfs_pointer_problem(path) or error
            raise ValueError(f"{path} is not a valid safetensors file: {invalid_reason}") from None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return each tensor's shape, by name, without reading the tensors."""
        reader = self.safetensors_reader
        return {name: tuple(reader.get_slice(name).get_shape()) for name in reader.keys()}  # noqa: SIM118

    def specs(self) -> Specs:
        """Return each tensor's dtype and shape, by name, without reading the tensors.

        Raises:
            ValueError: If the file contains a dtype that runs never write.
        """
        reader = self.safetensors_reader
        dtype_names = {name: reader.get_slice(name).get_dtype() for name in reader.keys()}  # noqa: SIM118
        for tensor_name, dtype_name in dtype_names.items():
            if dtype_name not in DTYPE_BY_NAME:
                raise ValueError(f"{self.path}: tensor {tensor_name} has the unsupported dtype {dtype_name}")
        return {name: (DTYPE_BY_NAME[dtype_names[name]], shape) for name, shape in self.shapes().items()}

    def require_shapes(self, model_shapes: dict[str, tuple[int, ...]]) -> None:
        """Raise ValueError unless the file contains exactly these tensor names and shapes."""
        stored_shapes = self.shapes()
        mismatches = [name for name, shape in model_shapes.items() if stored_shapes.get(name, shape) != shape]
        mismatches += sorted(stored_shapes.keys() ^ model_shapes.keys())
        if mismatches:
            tensor_name = mismatches[0]
            stored_shape = list(stored_shapes[tensor_name]) if tensor_name in stored_shapes else "nothing"
            expected_shape = list(model_shapes[tensor_name]) if tensor_name in model_shapes else "nothing"
            raise ValueError(
                f"{self.path} does not match this model:"
                f" {len(mismatches)} tensors have different names or shapes."
                f" The first mismatch is {tensor_name}"
                f" ({stored_shape} in the file, {expected_shape} in the model)."
                " Set the model flags to the values with which the file's model was trained."
            )

    def wrapper_prefix(self) -> str:
        """Return the prefix that nested wrappers add to all tensor names, for example `module._orig_mod.`."""
        tensor_names = self.shapes().keys()
        common_prefix = ""
        while tensor_names:
            for wrapper_prefix in WRAPPER_PREFIXES:
                if all(name.startswith(common_prefix + wrapper_prefix) for name in tensor_names):
                    common_prefix += wrapper_prefix
                    break
            else:  # no further prefix
                break
        return common_prefix

    def read_tensor(self, name: str) -> Tensor:
        return self.safetensors_reader.get_tensor(name)


def open_weight_file(weight_file: Path) -> TensorFile:
    """Open a safetensors file. If it is a pickle file, refuse it with a command that converts it.

    Raises:
        ValueError: If the file is not a safetensors file.
    """
    try:
        return TensorFile(weight_file)
    except ValueError:
        if not weight_file.is_file():
            raise
        with open(weight_file, "rb") as binary_file:
            first_bytes = binary_file.read(max(map(len, PICKLE_PREFIXES)))
        if not first_bytes.startswith(PICKLE_PREFIXES):
            raise
        safetensors_file = weight_file.with_suffix(".safetensors")
        conversion_command = ["python", "-c", PICKLE_CONVERSION_CODE, str(weight_file), str(safetensors_file)]
        raise ValueError(
            f"{weight_file} is a pickle file, which can execute code when it is loaded. Convert the file to"
            f" safetensors in an isolated environment such as a container: {shlex.join(conversion_command)}"
        ) from None
