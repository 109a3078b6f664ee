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
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from common.system.files import own_files
from common.system.paths import public_path
from common.system.text import natural, plural, printable
from tools.logbook.comparison import conditions
from tools.logbook.markdown import TEMPLATES, render
from tools.logbook.record import PARTS, RunRecord, read_picture
from tools.logbook.words import as_flag, data, devices, memory_gib, model, utilisation_pct

DIGITS = 6  # significant ones of a number
PICTURE_PX = 900  # largest width and height of a picture
PICTURES_BYTES = 4 * 2**20  # of all pictures in a page: those of the newest runs
LEFT_OUT = f"Left out: a page has {PICTURES_BYTES // 2**20} MiB of pictures, those of its newest runs. "
LEFT_OUT += "A page of fewer runs has them: python logbook.py html RUN ..."
CONFUSIONS = 3  # named in the description of a confusion matrix
# The table: key in a run's values, label, digits after the point (None: text)
COLUMNS: tuple[tuple[str, str, int | None], ...] = (
    ("name", "run", None),
    ("began", "began, UTC", None),
    ("status", "status", None),
    ("problems", "missing or broken files", 0),
    ("model", "model", None),
    ("data", "data", None),
    ("strategy", "strategy", None),
    ("device", "on", None),
    ("hosts", "hosts", 0),
    ("processes", "processes", 0),
    ("batch_size", "batch", 0),
    ("epochs", "epochs", 0),
    ("steps", "steps", 0),
    ("seed", "seed", 0),
    ("test_accuracy", "test accuracy", 4),
    ("final_accuracy", "final accuracy", 4),
    ("best_accuracy", "best accuracy", 4),
    ("final_loss", "final loss", 4),
    ("wall_s", "time, s", 0),
    ("images_per_s", "images/s", 0),
    ("mfu_pct", "MFU, %", 1),
    ("memory_gib", "memory of a process, GiB", 2),
    ("utilisation_pct", "utilisation, %", 0),
    ("energy_wh", "energy of the GPUs, Wh", 1),
)
CHOICES = ("status", "model", "data", "strategy")  # columns with a list of their values as a filter
MEASURES = ("val/accuracy", "val/loss", "train/loss", "val/raw_accuracy", "train/lr", "train/images_per_s")


# --- Finding runs


def find_runs(places: Iterable[Path]) -> tuple[list[Path], list[str]]:
    """The runs' folders at or below the places, in order, and a line for each folder that can't be read.

    ValueError for a place without a run.
    """
    found: dict[Path, Path] = {}
    unread: list[str] = []
    for place in places:
        before = len(unread)
        below = list(_walk(place, unread))
        if not below:
            reasons = unread[before:] or [f"{place} has no run: a run's folder has one of {', '.join(PARTS)}"]
            raise ValueError("; ".join(reasons))
        found |= {folder.resolve(): folder for folder in below}
    return sorted(found.values(), key=natural), unread


def _walk(place: Path, unread: list[str]) -> Iterator[Path]:
    def say(error: OSError) -> None:
        unread.append(f"{public_path(error.filename)} can't be read: {error.strerror}")

    for folder, folders, files in os.walk(place, onerror=say):
        if set(PARTS) & {*folders, *files}:
            folders.clear()  # nothing below a run is another one
            yield Path(folder)


# --- The page


def page(folders: list[Path], unread: Iterable[str] = ()) -> str:
    """The HTML, the same for the same runs. folders: of the runs; unread: lines on unreadable folders."""
    names = _names(folders)
    runs = [_run(RunRecord(folder), name) for folder, name in zip(folders, names, strict=True)]
    _add_pictures(runs, folders)
    columns = [
        {"key": key, "label": label, "digits": digits}
        for key, label, digits in COLUMNS
        if any(run["values"][key] is not None for run in runs)
    ]
    shown = [{key: run[key] for key in ("name", "values", "settings", "curves")} for run in runs]
    content = json.dumps({"columns": columns, "runs": shown}, separators=(",", ":"), allow_nan=False)  # ASCII
    style, script = ((TEMPLATES / f"overview.{kind}").read_text("ascii") for kind in ("css", "js"))
    return render(
        "overview.html.j2",
        columns=columns,
        runs=runs,
        choices=[(column, _choices(runs, column["key"])) for column in columns if column["key"] in CHOICES],
        measures=list(dict.fromkeys(name for run in runs for name in run["curves"])),
        unfinished=sum(run["values"]["status"] != "finished" for run in runs),
        problems=[(run["name"], run["lines"]) for run in runs if run["lines"]]
        + [("a folder", [line]) for line in unread],
        policy=f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:;"
        " base-uri 'none'; form-action 'none'",
        style=Markup(style),
        script=Markup(script),
        data=Markup(content.replace("<", "\\u003c")),  # so it can neither end its element nor begin a comment
    )


