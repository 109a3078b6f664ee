"""The model card of an exported model: a README.md as the hub shows it."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from tools.logbook.markdown import block, code, table, text
from tools.logbook.record import RunRecord

if TYPE_CHECKING:  # a tool knows no other
    from tools.inference.exported import Exported

TO_FILL_IN = "not said: fill it in"
MOST_CLASSES = 100  # with a row each

IN_TIMM = """import timm

model = timm.create_model("local-dir:{name}", pretrained=True).eval()   # or "hf-hub:OWNER/NAME"
prepare = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
logits = model(prepare(image)[None])   # image: of PIL, in RGB"""
IN_TORCH = """from model import class_names, load, prepare   # in this folder

logits = load()(prepare(image))   # image: of PIL"""


def model_card(name: str, exported: "Exported", about: dict[str, Any]) -> str:
    """Markdown with the hub's metadata. about: config.json."""
    run = _record(exported)
    facts = run.facts if run else {}
    parameters = sum(p.numel() for p in exported.model.parameters())
    how = IN_TIMM.format(name=name) if exported.is_timms else IN_TORCH
    size = exported.recipe.image_size
    head = [
        ("architecture", code(about["architecture"])),
        ("parameters", f"{parameters:,}"),
        ("input", f"{size} x {size} pixels, RGB"),
        ("classes", f"{len(exported.classes):,}"),
        ("trained by", code(f"{exported.script.__name__}.py")),
        ("run, step", f"{code(run.folder.name if run else 'unknown')}, {exported.trained.step:,}"),
        ("commit", code(run.about.get("git_commit", "unknown") if run else "unknown")),
        ("data", text(_name(exported.recipe.data).removeprefix("hub:"))),
        ("licence", TO_FILL_IN),
        ("licence of the data", TO_FILL_IN),
        ("intended use, limits", TO_FILL_IN),
    ]
    recipe = {key: value for key, value in (exported.trained.recipe or {}).items() if value is not None}
    parts = [
        f"---\n{yaml.safe_dump(_metadata(name, exported, facts), sort_keys=False, allow_unicode=True)}---",
        f"# {text(name)}",
        table(("", ""), head, numbers=False),
        "## Use",
        block(how, "python"),
        *_metrics(exported, run),
        "## Recipe",
        table(
            ("flag", "value"), [(code(k), code(_flag(v))) for k, v in sorted(recipe.items())], numbers=False
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _flag(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return ",".join(str(_flag(one)) for one in value)
    return _name(value) if isinstance(value, str) else value


def _name(value: str) -> str:
    """The last part of a path or an address, as the rest may be private; a name of the hub whole."""
    return value if value.startswith(("hub:", "hf-hub:")) else value.rstrip("/").rpartition("/")[2]


def _metadata(name: str, exported: "Exported", facts: dict[str, Any]) -> dict[str, Any]:
    """What the hub reads. Its word for a licence that is not named is `unknown`."""
    about: dict[str, Any] = {
        "license": "unknown",
        "library_name": "timm" if exported.is_timms else "pytorch",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification"],
    }
    if exported.trained.step == facts.get("best_step") and "best_accuracy" in facts:
        is_tested = "test_accuracy" in facts
        accuracy = {"type": "accuracy", "value": facts["test_accuracy" if is_tested else "best_accuracy"]}
        split = facts.get("test_name" if is_tested else "val_name", "val")
        data = dict.fromkeys(("name", "type"), _name(exported.recipe.data).removeprefix("hub:"))
        task = {"type": "image-classification"}
        result = {"task": task, "dataset": data | {"split": split}, "metrics": [accuracy]}
        about["model-index"] = [{"name": name, "results": [result]}]
    return about


def _record(exported: "Exported") -> RunRecord | None:
    """The run on this disk that the model is of."""
    with contextlib.suppress(ValueError, OSError):
        return RunRecord(Path(exported.trained.weights).parents[2])
    return None


def _metrics(exported: "Exported", run: RunRecord | None) -> list[str]:
    """Accuracies, and metrics by class where an evaluation of this step has left a confusion matrix."""
    if run is None:
        return ["## Metrics", "Not known here: the run's folder was not at hand."]
    step, facts, split = exported.trained.step, run.facts, run.facts.get("val_name", "val")
    lines = [line for line in run.evaluations if line.get("step") == step]
    rows = [
        (text(key.removeprefix("val/")), f"{line[key]:.4f}")
        for line in lines
        for key in sorted(line)
        if key.startswith("val/")
    ]
    which = "val"
    if "test_name" in facts and step == facts.get("best_step"):
        which, split = "test", facts["test_name"]
        rows = [(name, f"{facts[f'test_{name}']:.4f}") for name in ("accuracy", "loss")]
    found = ["## Metrics", f"Of step {step:,}, on the {text(split)} split.", table(("metric", "value"), rows)]
    matrices = [report for report in run.reports.values() if report and report.get("split") == which]
    if run.confusion.get("step") == step and ("split" in run.confusion) == (which == "test"):
        matrices.append(run.confusion)
    matrix = next((m["confusion"] for m in matrices if m.get("step", step) == step), None)
    if matrix is None:
        found.append("By class: `validate.py` on this checkpoint writes them; then export again.")
    elif len(matrix) <= MOST_CLASSES:
        found.append(
            table(("class", "precision", "recall", "F1", "images"), _by_class(matrix, exported.classes))
        )
    return found


def _by_class(confusion: list[list[int]], classes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """confusion: a row per true class."""
    counts = np.asarray(confusion, float)
    hits, images, predicted = np.diag(counts), counts.sum(1), counts.sum(0)
    precision = hits / np.maximum(predicted, 1)
    recall = hits / np.maximum(images, 1)
    f1 = 2 * hits / np.maximum(images + predicted, 1)
    columns = zip(classes, precision, recall, f1, images, strict=True)
    return [(text(c), f"{p:.4f}", f"{r:.4f}", f"{f:.4f}", f"{n:,.0f}") for c, p, r, f, n in columns]
