"""Compute the metrics of validate.py, print them and write the report's files."""

import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from onecurve.data.names import NameOf
from onecurve.system.files import write_csv, write_text
from onecurve.system.paths import ROOT
from onecurve.upstream.packages_ import import_evaluate

METRICS = ("classification", "top_k", "calibration")  # modules in tools/inference/metrics/
TOP, BINS, WORST = 5, 15, 24
TIMED = 1000  # fewest images for which the throughput is shown, because decoders need time to start
PRINTED_CLASSES = 20  # largest number of classes for which all classes and the confusion matrix are printed
WORST_CLASSES = 10  # number of classes printed if there are more than PRINTED_CLASSES
NAME = 24  # number of characters printed of a class name
PER_CLASS = ("precision", "recall", "f1", "specificity", "support")
FILES = ("worst.png", "confusion.png", "predictions.csv", "report.json")
COLUMNS = ("id", "file", "label", "predicted", "probability")  # columns of predictions.csv, keys of "worst"

Rows = dict[str, np.ndarray]  # id, label, predicted, loss and probability [n] and top [n, k] of n images


def measure(rows: Rows, name_of: NameOf, classes: int, scratch: Path) -> dict[str, Any]:
    """Compute the report's metrics with the modules in tools/inference/metrics/.

    Args:
        rows: predictions; rows["id"] contains positions in the stored split.
        name_of: maps a position in the stored split to the image's file name.
        classes: number of classes.
        scratch: folder for the metrics modules.
    """
    classification, top_k, calibration = load_metrics(scratch)
    pairs = {"predictions": rows["predicted"], "references": rows["label"]}
    by_class = classification.compute(**pairs, classes=classes)
    confusion = {"confusion": by_class["confusion"]} if "confusion" in by_class else {}
    if not confusion:
        from onecurve.run.evaluation import frequent_mistakes  # imports torch

        confusion = {"mistakes": frequent_mistakes(rows["label"], rows["predicted"], classes)}
    mistakes = np.flatnonzero(rows["predicted"] != rows["label"])
    worst = mistakes[np.argsort(-rows["probability"][mistakes], kind="stable")][:WORST]
    return {
        "images": len(rows["id"]),
        "loss": float(rows["loss"].mean()),
        "top1": by_class["accuracy"],
        "top5": top_k.compute(predictions=rows["top"], references=rows["label"])["top_k"],
        **calibration.compute(**pairs, probabilities=rows["probability"], bins=BINS),
        "per_class": {name: by_class[name] for name in PER_CLASS},
        **confusion,
        "worst": [dict(zip(COLUMNS, cells, strict=True)) for cells in _images(rows, name_of, worst)],
    }


def _images(
    rows: Rows, name_of: NameOf, selected: np.ndarray | slice = slice(None)
) -> Iterator[tuple[Any, ...]]:
    """Yield the values in COLUMNS for each selected row."""
    columns = [rows[name][selected].tolist() for name in COLUMNS if name != "file"]
    for position, *cells in zip(*columns, strict=True):
        yield position, name_of(position), *cells


def load_metrics(scratch: Path) -> list[Any]:
    """Load the modules in METRICS. The package `evaluate` imports copies, which it writes to `scratch`."""
    evaluate = import_evaluate(scratch)
    paths, options = (
        (ROOT / "tools" / "inference" / "metrics" / name for name in METRICS),
        {"cache_dir": str(scratch)},
    )
    return [evaluate.load(str(path), keep_in_memory=True, **options) for path in paths]


