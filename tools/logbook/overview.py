"""One HTML page of all runs: a table, curves, recipes side by side, pictures. The file loads nothing else.

jinja2 escapes every text of a run. What the page's script needs stands in it as JSON, which no text can end.
The page's own policy (Content-Security-Policy) lets the browser run that script alone, by its hash, and
forbids every request.
"""

import base64
import hashlib
import heapq
import io
import json
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup

from common.system.files import own_files
from common.system.paths import public_path
from common.system.text import natural, plural, printable
from tools.logbook.comparison import conditions
from tools.logbook.markdown import TEMPLATES, render
from tools.logbook.record import PARTS, RunRecord, as_flag, read_picture

DIGITS = 6  # significant ones of a number
PICTURE_PX = 900  # largest width and height of a picture
PICTURES_BYTES = 4 * 2**20  # of all pictures in a page: those of the newest runs
CONFUSIONS = 3  # named in the description of a confusion matrix
TEXTS = {  # descriptions of pictures, for those who do not see them
    "predictions": "Images with the predicted and the true class",
    "confusion": "Confusion matrix",
    "worst": "The mistakes that the model was surest of",
}
COLUMNS: list[dict[str, Any]] = yaml.safe_load((TEMPLATES / "columns.yaml").read_text())
CHOICES = ("status", "model", "data", "strategy")  # columns with a list of their values as a filter
MEASURES = ("val/accuracy", "val/loss", "train/loss", "val/raw_accuracy", "train/lr", "train/images_per_s")


# --- Finding runs


def find_runs(places: Iterable[Path]) -> tuple[list[Path], list[str]]:
    """The runs' folders at or below the places, in order, and a line for each folder that can't be read.

    ValueError for a place without a run.
    """
    found: dict[Path, Path] = {}
    unread: list[str] = []

    def add_unread(error: OSError) -> None:
        unread.append(f"{public_path(error.filename)} can't be read: {error.strerror}")

    for place in places:
        below: dict[Path, Path] = {}
        before = len(unread)
        for folder, folders, files in os.walk(place, onerror=add_unread):
            if set(PARTS) & {*folders, *files}:
                folders.clear()  # nothing below a run is another one
                below[Path(folder).resolve()] = Path(folder)
        if not below:
            none = f"{place} has no run: a run's folder has one of {', '.join(PARTS)}"
            raise ValueError("; ".join(unread[before:] or [none]))
        found |= below
    return sorted(found.values(), key=natural), unread


# --- The page


def page(folders: list[Path], unread: Iterable[str] = ()) -> str:
    """The HTML, the same for the same runs. folders: of the runs; unread: lines on unreadable folders."""
    records, places = [RunRecord(folder) for folder in folders], [folder.resolve() for folder in folders]
    root = os.path.commonpath([place.parent for place in places]) if places else ""
    names = [str(place.relative_to(root)) for place in places]
    runs = _shown([_run(record, name) for record, name in zip(records, names, strict=True)])
    pictures = _pictures(runs, records)
    columns = [one for one in COLUMNS if any(run["values"][one["key"]] is not None for run in runs)]
    content = json.dumps({"columns": columns, "runs": runs}, separators=(",", ":"), allow_nan=False)  # ASCII
    style, script = ((TEMPLATES / f"overview.{kind}").read_text("ascii") for kind in ("css", "js"))
    return render(
        "overview.html.j2",
        columns=columns,
        runs=runs,
        pictures=pictures,
        pictures_mib=PICTURES_BYTES // 2**20,
        choices={key: sorted({run["values"][key] or "" for run in runs}, key=natural) for key in CHOICES},
        measures=list(dict.fromkeys(name for run in runs for name in run["curves"])),
        unfinished=sum(run["values"]["status"] != "finished" for run in runs),
        problems=[
            *zip(names, map(_problems, records), strict=True),
            *(("a folder", [one]) for one in unread),
        ],
        policy=f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:;"
        " base-uri 'none'; form-action 'none'",
        style=Markup(style),
        script=Markup(script),
        data=Markup(content.replace("<", "\\u003c")),  # so it can neither end its element nor begin a comment
    )


