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

from onecurve.run.schemas import Result, StartLine, kinds
from onecurve.system.files import open_to_append, read_lines, typed_values

STARTS = "starts.jsonl"
# Keys in `changed` that indicate different evaluation images
CONTENT, CROPPED = "content of the data", "cropped images"
LEFT_OUT = ("argv", "defaults")  # Keys of recipe.json that are omitted from starts.jsonl
MOST_IN_TURN = 4  # Maximum number of values that in_turn() lists


@dataclass(frozen=True)
class Start:
    """Start of a run. The final result includes this start's steps first + 1 to last."""

    about: dict[str, Any]  # Line of starts.jsonl
    first: int
    last: int

    @property
    def is_recorded(self) -> bool:
        """False for a line that was created for training with an earlier version."""
        return "step" in self.about


def add_start(
    folder: Path, start: StartLine, continued: dict[str, Any] | None, paths: Collection[str]
) -> None:
    """Append a start to starts.jsonl. Raise OSError if the file can't be written.

    Args:
        folder: Folder of the run.
        start: New line without the key `changed`.
        continued: Manifest of the checkpoint from which the run resumes, or None for a new run.
        paths: Names of flags whose values may be local paths.
    """
    file = folder / STARTS
    line = {name: value for name, value in start.items() if name not in LEFT_OUT}
    if file.is_symlink():  # The target of the link may not belong to the run
        file.unlink()
    changed = changes(continued, start, paths) if continued else {}
    lines = [line | {"changed": changed}]
    if continued and not file.exists():
        recipe_and_data = {"recipe": continued.get("recipe"), "source": continued.get("data")}
        lines.insert(0, continued.get("written_by", {}) | recipe_and_data)
    with open_to_append(file) as opened:
        if opened.seek(0, os.SEEK_END):
            opened.seek(-1, os.SEEK_END)
            if opened.read(1) != b"\n":  # A killed process has left a partial line
                opened.write(b"\n")
        opened.write("".join(json.dumps(line) + "\n" for line in lines).encode())
        opened.flush()
        os.fsync(opened.fileno())


def changes(manifest: dict[str, Any], start: StartLine, paths: Collection[str]) -> dict[str, list[Any]]:
    """Return the flags that differ between a checkpoint and a start, as {name: [before, now]}."""
    recorded_flags = manifest.get("recipe", {})
    # Converts each value to the type it has in a manifest
    current_flags = json.loads(json.dumps(start["recipe"]))
    changed: dict[str, list[Any]] = {}
    for name, before in recorded_flags.items():
        now = current_flags.get(name, before)
        if comparable(before, name in paths) != comparable(now, name in paths):
            changed[name] = [before, now]
    other_properties: dict[str, list[Any]] = {
        CONTENT: [manifest.get("data"), start["source"]],
        CROPPED: [manifest.get("cropped", start["cropped"]), start["cropped"]],
        "state of the optimizer": ["restored", "restored" if start["has_optimizer"] else "zero"],
    }
    return changed | {name: pair for name, pair in other_properties.items() if pair[0] != pair[1]}


def comparable(value: Any, is_path: bool) -> Any:
    """Return a local path as a normalised absolute path. Return other values unchanged.

    `is_path` is True for a flag whose value may be a local path.
    """
    is_local = is_path and isinstance(value, str) and ":" not in value
    return os.path.abspath(os.path.expanduser(value)) if is_local else value


def in_order(lines: Sequence[dict[str, Any]], last_step: int) -> list[Start]:
    """Return each start with its steps that the result includes. `last_step` is the run's last step."""
    first_steps = [line.get("step", 0) for line in lines]
    starts = []
    for index, line in enumerate(lines):
        # A later start repeats the steps after its first step.
        kept_until = min([*first_steps[index + 1 :], last_step])
        starts.append(Start(line, first_steps[index], max(first_steps[index], kept_until)))
    return starts


def kept(starts: Sequence[Start]) -> list[Start]:
    """Return the starts whose steps the result includes, or the last start if there are none yet."""
    return [start for start in starts if start.last > start.first] or [*starts[-1:]]


def where_trained(folder: Path, result: Result) -> list[tuple[str, tuple[str, ...]]]:
    """Return the strategy and the devices of each start whose steps the result includes.

    `result` is the content of result.json, which describes only the last start.
    """
    lines = [typed_values(line, kinds(StartLine))[0] for line in read_lines(folder / STARTS)]
    starts = [start.about for start in kept(in_order(lines, result["steps"]))]
    jobs = [(line.get("strategy", "?"), tuple(line.get("devices") or "?")) for line in starts]
    return jobs or [(result["strategy"], (result["device"],) * result["processes"])]


def where_in_words(folder: Path, result: Result) -> str:
    """Describe the strategies and devices of a run, such as `ddp on 2 x CPU, then single on 1 x CPU`."""
    jobs = where_trained(folder, result)
    return in_turn(f"{strategy} on {len(devices)} x {devices[0]}" for strategy, devices in jobs)


def in_turn(values: Iterable[str]) -> str:
    """List successive values without consecutive repetitions, such as `a, then b, then c`."""
    distinct = [value for value, _ in groupby(values)]
    if len(distinct) > MOST_IN_TURN:
        distinct = [*distinct[: MOST_IN_TURN - 2], f"{len(distinct) - MOST_IN_TURN + 1} others", distinct[-1]]
    return ", then ".join(distinct)
