"""Reads and writes starts.jsonl, which contains one line for each start of a run's main process.

Each start appends a line and does not change earlier lines. A line contains recipe.json as of that start
(without `argv` and `defaults`), and the following keys:

    at                     time.time() of the start
    step                   step at which the start began
    changed                differences from the checkpoint that the start resumes: {"lr": [0.01, 0.001], ...}
    has_optimizer          true if the optimizer's state was restored from that checkpoint
    per_device_batch_size, accumulation_steps, steps_per_epoch, cropped

If an earlier version trained before the first recorded start, the first line is created from the checkpoint's
manifest and does not contain `step`.
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
# Keys of `changed` which indicate that the evaluation images differ
CONTENT, CROPPED = "content of the data", "cropped images"
LEFT_OUT = ("argv", "defaults")
MOST_IN_TURN = 4  # maximum number of values that in_turn() lists


@dataclass(frozen=True)
class Start:
    """A start of a run. Its steps in the result are first + 1 ... last; none if first equals last."""

    about: dict[str, Any]  # line of starts.jsonl
    first: int
    last: int

    @property
    def is_recorded(self) -> bool:
        """False for the line about training by an earlier version."""
        return "step" in self.about


def add_start(
    folder: Path, start: StartLine, continued: dict[str, Any] | None, paths: Collection[str]
) -> None:
    """Append a start to starts.jsonl. Raises OSError if the file can't be written.

    Args:
        folder: The run's folder.
        start: New line, without `changed`.
        continued: Manifest of the checkpoint from which the run resumes; None for a new run.
        paths: Names of the flags that may be local paths.
    """
    file, line = folder / STARTS, {name: value for name, value in start.items() if name not in LEFT_OUT}
    if file.is_symlink():  # the link's target may not belong to the run
        file.unlink()
    changed = changes(continued, start, paths) if continued else {}
    lines = [line | {"changed": changed}]
    if continued and not file.exists():
        earlier = {"recipe": continued.get("recipe"), "source": continued.get("data")}
        lines.insert(0, continued.get("written_by", {}) | earlier)
    with open_to_append(file) as opened:
        if opened.seek(0, os.SEEK_END):
            opened.seek(-1, os.SEEK_END)
            opened.write(
                b"" if opened.read(1) == b"\n" else b"\n"
            )  # a killed process may have left a partial line
        opened.write("".join(json.dumps(line) + "\n" for line in lines).encode())
        opened.flush()
        os.fsync(opened.fileno())


def changes(manifest: dict[str, Any], start: StartLine, paths: Collection[str]) -> dict[str, list[Any]]:
    """Return the flags that differ between a checkpoint's recipe and a start: {name: [before, now]}."""
    before, now = manifest.get("recipe", {}), json.loads(json.dumps(start["recipe"]))
    pairs = {name: [value, now[name]] for name, value in before.items() if name in now}
    pairs = {
        name: pair
        for name, pair in pairs.items()
        if comparable(pair[0], name in paths) != comparable(pair[1], name in paths)
    }
    pairs[CONTENT] = [manifest.get("data"), start["source"]]
    pairs[CROPPED] = [manifest.get("cropped", start["cropped"]), start["cropped"]]
    pairs["state of the optimizer"] = ["restored", "restored" if start["has_optimizer"] else "zero"]
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def comparable(value: Any, is_path: bool) -> Any:
    """Return a local path as a normalised absolute path, and any other value unchanged.

    is_path: True for a flag whose value may be a local path.
    """
    is_local = is_path and isinstance(value, str) and ":" not in value
    return os.path.abspath(os.path.expanduser(value)) if is_local else value


def in_order(lines: Sequence[dict[str, Any]], last_step: int) -> list[Start]:
    """Return the starts with the steps that the result includes. `last_step`: last step of the run."""
    begins = [line.get("step", 0) for line in lines]
    return [
        Start(line, begins[k], max(begins[k], min([*begins[k + 1 :], last_step])))
        for k, line in enumerate(lines)
    ]


def kept(starts: Sequence[Start]) -> list[Start]:
    """Return the starts with steps in the run's result, or the last start if no start has such steps yet."""
    return [start for start in starts if start.last > start.first] or [*starts[-1:]]


def where_trained(folder: Path, result: Result) -> list[tuple[str, tuple[str, ...]]]:
    """Return the strategy and the devices of each start with steps in the result.

    result: Content of result.json, which describes only the last start.
    """
    lines = [typed_values(line, kinds(StartLine))[0] for line in read_lines(folder / STARTS)]
    starts = [start.about for start in kept(in_order(lines, result["steps"]))]
    jobs = [(line.get("strategy", "?"), tuple(line.get("devices") or "?")) for line in starts]
    return jobs or [(result["strategy"], (result["device"],) * result["processes"])]


def where_in_words(folder: Path, result: Result) -> str:
    """Describe where a run was trained, for example `ddp on 2 x CPU, then single on 1 x CPU`."""
    jobs = where_trained(folder, result)
    return in_turn(f"{strategy} on {len(devices)} x {devices[0]}" for strategy, devices in jobs)


def in_turn(values: Iterable[str]) -> str:
    """List successive values without consecutive repetitions, for example `a, then b, then c`."""
    distinct = [value for value, _ in groupby(values)]
    if len(distinct) > MOST_IN_TURN:
        distinct = [*distinct[: MOST_IN_TURN - 2], f"{len(distinct) - MOST_IN_TURN + 1} others", distinct[-1]]
    return ", then ".join(distinct)