def _hash(content: str) -> str:
    return Markup(f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'")


def _choices(runs: list[dict[str, Any]], key: str) -> list[str]:
    return sorted({run["values"][key] or "" for run in runs}, key=natural)


def _names(folders: list[Path]) -> list[str]:
    """The folders' paths below the folder that all have in common."""
    places = [folder.resolve() for folder in folders]
    root = os.path.commonpath([place.parent for place in places]) if places else ""
    return [printable(place.relative_to(root)) for place in places]


def _run(run: RunRecord, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "values": _values(run, name),
        "settings": _settings(run),
        "curves": _curves(run),
        "pictures": [],
        "left_out": "",
        "lines": _problems(run),
        "texts": _texts(run),
    }


def _values(run: RunRecord, name: str) -> dict[str, str | float | None]:
    """The run's cells."""
    facts = run.facts
    wall_s = facts.get("wall_s", run.metrics[-1]["wall_s"] if run.metrics else None)
    starts = [line["t"] for lines in run.telemetry.values() for line in lines[:1]]
    found = {key: facts.get(key) for key, *_ in COLUMNS} | {
        "name": name,
        "began": _date(min(starts, default=None)),
        "problems": len(run.problems) or None,
        "model": model(run),
        "data": data(run),
        "device": "CPU, rehearsal" if run.is_rehearsal else devices(run),
        "wall_s": wall_s,
        "memory_gib": memory_gib(run),
        "utilisation_pct": utilisation_pct(run)[0],
    }
    return {
        key: printable(value) if isinstance(value, str) else _short(value) for key, value in found.items()
    }


def _date(seconds: float | None) -> str | None:
    try:
        return None if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError, OSError):  # no date of this calendar
        return None


def _settings(run: RunRecord) -> dict[str, str]:
    """The recipe, and what else a comparison of runs would name."""
    found = conditions(run)
    found |= {f"sharding: {name}": as_flag(value) for name, value in run.about.get("sharding", {}).items()}
    return {printable(name): printable(value) for name, value in found.items()}


def _problems(run: RunRecord) -> list[str]:
    """Why the run is not finished, and which of its files are missing or broken."""
    status, error = run.facts["status"], run.facts.get("error")
    lines = [] if status == "finished" else [status + (f": {error}" if error else "")]
    if lines and "steps" in run.facts:
        lines[0] += f", last seen at step {run.facts['steps']:,}"
    return [printable(line) for line in (*lines, *run.problems)]


# --- Curves


def _curves(run: RunRecord) -> dict[str, dict[str, list[float]]]:
    """The curve of each measure in metrics.jsonl: step, epoch, time in seconds and value of its points."""
    names = {name for line in run.metrics for name in line if "/" in name}
    ordered = [name for name in MEASURES if name in names] + sorted(names - set(MEASURES))
    return {printable(name): _curve([line for line in run.metrics if name in line], name) for name in ordered}


def _curve(lines: list[dict[str, Any]], name: str) -> dict[str, list[float]]:
    columns = {"step": "step", "epoch": "epoch", "time": "wall_s", "value": name}
    return {column: [_short(line[key]) for line in lines] for column, key in columns.items()}


def _short(value: Any) -> Any:
    """The number with DIGITS significant digits; whole ones as they are."""
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


# --- Pictures


def _add_pictures(runs: list[dict[str, Any]], folders: list[Path]) -> None:
    """Adds the newest runs' pictures, up to PICTURES_BYTES. What can't be read is among the run's lines."""
    left = PICTURES_BYTES
    by_age = sorted(zip(runs, folders, strict=True), key=lambda pair: pair[0]["values"]["began"] or "")
    for run, folder in reversed(by_age):
        texts, files = run["texts"], _files(folder)
        if left <= 0 and files:
            run["left_out"] = LEFT_OUT
            continue
        for file in files:
            name = printable(file.relative_to(folder))
            try:
                picture = _picture(file)
            except ValueError as error:
                run["lines"].append(f"{name} {printable(error)}")
                run["values"]["problems"] = 1 + (run["values"]["problems"] or 0)
                continue
            run["pictures"].append(picture | {"name": name, "text": texts.get(name) or _kind(name)})
            left -= len(picture["source"])


def _files(folder: Path) -> list[Path]:
    """plots/ without the curves, which the page draws itself, and what validate.py has drawn."""
    plots = [file for file in own_files(folder, "plots/*.png") if file.name != "curves.png"]
    return sorted([*plots, *own_files(folder, "validation/*/*.png")], key=natural)


def _picture(file: Path) -> dict[str, Any]:
    """The picture; of the file, nothing but its pixels gets into the page. ValueError for no PNG."""
    pixels, written = read_picture(file), io.BytesIO()
    pixels.thumbnail((PICTURE_PX, PICTURE_PX))
    pixels.save(written, "PNG")
    source = f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"
    return {"source": source, "width": pixels.width, "height": pixels.height}


def _kind(name: str) -> str:
    """A description of a picture, for those who do not see it."""
    kinds = {"predictions": "Images with the predicted and the true class", "confusion": "Confusion matrix"}
    kinds |= {"worst": "The mistakes that the model was surest of"}
    return kinds.get(Path(name).stem, f"The picture {name}")


def _texts(run: RunRecord) -> dict[str, str]:
    """Descriptions of the confusion matrices, by file: how many are right, which classes are confused."""
    found = {"plots/confusion.png": run.confusion}
    found |= {f"validation/{name}/confusion.png": report for name, report in run.reports.items()}
    return {
        printable(name): _confusions(content["confusion"], content["classes"])
        for name, content in found.items()
        if "confusion" in content
    }


def _confusions(matrix: list[list[int]], classes: list[str]) -> str:
    cells = ((count, i, j) for i, row in enumerate(matrix) for j, count in enumerate(row) if i != j and count)
    most = heapq.nsmallest(CONFUSIONS, cells, key=lambda cell: (-cell[0], *cell[1:]))
    named = [f"{printable(classes[i])} taken for {printable(classes[j])}, {count:,}" for count, i, j in most]
    right, whole = sum(row[i] for i, row in enumerate(matrix)), sum(map(sum, matrix))
    text = f"Confusion matrix of {plural(len(classes), 'class')}: {right:,} of {whole:,} are right"
    return f"{text}; most often {'; '.join(named)}" if named else text
