"""Model card for an exported model, which the Hugging Face Hub shows as the model's README.md."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from markupsafe import Markup

from onecurve.checkpoint.format import EMA_FILE, MODEL_FILE, step_name
from tools.logbook.markdown import code_span, render
from tools.logbook.run_record import RunRecord, flag_text, recipe_change

if TYPE_CHECKING:  # tools must not import each other at run time
    from tools.inference.exported import ExportedModel

MAX_CLASS_ROWS = 100  # maximum number of classes for a table with one row per class


def model_card(model_name: str, exported_model: "ExportedModel", config_json: dict[str, Any]) -> str:
    """Return the model card as Markdown with Hub metadata. `config_json` is the content of config.json."""
    trained_run_folder = run_folder(exported_model.trained_model.weights)
    run: RunRecord | None = None
    with contextlib.suppress(ValueError, OSError):  # the card also works without the run's metrics
        run = RunRecord(trained_run_folder) if trained_run_folder else None
    flag_values = (exported_model.trained_model.recipe or {}).items()
    text_by_flag = {flag: flag_text(flag_value) for flag, flag_value in flag_values if flag_value is not None}
    # State the run's data even if --data differs now, because the accuracy was measured on the run's data.
    data_path = text_by_flag.get("data", exported_model.recipe.data)
    data_name = _public_part(data_path).removeprefix("hub:")
    metadata = _hub_metadata(model_name, exported_model, run, data_name)
    recipe_rows = [
        [code_span(flag), code_span(_public_part(text))] for flag, text in sorted(text_by_flag.items())
    ]
    return render(
        "card.md.j2",
        name=model_name,
        metadata=Markup(yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)),
        architecture=config_json["architecture"],
        parameters=sum(parameter.numel() for parameter in exported_model.model.parameters()),
        image_size=exported_model.recipe.image_size,
        classes=len(exported_model.classes),
        script=f"{exported_model.script.__name__}.py",
        run=run,
        step=exported_model.trained_model.step,
        data=data_name,
        is_timm_model=exported_model.is_timm_model,
        recipe_changes=_recipe_changes(run, exported_model.trained_model.step or 0) if run else [],
        recipe=recipe_rows,
        **(_accuracy_values(exported_model, run) if run else {}),
    )


def run_folder(weights_path: str) -> Path | None:
    """Return the run folder that contains the checkpoint, or None if the weights are not in a checkpoint."""
    checkpoints_folder = Path(weights_path).absolute().parent.parent  # of <run>/checkpoints/<step>/<weights>
    return checkpoints_folder.parent if checkpoints_folder.name == "checkpoints" else None


def _raw_accuracy(exported_model: "ExportedModel") -> float | None:
    """Return the accuracy of raw weights that were saved next to an EMA, or None for other weights.

    The run's other results use the EMA.
    """
    weights_file = Path(exported_model.trained_model.weights)
    has_raw_weights = weights_file.name == MODEL_FILE and weights_file.with_name(EMA_FILE).exists()
    return exported_model.trained_model.accuracy if has_raw_weights else None


def _public_part(name_or_path: str) -> str:
    """Return only the last part of a path or URL, because the rest may be private.

    Return Hub names unchanged.
    """
    is_hub_name = name_or_path.startswith(("hub:", "hf-hub:"))
    return name_or_path if is_hub_name else name_or_path.rstrip("/").rpartition("/")[2]


def _recipe_changes(run: RunRecord, exported_step: int) -> list[str]:
    """Return a line for each start before the exported step that changed the recipe."""
    earlier_starts = [start for start in run.kept_starts if start.begin_step < exported_step]
    steps_and_changes = [(start.begin_step, recipe_change(start, _public_part)) for start in earlier_starts]
    return [f"step {first_step:,}: {change}" for first_step, change in steps_and_changes if change]


def _hub_metadata(
    model_name: str, exported_model: "ExportedModel", run: RunRecord | None, data_name: str
) -> dict[str, Any]:
    """Return the model card's metadata.

    The licence is `unknown`. The accuracy is left out if it covers only part of a split.
    """
    result_values = {} if run is None or run.recipe.get("max_val_images") else run.result_values
    metadata: dict[str, Any] = {
        "license": "unknown",
        "library_name": "timm" if exported_model.is_timm_model else "pytorch",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification"],
    }
    # best_accuracy and test_accuracy were measured with the weights of the best step.
    is_best_step = exported_model.trained_model.step == result_values.get("best_step")
    if is_best_step and "best_accuracy" in result_values:
        raw_accuracy = _raw_accuracy(exported_model)
        is_tested = "test_accuracy" in result_values and raw_accuracy is None
        headline_accuracy = result_values["test_accuracy" if is_tested else "best_accuracy"]
        exported_accuracy = headline_accuracy if raw_accuracy is None else raw_accuracy
        metric = {"type": "accuracy", "value": exported_accuracy}
        split_name = result_values.get("test_name" if is_tested else "val_name", "val")
        dataset = {"name": data_name, "type": data_name, "split": split_name}
        hub_result = {"task": {"type": "image-classification"}, "dataset": dataset, "metrics": [metric]}
        metadata["model-index"] = [{"name": model_name, "results": [hub_result]}]
    return metadata


def _accuracy_values(exported_model: "ExportedModel", run: RunRecord) -> dict[str, Any]:
    """Return the values of the template's Metrics section: evaluated images, metrics and class rows.

    The class rows are None unless the run contains a confusion matrix for the exported step.
    """
    step, result_values = exported_model.trained_model.step, run.result_values
    split = "val"  # split on which the model was evaluated
    if (raw_accuracy := _raw_accuracy(exported_model)) is not None:
        metric_rows = [("accuracy", f"{raw_accuracy:.4f}")]
        return {"images": run.describe_evaluated_images(), "measures": metric_rows, "by_class": None}
    evaluations = [evaluation for evaluation in run.evaluations if evaluation["step"] == step]
    logged_values = [item for evaluation in evaluations for item in sorted(evaluation.items())]
    metric_rows = [
        (metric_key.removeprefix("val/"), f"{metric_value:.4f}")
        for metric_key, metric_value in logged_values
        if metric_key.startswith("val/")
    ]
    if "test_name" in result_values and step == result_values.get("best_step"):
        split = "test"
        metric_rows = [(metric, f"{result_values[f'test_{metric}']:.4f}") for metric in ("accuracy", "loss")]
    weights_path = f"{step_name(step or 0)}/{Path(exported_model.trained_model.weights).name}"
    # Prefer validate.py's reports about these weights and all classes to the run's own confusion matrix.
    reports = [report for report in run.validation_reports.values() if not report.get("classes_left_out")]
    reports = [report for report in reports if report.get("checkpoint", "").endswith(weights_path)]
    matrices = [report for report in reports if report.get("split") == split and "confusion" in report]
    is_matrix_of_step = "confusion" in run.confusion and run.confusion.get("step") == step
    # confusion.json contains `split` only for the test split.
    if is_matrix_of_step and ("split" in run.confusion) == (split == "test"):
        matrices.append(run.confusion)
    class_rows = next((_class_rows(matrix["confusion"], matrix["classes"]) for matrix in matrices), None)
    return {"images": run.describe_evaluated_images(split), "measures": metric_rows, "by_class": class_rows}


def _class_rows(confusion_matrix: list[list[int]], class_names: list[str]) -> list[tuple[str, ...]]:
    """Return one row per class, or no rows for more than MAX_CLASS_ROWS.

    Rows of `confusion_matrix` are true classes.
    """
    if len(class_names) > MAX_CLASS_ROWS:
        return []
    image_counts = np.asarray(confusion_matrix, float)
    hits, true_counts, predicted_counts = np.diag(image_counts), image_counts.sum(1), image_counts.sum(0)
    precision = hits / np.maximum(predicted_counts, 1)
    recall = hits / np.maximum(true_counts, 1)
    f1 = 2 * hits / np.maximum(true_counts + predicted_counts, 1)
    scores_and_images = zip(class_names, precision, recall, f1, true_counts, strict=True)
    return [
        (class_name, *(f"{score:.4f}" for score in scores), f"{image_count:,.0f}")
        for class_name, *scores, image_count in scores_and_images
    ]
