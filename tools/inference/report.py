"""The report of validate.py: the metrics of its predictions, their files, and what is printed."""

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
TIMED = 1000  # images: of fewer no speed is shown, as decoders start meanwhile
PRINTED_CLASSES = 20  # the most for which all classes, and if it fits the confusion matrix, are printed
WORST_CLASSES = 10  # printed if there are more classes
NAME = 24  # printed characters of a class's name
PER_CLASS = ("precision", "recall", "f1", "specificity", "support")
FILES = ("worst.png", "confusion.png", "predictions.csv", "report.json")
COLUMNS = (
    "id",
    "file",
    "label",
    "predicted",
    "probability",
)  # in predictions.csv and the report

Rows = dict[str, np.ndarray]  # n images: id, label, predicted, loss, probability [n] each, top [n, k]


def measure(rows: Rows, name_of: NameOf, classes: int, scratch: Path) -> dict[str, Any]:
    """The numbers of the report, computed by the modules in tools/inference/metrics/.

    rows["id"]: the images' numbers in the stored split, of which name_of returns their files' names.
    """
    classification, top_k, calibration = load_metrics(scratch)
    pairs = {"predictions": rows["predicted"], "references": rows["label"]}
    by_class = classification.compute(**pairs, classes=classes)
    confusion = {"confusion": by_class["confusion"]} if "confusion" in by_class else {}
    if not confusion:
        from onecurve.run.evaluation import frequent_mistakes  # imports torch

        confusion = {"mistakes": frequent_mistakes(rows["label"], rows["predicted"], classes)}
    wrong = np.flatnonzero(rows["predicted"] != rows["label"])
    surest = wrong[np.argsort(-rows["probability"][wrong], kind="stable")][:WORST]
    return {
        "images": len(rows["id"]),
        "loss": float(rows["loss"].mean()),
        "top1": by_class["accuracy"],
        "top5": top_k.compute(predictions=rows["top"], references=rows["label"])["top_k"],
        **calibration.compute(**pairs, probabilities=rows["probability"], bins=BINS),
        "per_class": {name: by_class[name] for name in PER_CLASS},
        **confusion,
        "worst": [dict(zip(COLUMNS, cells, strict=True)) for cells in _images(rows, name_of, surest)],
    }


def _images(rows: Rows, name_of: NameOf, at: np.ndarray | slice = slice(None)) -> Iterator[tuple[Any, ...]]:
    """Yield the COLUMNS of the images in these rows."""
    columns = [rows[name][at].tolist() for name in COLUMNS if name != "file"]
    for number, *others in zip(*columns, strict=True):
        yield number, name_of(number), *others


def load_metrics(scratch: Path) -> list[Any]:
    """Return the modules METRICS. `evaluate` imports copies, which it writes to `scratch`."""
    evaluate = import_evaluate(scratch)
    paths, options = (
        (ROOT / "tools" / "inference" / "metrics" / name for name in METRICS),
        {"cache_dir": str(scratch)},
    )
    return [evaluate.load(str(path), keep_in_memory=True, **options) for path in paths]


def write_report(
    folder: Path, found: dict[str, Any], rows: Rows, name_of: NameOf, worst: np.ndarray, title: str
) -> None:
    """Writes all FILES, each atomically. worst: uint8 [n, H, W, 3]."""
    from onecurve.run import plots

    classes = found["classes"]
    captions = []
    for image in found["worst"]:
        name = plots.file_caption(image["file"]) or f"id {image['id']}"
        label, guess = classes[image["label"]], classes[image["predicted"]]
        captions.append(f"{name}\n{plots.prediction_caption(label, guess, image['probability'])}")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".half-", dir=folder) as part:
        worst_png, confusion_png, predictions_csv, report_json = (Path(part) / name for name in FILES)
        plots.image_sheet(worst_png, worst, captions, f"{title}: the surest mistakes")
        headline = f"{title}: top-1 {found['top1']:.4f}"
        plots.confusion(confusion_png, found, headline)
        cells = (
            (i, file, classes[label], classes[guess], f"{p:.6f}")
            for i, file, label, guess, p in _images(rows, name_of)
        )
        write_csv(predictions_csv, [COLUMNS, *cells])
        # A key per line: indented, a confusion matrix of 1,000 classes would have a million lines.
        lines = [f'"{key}": {json.dumps(value)}' for key, value in found.items()]
        write_text(report_json, "{\n" + ",\n".join(lines) + "\n}\n")
        for name in FILES:
            (Path(part) / name).replace(folder / name)


def print_report(found: dict[str, Any], title: str) -> None:
    """Prints the metrics, of many classes only the worst, and the confusion matrix if it fits."""
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    classes, per_class = [name[:NAME] for name in found["classes"]], found["per_class"]
    figures = [
        ("images", f"{found['images']:,}"),
        ("top-1 accuracy", f"{found['top1']:.4f}"),
        ("top-5 accuracy", f"{found['top5']:.4f}"),
        ("loss", f"{found['loss']:.4f}"),
        ("expected calibration error", f"{found['expected_calibration_error']:.4f}"),
        ("preprocessing", prepared(found)),
        *[("speed", f"{found['images_per_s']:,.0f} images/s")] * (found["images"] >= TIMED),
        ("processes", f"{found['processes']} x {found['device']}"),
    ]
    console.print(rich_table(title, ["what", "value"], figures))
    few = len(classes) <= PRINTED_CLASSES
    with_images = [c for c, images in enumerate(per_class["support"]) if images]
    by_f1 = sorted(with_images, key=lambda c: per_class["f1"][c])
    rows = [
        (classes[c], *(f"{per_class[name][c]:{',' if name == 'support' else '.4f'}}" for name in PER_CLASS))
        for c in (range(len(classes)) if few else by_f1[:WORST_CLASSES])
    ]
    heading = "of each class" if few else f"of the {len(rows)} classes with the lowest F1"
    console.print(rich_table(heading, ["class", *PER_CLASS], rows))
    if mistakes := found.get("mistakes"):
        pairs = [(classes[true], classes[guess], f"{count:,}") for true, guess, count in mistakes]
        console.print(rich_table("the most frequent mistakes", ["true", "predicted", "images"], pairs))
    if not few:
        return
    counts = [(f"{c} {classes[c]}", *map(str, row)) for c, row in enumerate(found["confusion"])]
    matrix = rich_table(
        "confusion matrix, a row per true class", ["true", *map(str, range(len(classes)))], counts
    )
    if console.measure(matrix, options=console.options.update(max_width=10_000)).maximum <= console.width:
        console.print(matrix)


def prepared(found: dict[str, Any]) -> str:
    """Describe how the images became the model's inputs."""
    preprocessing = found["preprocessing"]
    crop = f"crop {preprocessing['crop_pct']:g} {preprocessing['crop_mode']}" if found["cropped"] else "whole"
    return f"{preprocessing['image_size']} pixels, {preprocessing['interpolation']}, {crop}"


def rich_table(title: str, columns: list[str], rows: Iterable[tuple[str, ...]]) -> Any:
    """A rich table with numbers aligned to the right."""
    from rich import box
    from rich.table import Column, Table

    numbers = (Column(name, justify="right", no_wrap=True) for name in columns[1:])
    made = Table(columns[0], *numbers, title=title, box=box.SIMPLE, pad_edge=False)
    for row in rows:
        made.add_row(*row)
    return made
