"""starts.jsonl: a line for each start of a run's main process. A start appends a line and changes no other.

A line has the content of recipe.json at that start (without `argv` and `defaults`), and:

    at                     time.time() of the start
    step                   the step at which it began
    changed                what differs from the checkpoint that it continues: {"lr": [0.01, 0.001], ...}
    has_optimizer          the state of the optimizer was restored from that checkpoint
    per_device_batch_size, accumulation_steps, steps_per_epoch, cropped

Where an earlier version trained before the first recorded start, the first line is made from the checkpoint's
manifest, and has no `step`.
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
# Keys of `changed` with which the images of evaluations changed
CONTENT, CROPPED = "content of the data", "cropped images"
LEFT_OUT = ("argv", "defaults")
MOST_IN_TURN = 4  # values that in_turn() names


@dataclass(frozen=True)
class Start:
    """A start of a run. The run's result includes its steps first + 1 ... last; none if both are equal."""

    about: dict[str, Any]  # its line
    first: int
    last: int

    @property
    def is_recorded(self) -> bool:
        """False for the line about what an earlier version trained."""
        return "step" in self.about


def add_start(
    folder: Path, start: StartLine, continued: dict[str, Any] | None, paths: Collection[str]
) -> None:
    """Appends a start. OSError if it can't be written.

    continued: the manifest of the run's own checkpoint from which it resumes. paths: the flags that may be
    local paths.
    """
    file, line = folder / STARTS, {name: value for name, value in start.items() if name not in LEFT_OUT}
    if file.is_symlink():  # to a file that is not the run's
        file.unlink()
    changed = changes(continued, start, paths) if continued else {}
    lines = [line | {"changed": changed}]
    if continued and not file.exists():
        earlier = {"recipe": continued.get("recipe"), "source": continued.get("data")}
        lines.insert(0, continued.get("written_by", {}) | earlier)
    with open_to_append(file) as opened:
        if opened.seek(0, os.SEEK_END):
            opened.seek(-1, os.SEEK_END)
            opened.write(b"" if opened.read(1) == b"\n" else b"\n")  # a kill may have cut the last line
        opened.write("".join(json.dumps(one) + "\n" for one in lines).encode())
        opened.flush()
        os.fsync(opened.fileno())


def changes(manifest: dict[str, Any], start: StartLine, paths: Collection[str]) -> dict[str, list[Any]]:
    """Return how a start's recipe differs from that of its checkpoint: {name: [before, now]}."""
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
    """Return a local path as an absolute, normalised one; other values, names and addresses as they are.

    is_path: the value of a flag that may be a local path.
    """
    is_local = is_path and isinstance(value, str) and ":" not in value
    return os.path.abspath(os.path.expanduser(value)) if is_local else value


def in_order(lines: Sequence[dict[str, Any]], last_step: int) -> list[Start]:
    """The starts, with the steps of each that the result includes. last_step: of the run."""
    begins = [line.get("step", 0) for line in lines]
    return [
        Start(line, begins[k], max(begins[k], min([*begins[k + 1 :], last_step])))
        for k, line in enumerate(lines)
    ]


def kept(starts: Sequence[Start]) -> list[Start]:
    """The starts with steps in the run's result; before the first of these steps the last start."""
    return [start for start in starts if start.last > start.first] or [*starts[-1:]]


def where_trained(folder: Path, result: Result) -> list[tuple[str, tuple[str, ...]]]:
    """Return the strategy and the devices of each start with steps in the result.

    result: the content of result.json, which tells of the last start alone.
    """
    lines = [typed_values(line, kinds(StartLine))[0] for line in read_lines(folder / STARTS)]
    starts = [start.about for start in kept(in_order(lines, result["steps"]))]
    found = [(about.get("strategy", "?"), tuple(about.get("devices") or "?")) for about in starts]
    return found or [(result["strategy"], (result["device"],) * result["processes"])]


def where_in_words(folder: Path, result: Result) -> str:
    """Return `ddp on 2 x CPU, then single on 1 x CPU`."""
    jobs = where_trained(folder, result)
    return in_turn(f"{strategy} on {len(devices)} x {devices[0]}" for strategy, devices in jobs)


def in_turn(values: Iterable[str]) -> str:
    """`a`, or of values that change `a, then b, then c`."""
    found = [value for value, _ in groupby(values)]
    if len(found) > MOST_IN_TURN:
        found = [*found[: MOST_IN_TURN - 2], f"{len(found) - MOST_IN_TURN + 1} others", found[-1]]
    return ", then ".join(found)
