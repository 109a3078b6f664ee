"""Prints the results and the weight files at the end of a run."""

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

if TYPE_CHECKING:  # Imported lazily at runtime
    from rich.table import Table

# Minimum number of steps for printing a run's speed. The first few steps are slow
TIMED_STEPS = 10


def print_result(folder: Path, chance: float | None) -> None:
    """Print result.json, the weight files and the output paths. `chance` is the chance-level accuracy."""
    from rich.console import Console

    result = cast(Result, read_json(folder / "result.json"))
    recipe_file = cast(RecipeFile, read_json(folder / "recipe.json"))
    entries = read_lines(folder / "metrics.jsonl")
    console = Console(markup=False, highlight=False)
    title = f"{result['script']}, {where_in_words(folder, result)}"
    console.print(_result_table(title, result, recipe_file["unit"], chance))
    weight_table, recommended_file = _weight_table(folder, result, entries)
    console.print(weight_table)
    if result["best_accuracy"] is not None:
        # Commands that receive a folder use the averaged weights. If the raw weights are better, print the
        # path of the raw weight file.
        is_raw_file = recommended_file.name == MODEL_FILE and recommended_file.with_name(EMA_FILE).exists()
        best = recommended_file if is_raw_file else folder
        validate, export = (shortest(ROOT / name) for name in ("validate.py", "export.py"))
        commands = {"measure all metrics of the best checkpoint": python_command(validate, best)}
        if result["best_checkpoint"] != result["checkpoint"]:
            commands["measure all metrics of the last checkpoint"] = python_command(
                validate, folder, "--which", "latest"
            )
        commands["export the model for use elsewhere"] = python_command(export, best, f"models/{folder.name}")
        for purpose, command in commands.items():
            console.print(f"{purpose}: {command}", soft_wrap=True)
    plots = sorted((folder / "plots").glob("*.png"))
    for path in (recommended_file, *plots, folder / "metrics.jsonl", folder / "result.json"):
        console.print(f"{path}", soft_wrap=True)


def confidence_interval(share: float, sample_count: int) -> tuple[float, float]:
    """Return the 95 % confidence interval (Wilson 1927) of a fraction measured on `sample_count` samples."""
    z = 1.96  # Quantile of the normal distribution for 95 %
    weight = z**2 / sample_count
    centre, half_width = share + weight / 2, math.sqrt(weight * (share * (1 - share) + weight / 4))
    return (centre - half_width) / (1 + weight), (centre + half_width) / (1 + weight)


def _result_table(title: str, result: Mapping[str, Any], unit: str, chance: float | None) -> "Table":
    from rich.table import Table

    table = Table("quantity", title=title)
    table.add_column("value", justify="right")
    metric, val_name, test_name = result["best_by"], result["val_name"], result.get("test_name")
    best_value = result[f"best_{metric}"]
    final_metrics = [name for name in (metric, "accuracy") if result[f"final_{name}"] is not None]
    rows: dict[str, str] = {}
    if reason := result.get("stopped_by"):
        rows[f"ended early by {reason}"] = f"step {result['steps']:,} of {result['total_steps']:,}"
    if test_name:
        rows[f"{metric} of the best weights ({test_name} split)"] = f"{result[f'test_{metric}']:.4f}"
        rows[f"{test_name} {unit}"] = f"{result['test_images']:,}"
    rows |= {
        f"best {metric} ({val_name} split)": f"{best_value:.4f} at step {result['best_step']:,}",
        **{f"final {name} ({val_name} split)": f"{result[f'final_{name}']:.4f}" for name in final_metrics},
        f"{val_name} {unit}": f"{result['val_images']:,}",
        **_accuracy_rows(result, chance),
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


def _accuracy_rows(result: Mapping[str, Any], chance: float | None) -> dict[str, str]:
    """Return table rows with the accuracy's confidence interval and the chance level."""
    split, images = ("test", "test_images") if result.get("test_name") else ("best", "val_images")
    accuracy, image_count = result.get(f"{split}_accuracy"), result[images]
    if accuracy is None or not image_count:
        return {}
    lower_bound, upper_bound = confidence_interval(accuracy, image_count)
    rows = {f"95 % confidence interval of the {split} accuracy": f"{lower_bound:.4f} to {upper_bound:.4f}"}
    return rows if chance is None else rows | {"chance level (share of the largest class)": f"{chance:.4f}"}


def _weight_table(
    folder: Path, result: Mapping[str, Any], entries: list[dict[str, Any]]
) -> tuple["Table", Path]:
    """Return a table of the weight files, and the recommended weight file's path.

    The recommended file belongs to the best checkpoint, or to the newest checkpoint if the best one is stored
    only in S3. The recommended file contains the EMA, unless the same step's raw weights were better.
    """
    from rich.table import Table

    metric, split = result["best_by"], result["val_name"]
    best_checkpoint, last_checkpoint = result["best_checkpoint"], result["checkpoint"]
    evaluations = {step_name(entry["step"]): entry for entry in entries if "val/loss" in entry}
    rows: list[tuple[Path, float | None, str]] = []  # (weight file, metric, file contents)
    for checkpoint in dict.fromkeys((best_checkpoint, last_checkpoint)):
        evaluation = evaluations.get(Path(checkpoint).name, {})
        reason = f"best {metric} on the {split} split" if checkpoint == best_checkpoint else "the last step"
        reason += " and last step" if best_checkpoint == last_checkpoint else ""
        ema, model = (folder / checkpoint / name for name in (EMA_FILE, MODEL_FILE))
        if ema.exists():
            rows.append((ema, evaluation.get(f"val/{metric}"), f"averaged weights (EMA), {reason}"))
            rows.append(
                (model, evaluation.get(f"val/raw_{metric}"), "raw weights (without EMA) of the same step")
            )
        elif model.exists():
            rows.append((model, evaluation.get(f"val/{metric}"), reason))
    sign = 1 if METRICS[metric].is_share else -1
    # Only files in the first checkpoint are candidates. A file without a metric is the last choice.
    scores = {
        file: -math.inf if value is None else sign * value
        for file, value, _ in rows
        if file.parent == rows[0][0].parent
    }
    recommended_file = max(scores, key=scores.__getitem__)
    table = Table(title="weight files, with the recommended file marked")
    table.add_column("file in checkpoints/", no_wrap=True)
    table.add_column(metric, justify="right")
    table.add_column("contents")
    for file, value, contents in rows:
        recommendation = "use this: " if file == recommended_file else ""
        shown_value = "-" if value is None else f"{value:.4f}"
        table.add_row(f"{file.parent.name}/{file.name}", shown_value, recommendation + contents)
    return table, recommended_file


def early_end_in_words(facts: Mapping[str, Any]) -> str:
    """Describe an early end with a phrase such as `ended at step 20 of 58 because of --max_steps 20`.

    The phrase is empty for a complete run and for an unfinished run.
    """
    if not {"steps", "total_steps"} <= facts.keys() or not facts.get("stopped_by"):
        return ""
    return f"ended at step {facts['steps']:,} of {facts['total_steps']:,} because of {facts['stopped_by']}"
