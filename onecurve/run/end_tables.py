"""Prints tables at the end of a run: results, weight files, and the weight file to use."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from onecurve.checkpoint.format import EMA_FILE, MODEL_FILE, step_name
from onecurve.flags.recipe import METRICS
from onecurve.run.schemas import RecipeFile, Result
from onecurve.run.starts import where_in_words
from onecurve.system.files import read_json, read_lines
from onecurve.system.paths import ROOT, python_command, shortest

if TYPE_CHECKING:  # at runtime, imported lazily
    from rich.table import Table

TIMED_STEPS = 10  # shorter runs show no speed, because the first steps are slow


def print_result(folder: Path, chance: float | None) -> None:
    """Print result.json, the weight files and the output paths. `chance`: share of the largest class."""
    from rich.console import Console

    result = cast(Result, read_json(folder / "result.json"))
    record = cast(RecipeFile, read_json(folder / "recipe.json"))
    lines = read_lines(folder / "metrics.jsonl")
    console = Console(markup=False, highlight=False)
    title = f"{result['script']}, {where_in_words(folder, result)}"
    console.print(_results(title, result, record["unit"], chance))
    table, file = _weights(folder, result, lines)
    console.print(table)
    if result["best_accuracy"] is not None:
        # Commands use the averaged weights in a folder. Name the file if the raw weights are better.
        best = file if file.name == MODEL_FILE and file.with_name(EMA_FILE).exists() else folder
        validate, export = (shortest(ROOT / name) for name in ("validate.py", "export.py"))
        commands = {"all metrics of the best checkpoint": python_command(validate, best)}
        if result["best_checkpoint"] != result["checkpoint"]:
            commands["all metrics of the last checkpoint"] = python_command(
                validate, folder, "--which", "latest"
            )
        commands["export for use elsewhere"] = python_command(export, best, f"models/{folder.name}")
        for purpose, command in commands.items():
            console.print(f"{purpose}: {command}", soft_wrap=True)
    plots = sorted((folder / "plots").glob("*.png"))
    for path in (file, *plots, folder / "metrics.jsonl", folder / "result.json"):
        console.print(f"{path}", soft_wrap=True)


def interval(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a fraction of `count` samples (score interval, Wilson 1927)."""
    square = 1.96**2 / count
    centre, half = share + square / 2, math.sqrt(square * (share * (1 - share) + square / 4))
    return (centre - half) / (1 + square), (centre + half) / (1 + square)


def _results(title: str, result: Mapping[str, Any], unit: str, chance: float | None) -> "Table":
    from rich.table import Table

    table = Table("quantity", title=title)
    table.add_column("value", justify="right")
    measure, val_name, test_name = result["best_by"], result["val_name"], result.get("test_name")
    best = result[f"best_{measure}"]
    finals = [name for name in (measure, "accuracy") if result[f"final_{name}"] is not None]
    rows: dict[str, str] = {}
    if by := result.get("stopped_by"):
        rows[f"ended early by {by}"] = f"step {result['steps']:,} of {result['total_steps']:,}"
    if test_name:
        rows[f"{measure} of the best weights ({test_name} split)"] = f"{result[f'test_{measure}']:.4f}"
        rows[f"{test_name} {unit}"] = f"{result['test_images']:,}"
    rows |= {
        f"best {measure} ({val_name} split)": f"{best:.4f} at step {result['best_step']:,}",
        **{f"final {name} ({val_name} split)": f"{result[f'final_{name}']:.4f}" for name in finals},
        f"{val_name} {unit}": f"{result['val_images']:,}",
        **_luck(result, chance),
        "parameters": f"{result['parameters']:,}",
        "training time": f"{result['train_s']:.1f} s",
        "mean training time per epoch": f"{result['epoch_s'] or 0.0:.2f} s",
        "total time": f"{result['wall_s']:.1f} s",
        **({"speed": f"{result['images_per_s']:,.0f} {unit}/s"} if result["steps"] >= TIMED_STEPS else {}),
        "peak memory per process": f"{result['peak_memory_gib']:.2f} GiB",
    }
    for row in rows.items():
        table.add_row(*row)
    return table


def _luck(result: Mapping[str, Any], chance: float | None) -> dict[str, str]:
    """Return rows that put an accuracy in context: its confidence interval and the chance-level accuracy."""
    split, images = ("test", "test_images") if result.get("test_name") else ("best", "val_images")
    accuracy, count = result.get(f"{split}_accuracy"), result[images]
    if accuracy is None or not count:
        return {}
    low, high = interval(accuracy, count)
    rows = {f"95 % interval of the {split} accuracy": f"{low:.4f} to {high:.4f}"}
    return rows if chance is None else rows | {"chance: share of the largest class": f"{chance:.4f}"}


def _weights(folder: Path, result: Mapping[str, Any], lines: list[dict[str, Any]]) -> tuple["Table", Path]:
    """Return a table of the weight files with their metrics and purposes, and the file to use.

    The file to use comes from the best checkpoint, or from the newest checkpoint if the best one is only in
    S3. The file contains the EMA, unless the raw weights of the same step were better.
    """
    from rich.table import Table

    measure, split = result["best_by"], result["val_name"]
    best, last = result["best_checkpoint"], result["checkpoint"]
    at_step = {step_name(line["step"]): line for line in lines if "val/loss" in line}
    rows: list[tuple[Path, float | None, str]] = []
    for checkpoint in dict.fromkeys((best, last)):
        line = at_step.get(Path(checkpoint).name, {})
        reason = f"best {measure} on the {split} split" if checkpoint == best else "the last step"
        reason += " and last step" if best == last else ""
        ema, model = (folder / checkpoint / name for name in (EMA_FILE, MODEL_FILE))
        if ema.exists():
            rows.append((ema, line.get(f"val/{measure}"), f"averaged weights (EMA), {reason}"))
            rows.append((model, line.get(f"val/raw_{measure}"), "raw weights (no EMA) of the same step"))
        elif model.exists():
            rows.append((model, line.get(f"val/{measure}"), reason))
    sign = 1 if METRICS[measure].is_share else -1
    candidates = [row for row in rows if row[0].parent == rows[0][0].parent]
    to_use = max(candidates, key=lambda row: -math.inf if row[1] is None else sign * row[1])[0]
    table = Table(title="weights: which file to use")
    table.add_column("file in checkpoints/", no_wrap=True)
    table.add_column(measure, justify="right")
    table.add_column("contents")
    for file, value, contents in rows:
        use = "use this: " if file == to_use else ""
        number = "-" if value is None else f"{value:.4f}"
        table.add_row(f"{file.parent.name}/{file.name}", number, use + contents)
    return table, to_use


def early_end(facts: Mapping[str, Any]) -> str:
    """Describe an early end, for example `ended at step 20 of 58, by --max_steps 20`.

    Return an empty string for complete runs and for unfinished runs.
    """
    if not {"steps", "total_steps"} <= facts.keys() or not facts.get("stopped_by"):
        return ""
    return f"ended at step {facts['steps']:,} of {facts['total_steps']:,}, by {facts['stopped_by']}"
