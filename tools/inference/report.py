"""Compute and print validate.py's metrics, and write the report files."""

import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from onecurve.data.names import NameLookup
from onecurve.system.files import write_csv, write_text
from onecurve.system.paths import ROOT
from onecurve.upstream.packages_ import import_evaluate

METRICS = ("classification", "top_k", "calibration")  # module names in tools/inference/metrics/
TOP_CLASSES, CALIBRATION_BINS, WORST_IMAGES = 5, 15, 24
TIMED_IMAGES = 1000  # minimum number of images for reporting throughput, because decoders need time to start
PRINTED_CLASSES = 20  # maximum number of classes for which all classes and the confusion matrix are printed
WORST_CLASSES = 10  # number of printed classes if there are more than PRINTED_CLASSES classes
MAX_NAME_CHARACTERS = 24  # maximum number of printed characters in a class name
PER_CLASS = ("precision", "recall", "f1", "specificity", "support")
FILES = ("worst.png", "confusion.png", "predictions.csv", "report.json")
COLUMNS = ("id", "file", "label", "predicted", "probability")  # columns of predictions.csv, keys of "worst"

Rows = dict[str, np.ndarray]  # arrays id, label, predicted, loss and probability [n], and top [n, k]


def measure(rows: Rows, name_of: NameLookup, classes: int, scratch: Path) -> dict[str, Any]:
    """Compute the report's metrics with the modules in tools/inference/metrics/.

    Args:
        rows: Predictions. rows["id"] contains positions in the stored split.
        name_of: Function that maps a position in the stored split to the image's file name.
        classes: Number of classes.
        scratch: Folder for copies of the metric modules.
    """
    classification, top_k, calibration = load_metrics(scratch)
    pairs = {"predictions": rows["predicted"], "references": rows["label"]}
    by_class = classification.compute(**pairs, classes=classes)
    confusion = {"confusion": by_class["confusion"]} if "confusion" in by_class else {}
    if not confusion:
        from onecurve.run.evaluation import frequent_mistakes  # imports torch

        confusion = {"mistakes": frequent_mistakes(rows["label"], rows["predicted"], classes)}
    mistakes = np.flatnonzero(rows["predicted"] != rows["label"])
    worst = mistakes[np.argsort(-rows["probability"][mistakes], kind="stable")][:WORST_IMAGES]
    return {
        "images": len(rows["id"]),
        "loss": float(rows["loss"].mean()),
        "top1": by_class["accuracy"],
        "top5": top_k.compute(predictions=rows["top"], references=rows["label"])["top_k"],
        **calibration.compute(**pairs, probabilities=rows["probability"], bins=CALIBRATION_BINS),
        "per_class": {name: by_class[name] for name in PER_CLASS},
        **confusion,
        "worst": [dict(zip(COLUMNS, cells, strict=True)) for cells in _image_rows(rows, name_of, worst)],
    }


def _image_rows(
    rows: Rows, name_of: NameLookup, selected: np.ndarray | slice = slice(None)
) -> Iterator[tuple[Any, ...]]:
    """Yield one tuple with the values of COLUMNS for each selected row."""
    columns = [rows[name][selected].tolist() for name in COLUMNS if name != "file"]
    for position, *cells in zip(*columns, strict=True):
        yield position, name_of(position), *cells


def load_metrics(scratch: Path) -> list[Any]:
    """Load the modules in METRICS with the `evaluate` package, which copies them to `scratch`."""
    evaluate = import_evaluate(scratch)
    modules = [str(ROOT / "tools" / "inference" / "metrics" / name) for name in METRICS]
    return [evaluate.load(module, keep_in_memory=True, cache_dir=str(scratch)) for module in modules]


