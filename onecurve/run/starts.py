"""Reads and writes starts.jsonl, which contains one line for each start of a run's main process.

Each start appends a line and does not change earlier lines. A line contains the entries of recipe.json at
that start (without `argv` and `defaults`), and the following keys:

    at                     time.time() of the start
    step                   training step at which this process started
    changed                differences from the checkpoint that this start resumed: {"lr": [0.01, 0.001], ...}
    has_optimizer          true if the optimizer state was restored from that checkpoint
    per_device_batch_size, accumulation_steps, steps_per_epoch, cropped

If an earlier version of the code trained the run before the first recorded start, the first line is created
from the checkpoint's manifest and does not contain `step`.
"""

import json
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from onecurve.run.schemas import Result, StartLine, value_types
from onecurve.system.files import open_to_append, read_lines, split_by_type

STARTS_FILE = "starts.jsonl"
# Keys in `changed` that indicate different evaluation images
DATA_CONTENT = "content of the data"
CROPPED_IMAGES = "cropped images"
OMITTED_KEYS = ("argv", "defaults")  # Keys of recipe.json that are omitted from starts.jsonl
MAX_JOINED_VALUES = 4  # Maximum number of values that join_with_then() lists


@dataclass(frozen=True)
class RunStart:
    """Start of a run. The final result includes this start's steps from begin_step + 1 to last_kept_step."""

    settings: dict[str, Any]  # Line of starts.jsonl
    begin_step: int  # Number of steps completed before this start
    last_kept_step: int  # Last step that the result includes

    @property
    def trains_kept_steps(self) -> bool:
        """True if the result includes at least one step of this start."""
        return self.last_kept_step > self.begin_step

    @property
    def is_recorded(self) -> bool:
        """False for a line that was created for training with an earlier version."""
        return "step" in self.settings


def add_start(
    folder: Path, start: StartLine, manifest: dict[str, Any] | None, path_flags: Collection[str]
) -> None:
    """Append a start to starts.jsonl, with its differences from the checkpoint that it resumed.

    Args:
        folder: Folder of the run.
        start: New line without the key `changed`.
        manifest: Manifest of the checkpoint from which the run resumes, or None for a new run.
        path_flags: Names of flags whose values may be local paths.

    Raises:
        OSError: If the file can't be written.
    """
    starts_path = folder / STARTS_FILE
    start_entry = {key: value for key, value in start.items() if key not in OMITTED_KEYS}
    if starts_path.is_symlink():  # The target of the link may not belong to the run
        starts_path.unlink()
    start_changes = changes_at(manifest, start, path_flags) if manifest else {}
    new_entries = [start_entry | {"changed": start_changes}]
    if manifest and not starts_path.exists():  # An earlier version of the code trained the run
        recipe_and_data = {"recipe": manifest.get("recipe"), "source": manifest.get("data")}
        new_entries.insert(0, manifest.get("written_by", {}) | recipe_and_data)
    with open_to_append(starts_path) as starts_file:
        if starts_file.seek(0, os.SEEK_END):  # The file is not empty
            starts_file.seek(-1, os.SEEK_END)
            last_byte = starts_file.read(1)
            if last_byte != b"\n":  # A killed process has left a partial line
                starts_file.write(b"\n")
        starts_file.write("".join(json.dumps(new_entry) + "\n" for new_entry in new_entries).encode())
        starts_file.flush()
        os.fsync(starts_file.fileno())