def _hash(content: str) -> Markup:
    return Markup(f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'")


def _shown(value: Any) -> Any:
    """The value with its texts printable, and its numbers with DIGITS significant digits."""
    if isinstance(value, dict):
        return {printable(key): _shown(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_shown(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    return printable(value) if isinstance(value, str) else value


def _run(run: RunRecord, name: str) -> dict[str, Any]:
    """What the page's script needs: the cells of the table, the settings, and the curve of each measure."""
    wall_s = run.facts.get("wall_s", run.metrics[-1]["wall_s"] if run.metrics else None)
    starts = [line["t"] for lines in run.telemetry.values() for line in lines[:1]]
    values = {one["key"]: run.facts.get(one["key"]) for one in COLUMNS} | {
        "name": name,
        "began": _date(min(starts, default=None)),
        "problems": len(run.problems) or None,
        "model": run.model,
        "data": run.data,
        "device": "CPU, rehearsal" if run.is_rehearsal else run.devices,
        "wall_s": wall_s,
        "memory_gib": run.memory_gib,
        "utilisation_pct": run.utilisation_pct[0],
    }
    sharding = {f"sharding: {key}": as_flag(value) for key, value in run.about.get("sharding", {}).items()}
    names = {key for line in run.metrics for key in line if "/" in key}
    curves = {}
    for measure in [key for key in MEASURES if key in names] + sorted(names - set(MEASURES)):
        lines = [line for line in run.metrics if measure in line]
        axes = {"step": "step", "epoch": "epoch", "time": "wall_s", "value": measure}
        curves[measure] = {axis: [line[key] for line in lines] for axis, key in axes.items()}
    return {"name": name, "values": values, "settings": conditions(run) | sharding, "curves": curves}


def _date(seconds: float | None) -> str | None:
    try:
        return None if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError, OSError):  # no date of this calendar
        return None


def _problems(run: RunRecord) -> list[str]:
    """Why the run is not finished, and which of its files are missing or broken."""
    if run.facts["status"] == "finished":
        return run.problems
    error = f": {run.facts['error']}" if "error" in run.facts else ""
    last = f", last seen at step {run.facts['steps']:,}" if "steps" in run.facts else ""
    return [f"{run.facts['status']}{error}{last}", *run.problems]


# --- Pictures


def _pictures(runs: list[dict[str, Any]], records: list[RunRecord]) -> dict[str, list[dict[str, Any]] | None]:
    """The newest runs' pictures, up to PICTURES_BYTES: {run: pictures, or None where they are left out}.

    A file that can't be read is among the run's problems.
    """
    left = PICTURES_BYTES
    found: dict[str, list[dict[str, Any]] | None] = {}
    by_age = sorted(zip(runs, records, strict=True), key=lambda pair: pair[0]["values"]["began"] or "")
    for shown, run in reversed(by_age):
        # plots/ without the curves, which the page draws itself, and what validate.py has drawn
        files = [file for file in own_files(run.folder, "plots/*.png") if file.name != "curves.png"]
        files = sorted([*files, *own_files(run.folder, "validation/*/*.png")], key=natural)
        pictures: list[dict[str, Any]] = []
        for file in files if left > 0 else ():
            name, written = str(file.relative_to(run.folder)), io.BytesIO()
            try:
                pixels = read_picture(file)
            except ValueError as error:
                run.problems.append(f"{name} {error}")
                shown["values"]["problems"] = len(run.problems)
                continue
            pixels.thumbnail((PICTURE_PX, PICTURE_PX))
            pixels.save(written, "PNG")  # of the file, nothing but its pixels gets into the page
            source = f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"
            picture = {"name": name, "text": _text(run, name), "source": source}
            pictures.append(picture | {"width": pixels.width, "height": pixels.height})
        found[shown["name"]] = None if files and left <= 0 else pictures
        left -= sum(len(picture["source"]) for picture in pictures)
    return found


def _text(run: RunRecord, name: str) -> str:
    """Describes a picture: of a confusion matrix how many are right, and which classes are confused."""
    stem, parts = Path(name).stem, Path(name).parts
    found = run.confusion if parts[0] == "plots" else run.reports.get(parts[1], {})
    if stem != "confusion" or "confusion" not in found:
        return TEXTS.get(stem, f"The picture {name}")
    matrix, classes = found["confusion"], found["classes"]
    cells = ((count, i, j) for i, row in enumerate(matrix) for j, count in enumerate(row) if i != j and count)
    most = heapq.nsmallest(CONFUSIONS, cells, key=lambda cell: (-cell[0], *cell[1:]))
    named = [f"{classes[i]} taken for {classes[j]}, {count:,}" for count, i, j in most]
    right, total = sum(row[i] for i, row in enumerate(matrix)), sum(map(sum, matrix))
    text = f"Confusion matrix of {plural(len(classes), 'class')}: {right:,} of {total:,} are right"
    return f"{text}; most often {'; '.join(named)}" if named else text