def write_report(
    folder: Path, summary: dict[str, Any], rows: Rows, name_of: NameLookup, worst: np.ndarray, title: str
) -> None:
    """Write each file in FILES atomically.

    `worst` contains the worst mistakes' images, uint8 [n, H, W, 3].
    """
    from onecurve.run import plots

    classes = summary["classes"]
    captions = []
    for image in summary["worst"]:
        name = plots.file_caption(image["file"]) or f"id {image['id']}"
        label, predicted_class = classes[image["label"]], classes[image["predicted"]]
        captions.append(f"{name}\n{plots.prediction_caption(label, predicted_class, image['probability'])}")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".half-", dir=folder) as temporary:
        worst_png, confusion_png, predictions_csv, report_json = (Path(temporary) / name for name in FILES)
        plots.draw_image_sheet(worst_png, worst, captions, f"{title}: most confident mistakes")
        headline = f"{title}: top-1 {summary['top1']:.4f}"
        plots.draw_confusion(confusion_png, summary, headline)
        prediction_rows = (
            (image_id, file, classes[label], classes[predicted_class], f"{probability:.6f}")
            for image_id, file, label, predicted_class, probability in _image_rows(rows, name_of)
        )
        write_csv(predictions_csv, [COLUMNS, *prediction_rows])
        # Write one line per key, because json.dumps with indentation writes a million lines for 1,000
        # classes.
        lines = [f'"{key}": {json.dumps(value)}' for key, value in summary.items()]
        write_text(report_json, "{\n" + ",\n".join(lines) + "\n}\n")
        for name in FILES:
            (Path(temporary) / name).replace(folder / name)


def print_report(summary: dict[str, Any], title: str) -> None:
    """Print overall metrics, per-class metrics (all or the worst), and the confusion matrix if it fits."""
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    classes, per_class = [name[:MAX_NAME_CHARACTERS] for name in summary["classes"]], summary["per_class"]
    overview = [
        ("images", f"{summary['images']:,}"),
        ("top-1 accuracy", f"{summary['top1']:.4f}"),
        ("top-5 accuracy", f"{summary['top5']:.4f}"),
        ("loss", f"{summary['loss']:.4f}"),
        ("expected calibration error", f"{summary['expected_calibration_error']:.4f}"),
        ("preprocessing", preprocessing_text(summary)),
        *[("throughput", f"{summary['images_per_s']:,.0f} images/s")] * (summary["images"] >= TIMED_IMAGES),
        ("processes", f"{summary['processes']} x {summary['device']}"),
    ]
    console.print(rich_table(title, ["metric", "value"], overview))
    shows_all = len(classes) <= PRINTED_CLASSES
    with_images = [index for index, images in enumerate(per_class["support"]) if images]
    by_f1 = sorted(with_images, key=lambda index: per_class["f1"][index])
    formats = {name: "{:,}" if name == "support" else "{:.4f}" for name in PER_CLASS}
    rows = [
        (classes[index], *(text.format(per_class[name][index]) for name, text in formats.items()))
        for index in (range(len(classes)) if shows_all else by_f1[:WORST_CLASSES])
    ]
    heading = "metrics by class" if shows_all else f"metrics of the {len(rows)} classes with the lowest F1"
    console.print(rich_table(heading, ["class", *PER_CLASS], rows))
    if mistakes := summary.get("mistakes"):
        pairs = [(classes[true], classes[predicted], f"{count:,}") for true, predicted, count in mistakes]
        console.print(rich_table("most frequently confused classes", ["true", "predicted", "images"], pairs))
    if not shows_all:
        return
    counts = enumerate(summary["confusion"])
    confusion_rows = [(f"{index} {classes[index]}", *map(str, row)) for index, row in counts]
    columns = ["true", *map(str, range(len(classes)))]
    matrix = rich_table("confusion matrix with one row per true class", columns, confusion_rows)
    if console.measure(matrix, options=console.options.update(max_width=10_000)).maximum <= console.width:
        console.print(matrix)


def preprocessing_text(summary: dict[str, Any]) -> str:
    """Return a short description of the model's input preprocessing."""
    preprocessing, crop = summary["preprocessing"], "whole"
    if summary["cropped"]:
        crop = f"crop {preprocessing['crop_pct']:g} {preprocessing['crop_mode']}"
    return f"{preprocessing['image_size']} pixels, {preprocessing['interpolation']}, {crop}"


def rich_table(title: str, columns: list[str], rows: Iterable[tuple[str, ...]]) -> Any:
    """Return a rich Table. All columns except the first are right-aligned."""
    from rich import box
    from rich.table import Column, Table

    right_columns = (Column(name, justify="right", no_wrap=True) for name in columns[1:])
    table = Table(columns[0], *right_columns, title=title, box=box.SIMPLE, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return table