def changes_at(
    manifest: dict[str, Any], start: StartLine, path_flags: Collection[str]
) -> dict[str, list[Any]]:
    """Return the flags that differ between a checkpoint and a start, as {name: [before, now]}."""
    recorded_flags = manifest.get("recipe", {})
    # Convert each value to the type it has in a manifest
    current_flags = json.loads(json.dumps(start["recipe"]))
    changes: dict[str, list[Any]] = {}
    for flag_name, recorded_value in recorded_flags.items():
        current_value, is_path_flag = current_flags.get(flag_name, recorded_value), flag_name in path_flags
        if normalised_value(recorded_value, is_path_flag) != normalised_value(current_value, is_path_flag):
            changes[flag_name] = [recorded_value, current_value]
    other_properties: dict[str, list[Any]] = {
        DATA_CONTENT: [manifest.get("data"), start["source"]],
        CROPPED_IMAGES: [manifest.get("cropped", start["cropped"]), start["cropped"]],
        "state of the optimizer": ["restored", "restored" if start["has_optimizer"] else "zero"],
    }
    for property_name, (before, after) in other_properties.items():
        if before != after:
            changes[property_name] = [before, after]
    return changes


def normalised_value(value: Any, is_path: bool) -> Any:
    """Return a local path as a normalised absolute path. Return other values unchanged.

    `is_path` is True for a flag whose value may be a local path. Values with a colon, such as s3:// addresses
    and hf: names, are not local paths.
    """
    is_local_path = is_path and isinstance(value, str) and ":" not in value
    return os.path.abspath(os.path.expanduser(value)) if is_local_path else value


def starts_in_order(entries: Sequence[dict[str, Any]], last_step: int) -> list[RunStart]:
    """Convert the lines of starts.jsonl to starts, with the range of steps that the result includes.

    `last_step` is the run's last step.
    """
    begin_steps = [start_entry.get("step", 0) for start_entry in entries]
    run_starts = []
    for start_index, (start_entry, begin_step) in enumerate(zip(entries, begin_steps, strict=True)):
        # A later start repeats the steps after the step at which it began.
        last_kept_step = min([*begin_steps[start_index + 1 :], last_step])
        run_starts.append(RunStart(start_entry, begin_step, max(begin_step, last_kept_step)))
    return run_starts


def kept_starts(starts: Sequence[RunStart]) -> list[RunStart]:
    """Return the starts whose steps the result includes, or the last start if there are none yet."""
    return [start for start in starts if start.trains_kept_steps] or [*starts[-1:]]


def hardware_by_start(folder: Path, result: Result) -> list[tuple[str, tuple[str, ...]]]:
    """Return the strategy and the devices of each start whose steps the result includes.

    `result` is the content of result.json, which describes only the last start.
    """
    start_types = value_types(StartLine)
    split_entries = [split_by_type(entry, start_types) for entry in read_lines(folder / STARTS_FILE)]
    valid_entries = [valid_entry for valid_entry, _ in split_entries]  # Without values of the wrong type
    run_starts = starts_in_order(valid_entries, result["steps"])
    start_settings = [run_start.settings for run_start in kept_starts(run_starts)]
    strategy_and_devices = [
        (settings.get("strategy", "?"), tuple(settings.get("devices") or "?")) for settings in start_settings
    ]
    # Without starts.jsonl, only the last start is known
    return strategy_and_devices or [(result["strategy"], (result["device"],) * result["processes"])]


def hardware_in_words(folder: Path, result: Result) -> str:
    """Describe the strategies and devices of a run, such as `ddp on 2 x CPU, then single on 1 x CPU`."""
    hardware = hardware_by_start(folder, result)
    return join_with_then(f"{strategy} on {len(devices)} x {devices[0]}" for strategy, devices in hardware)


def join_with_then(values: Iterable[str]) -> str:
    """List successive values without consecutive repetitions, such as `a, then b, then c`.

    A list of more than MAX_JOINED_VALUES values contains only the first values, the number of omitted values,
    and the last value.
    """
    distinct_values = [distinct_value for distinct_value, _ in groupby(values)]
    if len(distinct_values) > MAX_JOINED_VALUES:
        omitted_in_words = f"{len(distinct_values) - MAX_JOINED_VALUES + 1} others"
        distinct_values = [*distinct_values[: MAX_JOINED_VALUES - 2], omitted_in_words, distinct_values[-1]]
    return ", then ".join(distinct_values)
