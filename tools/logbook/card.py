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
    from tools.inference.exported import Exported

MOST_CLASSES = 100  # maximum number of classes for a table with one row per class


def model_card(name: str, exported: "Exported", config: dict[str, Any]) -> str:
    """Return the model card as Markdown with Hub metadata. `config` is the content of config.json."""
    folder = run_folder(exported.trained.weights)
    run = None
    with contextlib.suppress(ValueError, OSError):
        run = RunRecord(folder) if folder else None
    trained_recipe = (exported.trained.recipe or {}).items()
    recipe = {name: flag_text(value) for name, value in trained_recipe if value is not None}
    # State the run's data even if --data differs now, because the accuracy was measured on the run's data.
    data = _public_name(recipe.get("data", exported.recipe.data)).removeprefix("hub:")
    metadata = _metadata(name, exported, run, data)
    return render(
        "card.md.j2",
        name=name,
        metadata=Markup(yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)),
        architecture=config["architecture"],
        parameters=sum(parameter.numel() for parameter in exported.model.parameters()),
        image_size=exported.recipe.image_size,
        classes=len(exported.classes),
        script=f"{exported.script.__name__}.py",
        run=run,
        step=exported.trained.step,
        data=data,
        is_timm_model=exported.is_timm_model,
        recipe_changes=_recipe_changes(run, exported.trained.step or 0) if run else [],
        recipe=[[code_span(name), code_span(_public_name(recipe[name]))] for name in sorted(recipe)],
        **(_accuracies(exported, run) if run else {}),
    )


def run_folder(weights: str) -> Path | None:
    """Return the run folder that contains the checkpoint, or None if the weights are not in a checkpoint."""
    checkpoints = Path(weights).absolute().parent.parent
    return checkpoints.parent if checkpoints.name == "checkpoints" else None


def _raw_accuracy(exported: "Exported") -> float | None:
    """Return the accuracy of raw weights that were saved next to an EMA, or None for other weights.

    The run's other results use the EMA.
    """
    file = Path(exported.trained.weights)
    is_raw = file.name == MODEL_FILE and file.with_name(EMA_FILE).exists()
    return exported.trained.accuracy if is_raw else None


def _public_name(value: str) -> str:
    """Return only the last part of a path or URL, because the rest may be private.

    Return Hub names unchanged.
    """
    return value if value.startswith(("hub:", "hf-hub:")) else value.rstrip("/").rpartition("/")[2]


def _recipe_changes(run: RunRecord, last: int) -> list[str]:
    """Return a line for each start before step `last` that changed the recipe."""
    starts = [start for start in run.kept if start.first < last]
    changes = [(start.first, recipe_change(start, _public_name)) for start in starts]
    return [f"step {step:,}: {change}" for step, change in changes if change]


def _metadata(name: str, exported: "Exported", run: RunRecord | None, data: str) -> dict[str, Any]:
    """Return the model card's metadata.

    The licence is `unknown`. The accuracy is left out if it covers only part of a split.
    """
    facts = {} if run is None or run.recipe.get("max_val_images") else run.facts
    metadata: dict[str, Any] = {
        "license": "unknown",
        "library_name": "timm" if exported.is_timm_model else "pytorch",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification"],
    }
    if exported.trained.step == facts.get("best_step") and "best_accuracy" in facts:
        raw_accuracy = _raw_accuracy(exported)
        is_tested = "test_accuracy" in facts and raw_accuracy is None
        headline_accuracy = facts["test_accuracy" if is_tested else "best_accuracy"]
        value = headline_accuracy if raw_accuracy is None else raw_accuracy
        accuracy = {"type": "accuracy", "value": value}
        split = facts.get("test_name" if is_tested else "val_name", "val")
        task, dataset = {"type": "image-classification"}, {"name": data, "type": data, "split": split}
        result = {"task": task, "dataset": dataset, "metrics": [accuracy]}
        metadata["model-index"] = [{"name": name, "results": [result]}]
    return metadata


def _accuracies(exported: "Exported", run: RunRecord) -> dict[str, Any]:
    """Return the accuracies and, if a confusion matrix exists for the model's step, per-class metrics."""
    step, facts, split = exported.trained.step, run.facts, "val"
    if (raw_accuracy := _raw_accuracy(exported)) is not None:
        measures = [("accuracy", f"{raw_accuracy:.4f}")]
        return {"images": run.evaluated_images(), "measures": measures, "by_class": None}
    values = [pair for line in run.evaluations if line["step"] == step for pair in sorted(line.items())]
    measures = [(key[4:], f"{value:.4f}") for key, value in values if key.startswith("val/")]
    if "test_name" in facts and step == facts.get("best_step"):
        split = "test"
        measures = [(name, f"{facts[f'test_{name}']:.4f}") for name in ("accuracy", "loss")]
    weights_path = f"{step_name(step or 0)}/{Path(exported.trained.weights).name}"
    reports = [report for report in run.reports.values() if not report.get("classes_left_out")]
    reports = [report for report in reports if report.get("checkpoint", "").endswith(weights_path)]
    matrices = [report for report in reports if report.get("split") == split and "confusion" in report]
    is_of_step = "confusion" in run.confusion and run.confusion.get("step") == step
    if is_of_step and ("split" in run.confusion) == (split == "test"):
        matrices.append(run.confusion)
    by_class = next((_class_rows(matrix["confusion"], matrix["classes"]) for matrix in matrices), None)
    return {"images": run.evaluated_images(split), "measures": measures, "by_class": by_class}


def _class_rows(confusion: list[list[int]], classes: list[str]) -> list[tuple[str, ...]]:
    """Return one row per class, or no rows for more than MOST_CLASSES.

    Rows of `confusion` are true classes.
    """
    if len(classes) > MOST_CLASSES:
        return []
    counts = np.asarray(confusion, float)
    hits, images, predicted = np.diag(counts), counts.sum(1), counts.sum(0)
    precision = hits / np.maximum(predicted, 1)
    recall = hits / np.maximum(images, 1)
    f1 = 2 * hits / np.maximum(images + predicted, 1)
    rows = zip(classes, precision, recall, f1, images, strict=True)
    return [(name, *(f"{share:.4f}" for share in shares), f"{count:,.0f}") for name, *shares, count in rows]