def write_report(
    folder: Path, summary: dict[str, Any], rows: Rows, name_of: NameOf, worst: np.ndarray, title: str
) -> None:
    """Write all FILES, each atomically. `worst` contains the worst mistakes as uint8 [n, H, W, 3]."""
    from onecurve.run import plots

    classes = summary["classes"]
    captions = []
    for image in summary["worst"]:
        name = plots.file_caption(image["file"]) or f"id {image['id']}"
        label, guess = classes[image["label"]], classes[image["predicted"]]
        captions.append(f"{name}\n{plots.prediction_caption(label, guess, image['probability'])}")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".half-", dir=folder) as part:
        worst_png, confusion_png, predictions_csv, report_json = (Path(part) / name for name in FILES)
        plots.image_sheet(worst_png, worst, captions, f"{title}: most confident mistakes")
        headline = f"{title}: top-1 {summary['top1']:.4f}"
        plots.confusion(confusion_png, summary, headline)
        cells = (
            (i, file, classes[label], classes[guess], f"{p:.6f}")
            for i, file, label, guess, p in _images(rows, name_of)
        )
        write_csv(predictions_csv, [COLUMNS, *cells])
        # Write one key per line. Indenting a confusion matrix of 1,000 classes would take a million lines.
        lines = [f'"{key}": {json.dumps(value)}' for key, value in summary.items()]
        write_text(report_json, "{\n" + ",\n".join(lines) + "\n}\n")
        for name in FILES:
            (Path(part) / name).replace(folder / name)


def print_report(summary: dict[str, Any], title: str) -> None:
    """Print the metrics, all or only the worst classes, and the confusion matrix if it fits."""
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    classes, per_class = [name[:NAME] for name in summary["classes"]], summary["per_class"]
    figures = [
        ("images", f"{summary['images']:,}"),
        ("top-1 accuracy", f"{summary['top1']:.4f}"),
        ("top-5 accuracy", f"{summary['top5']:.4f}"),
        ("loss", f"{summary['loss']:.4f}"),
        ("expected calibration error", f"{summary['expected_calibration_error']:.4f}"),
        ("preprocessing", preprocessing_text(summary)),
        *[("throughput", f"{summary['images_per_s']:,.0f} images/s")] * (summary["images"] >= TIMED),
        ("processes", f"{summary['processes']} x {summary['device']}"),
    ]
    console.print(rich_table(title, ["metric", "value"], figures))
    shows_all = len(classes) <= PRINTED_CLASSES
    with_images = [c for c, images in enumerate(per_class["support"]) if images]
    by_f1 = sorted(with_images, key=lambda c: per_class["f1"][c])
    rows = [
        (classes[c], *(f"{per_class[name][c]:{',' if name == 'support' else '.4f'}}" for name in PER_CLASS))
        for c in (range(len(classes)) if shows_all else by_f1[:WORST_CLASSES])
    ]
    heading = "metrics by class" if shows_all else f"the {len(rows)} classes with the lowest F1"
    console.print(rich_table(heading, ["class", *PER_CLASS], rows))
    if mistakes := summary.get("mistakes"):
        pairs = [(classes[true], classes[guess], f"{count:,}") for true, guess, count in mistakes]
        console.print(rich_table("most frequent mistakes", ["true", "predicted", "images"], pairs))
    if not shows_all:
        return
    counts = [(f"{c} {classes[c]}", *map(str, row)) for c, row in enumerate(summary["confusion"])]
    matrix = rich_table(
        "confusion matrix, one row per true class", ["true", *map(str, range(len(classes)))], counts
    )
    if console.measure(matrix, options=console.options.update(max_width=10_000)).maximum <= console.width:
        console.print(matrix)


def preprocessing_text(summary: dict[str, Any]) -> str:
    """Describe how images are converted to the model's inputs."""
    preprocessing = summary["preprocessing"]
    crop = (
        f"crop {preprocessing['crop_pct']:g} {preprocessing['crop_mode']}" if summary["cropped"] else "whole"
    )
    return f"{preprocessing['image_size']} pixels, {preprocessing['interpolation']}, {crop}"


def rich_table(title: str, columns: list[str], rows: Iterable[tuple[str, ...]]) -> Any:
    """Return a table of the package rich. All columns except the first are aligned to the right."""
    from rich import box
    from rich.table import Column, Table

    numbers = (Column(name, justify="right", no_wrap=True) for name in columns[1:])
    table = Table(columns[0], *numbers, title=title, box=box.SIMPLE, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return table
