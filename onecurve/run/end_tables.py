"""Prints the results and the weight files at the end of a run."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from onecurve.checkpoint.format import EMA_FILE, MODEL_FILE, step_name
from onecurve.flags.recipe import METRICS
from onecurve.run.schemas import RecipeFile, Result
from onecurve.run.starts import hardware_in_words
from onecurve.system.files import read_json, read_lines
from onecurve.system.paths import ROOT, python_command, shortest

if TYPE_CHECKING:  # Imported lazily at runtime
    from rich.table import Table

# Minimum number of steps for printing a run's speed. The first few steps are slow
MIN_TIMED_STEPS = 10


class _WeightFile(NamedTuple):
    """Row of the table of weight files."""

    path: Path
    metric_value: float | None  # Validation metric of --best_by, None if these weights were not evaluated
    description: str


def print_result(folder: Path, chance_accuracy: float | None) -> None:
    """Print a finished run's results, weight files, suggested commands and output files.

    Args:
        folder: Folder of the run.
        chance_accuracy: Share of the largest class in the evaluated images, or None if it is unknown.
    """
    from rich.console import Console

    result = cast(Result, read_json(folder / "result.json"))
    recipe_file = cast(RecipeFile, read_json(folder / "recipe.json"))
    log_entries = read_lines(folder / "metrics.jsonl")
    console = Console(markup=False, highlight=False)
    table_title = f"{result['script']}, {hardware_in_words(folder, result)}"
    console.print(_result_table(table_title, result, recipe_file["unit"], chance_accuracy))
    weight_table, recommended_file = _weight_table(folder, result, log_entries)
    console.print(weight_table)
    if result["best_accuracy"] is not None:  # The model has classes
        # Commands that receive a folder use the averaged weights. If the raw weights are better, print the
        # path of the raw weight file.
        is_raw_best = recommended_file.name == MODEL_FILE and recommended_file.with_name(EMA_FILE).exists()
        best_path = recommended_file if is_raw_best else folder
        validate_script, export_script = (shortest(ROOT / script) for script in ("validate.py", "export.py"))
        commands = {"measure all metrics of the best checkpoint": python_command(validate_script, best_path)}
        if result["best_checkpoint"] != result["checkpoint"]:
            validate_command = python_command(validate_script, folder, "--which", "latest")
            commands["measure all metrics of the last checkpoint"] = validate_command
        export_command = python_command(export_script, best_path, f"models/{folder.name}")
        commands["export the model for use elsewhere"] = export_command
        for purpose, command in commands.items():
            console.print(f"{purpose}: {command}", soft_wrap=True)
    plot_files = sorted((folder / "plots").glob("*.png"))
    for output_file in (recommended_file, *plot_files, folder / "metrics.jsonl", folder / "result.json"):
        console.print(f"{output_file}", soft_wrap=True)


def confidence_interval(fraction: float, sample_count: int) -> tuple[float, float]:
    """Return the 95 % confidence interval (Wilson 1927) of a fraction measured on `sample_count` samples."""
    z = 1.96  # Quantile of the normal distribution for 95 %
    weight = z**2 / sample_count
    centre = fraction + weight / 2
    half_width = math.sqrt(weight * (fraction * (1 - fraction) + weight / 4))
    return (centre - half_width) / (1 + weight), (centre + half_width) / (1 + weight)


def _result_table(title: str, result: Mapping[str, Any], unit: str, chance_accuracy: float | None) -> "Table":
    """Return a table with a run's metrics, speed and memory use.

    `result` is the content of result.json, and `unit` is the plural name of the samples.
    """
    from rich.table import Table

    result_table = Table("quantity", title=title)
    result_table.add_column("value", justify="right")
    best_by, val_name, test_name = result["best_by"], result["val_name"], result.get("test_name")
    best_metric = result[f"best_{best_by}"]
    final_metrics = [metric for metric in (best_by, "accuracy") if result[f"final_{metric}"] is not None]
    speed_row = {}
    if result["steps"] >= MIN_TIMED_STEPS:
        speed_row["speed"] = f"{result['images_per_s']:,.0f} {unit}/s"
    table_rows: dict[str, str] = {}  # {quantity: formatted value}
    if early_end_cause := result.get("stopped_by"):
        table_rows[f"ended early by {early_end_cause}"] = (
            f"step {result['steps']:,} of {result['total_steps']:,}"
        )
    if test_name:
        table_rows[f"{best_by} of the best weights ({test_name} split)"] = f"{result[f'test_{best_by}']:.4f}"
        table_rows[f"{test_name} {unit}"] = f"{result['test_images']:,}"
    table_rows |= {
        f"best {best_by} ({val_name} split)": f"{best_metric:.4f} at step {result['best_step']:,}",
        **{f"final {name} ({val_name} split)": f"{result[f'final_{name}']:.4f}" for name in final_metrics},
        f"{val_name} {unit}": f"{result['val_images']:,}",
        **_accuracy_rows(result, chance_accuracy),
        "parameters": f"{result['parameters']:,}",
        "training time": f"{result['train_s']:.1f} s",
        "mean training time per epoch": f"{result['epoch_s'] or 0.0:.2f} s",
        "total time": f"{result['wall_s']:.1f} s",
        **speed_row,
        "peak memory per process": f"{result['peak_memory_gib']:.2f} GiB",
    }
    for quantity, formatted_value in table_rows.items():
        result_table.add_row(quantity, formatted_value)
    return result_table


def _accuracy_rows(result: Mapping[str, Any], chance_accuracy: float | None) -> dict[str, str]:
    """Return table rows with the accuracy's confidence interval and the chance level.

    The accuracy belongs to the test split or, without a test split, to the best evaluation.
    """
    stage, image_count_key = ("test", "test_images") if result.get("test_name") else ("best", "val_images")
    accuracy, image_count = result.get(f"{stage}_accuracy"), result[image_count_key]
    if accuracy is None or not image_count:
        return {}
    lower_bound, upper_bound = confidence_interval(accuracy, image_count)
    rows = {f"95 % confidence interval of the {stage} accuracy": f"{lower_bound:.4f} to {upper_bound:.4f}"}
    if chance_accuracy is not None:
        rows["chance level (share of the largest class)"] = f"{chance_accuracy:.4f}"
    return rows


def _weight_table(
    folder: Path, result: Mapping[str, Any], log_entries: list[dict[str, Any]]
) -> tuple["Table", Path]:
    """Return a table of the weight files, and the recommended weight file's path.

    The recommended file belongs to the best checkpoint, or to the newest checkpoint if the best one is stored
    only in S3. The recommended file contains the EMA, unless the same step's raw weights were better.
    """
    from rich.table import Table

    best_by, split = result["best_by"], result["val_name"]
    best_checkpoint, last_checkpoint = result["best_checkpoint"], result["checkpoint"]
    evaluation_by_checkpoint = {  # {name of the step's checkpoint: log line of the step's evaluation}
        step_name(entry["step"]): entry for entry in log_entries if "val/loss" in entry
    }
    weight_files: list[_WeightFile] = []
    for checkpoint in dict.fromkeys((best_checkpoint, last_checkpoint)):
        evaluation = evaluation_by_checkpoint.get(Path(checkpoint).name, {})
        metric_value, raw_metric = evaluation.get(f"val/{best_by}"), evaluation.get(f"val/raw_{best_by}")
        checkpoint_description = (
            f"best {best_by} on the {split} split" if checkpoint == best_checkpoint else "the last step"
        )
        checkpoint_description += " and last step" if best_checkpoint == last_checkpoint else ""
        ema_file, model_file = (folder / checkpoint / file_name for file_name in (EMA_FILE, MODEL_FILE))
        if ema_file.exists():
            weight_files.append(
                _WeightFile(ema_file, metric_value, f"averaged weights (EMA), {checkpoint_description}")
            )
            raw_description = "raw weights (without EMA) of the same step"
            weight_files.append(_WeightFile(model_file, raw_metric, raw_description))
        elif model_file.exists():
            weight_files.append(_WeightFile(model_file, metric_value, checkpoint_description))
    score_sign = 1 if METRICS[best_by].is_share else -1  # A loss is better if it is lower
    # Only the files in the first row's checkpoint are candidates. A file without a metric is the last choice.
    score_by_path = {
        weight_path: -math.inf if metric_value is None else score_sign * metric_value
        for weight_path, metric_value, _ in weight_files
        if weight_path.parent == weight_files[0].path.parent
    }
    recommended_file = max(score_by_path, key=score_by_path.__getitem__)
    table = Table(title="weight files, with the recommended file marked")
    table.add_column("file in checkpoints/", no_wrap=True)
    table.add_column(best_by, justify="right")
    table.add_column("contents")
    for weight_path, metric_value, contents in weight_files:
        use_marker = "use this: " if weight_path == recommended_file else ""
        metric_text = "-" if metric_value is None else f"{metric_value:.4f}"
        table.add_row(f"{weight_path.parent.name}/{weight_path.name}", metric_text, use_marker + contents)
    return table, recommended_file


def early_end_in_words(result_entries: Mapping[str, Any]) -> str:
    """Describe an early end with a phrase such as `ended at step 20 of 58 because of --max_steps 20`.

    The phrase is empty for a complete run and for an unfinished run.
    """
    early_end_cause = result_entries.get("stopped_by")
    if not {"steps", "total_steps"} <= result_entries.keys() or not early_end_cause:
        return ""
    end_step, total_steps = result_entries["steps"], result_entries["total_steps"]
    return f"ended at step {end_step:,} of {total_steps:,} because of {early_end_cause}"
