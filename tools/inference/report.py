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

METRIC_MODULES = ("classification", "top_k", "calibration")  # module names in tools/inference/metrics/
TOP_CLASSES = 5  # number of most probable classes in the top-5 accuracy
CALIBRATION_BINS = 15
WORST_IMAGES = 24  # maximum number of images in worst.png
TIMED_IMAGES = 1000  # minimum number of images for reporting throughput, because decoders need time to start
PRINTED_CLASSES = 20  # maximum number of classes for which all classes and the confusion matrix are printed
WORST_CLASSES = 10  # number of printed classes if there are more than PRINTED_CLASSES classes
MAX_NAME_CHARACTERS = 24  # maximum number of printed characters in a class name
CLASS_METRICS = ("precision", "recall", "f1", "specificity", "support")
REPORT_FILES = ("worst.png", "confusion.png", "predictions.csv", "report.json")
# Columns of predictions.csv, and keys of the entries in "worst"
PREDICTION_COLUMNS = ("id", "file", "label", "predicted", "probability")

Rows = dict[str, np.ndarray]  # arrays id, label, predicted, loss and probability [n], and top [n, k]


def measure(predictions: Rows, name_of: NameLookup, class_count: int, scratch: Path) -> dict[str, Any]:
    """Compute the report's metrics with the modules in tools/inference/metrics/.

    Args:
        predictions: Array of each column, as described at Rows. Ids are positions in the stored split.
        name_of: Function that maps a position in the stored split to the image's file name.
        class_count: Number of classes.
        scratch: Folder for copies of the metric modules.
    """
    classification, top_k, calibration = load_metrics(scratch)
    true_labels, predicted_classes = predictions["label"], predictions["predicted"]
    predicted_and_true = {"predictions": predicted_classes, "references": true_labels}
    class_scores = classification.compute(**predicted_and_true, class_count=class_count)
    confusion_values = {"confusion": class_scores["confusion"]} if "confusion" in class_scores else {}
    if not confusion_values:  # there are too many classes for a confusion matrix
        from onecurve.run.evaluation import frequent_mistakes  # imports torch

        confusion_values = {"mistakes": frequent_mistakes(true_labels, predicted_classes, class_count)}
    probabilities = predictions["probability"]
    mistake_rows = np.flatnonzero(predicted_classes != true_labels)  # row indices of wrong predictions
    most_confident_first = np.argsort(-probabilities[mistake_rows], kind="stable")
    worst_row_indices = mistake_rows[most_confident_first][:WORST_IMAGES]
    worst_rows = _image_rows(predictions, name_of, worst_row_indices)
    return {
        "images": len(predictions["id"]),
        "loss": float(predictions["loss"].mean()),
        "top1": class_scores["accuracy"],
        "top5": top_k.compute(predictions=predictions["top"], references=true_labels)["top_k"],
        **calibration.compute(**predicted_and_true, probabilities=probabilities, bin_count=CALIBRATION_BINS),
        "per_class": {metric: class_scores[metric] for metric in CLASS_METRICS},
        **confusion_values,
        "worst": [dict(zip(PREDICTION_COLUMNS, worst_row, strict=True)) for worst_row in worst_rows],
    }


def _image_rows(
    predictions: Rows, name_of: NameLookup, positions: np.ndarray | slice = slice(None)
) -> Iterator[tuple[Any, ...]]:
    """Yield one tuple with the values of PREDICTION_COLUMNS for each selected row."""
    # name_of() provides the values of the column `file`.
    columns = [predictions[column][positions].tolist() for column in PREDICTION_COLUMNS if column != "file"]
    for image_id, *other_cells in zip(*columns, strict=True):
        yield image_id, name_of(image_id), *other_cells


def load_metrics(scratch: Path) -> list[Any]:
    """Load the modules in METRIC_MODULES with the `evaluate` package, which copies them to `scratch`."""
    evaluate = import_evaluate(scratch)
    module_folders = [str(ROOT / "tools" / "inference" / "metrics" / metric) for metric in METRIC_MODULES]
    return [evaluate.load(folder, keep_in_memory=True, cache_dir=str(scratch)) for folder in module_folders]


def write_report(
    folder: Path,
    summary: dict[str, Any],
    predictions: Rows,
    name_of: NameLookup,
    worst_pixels: np.ndarray,
    title: str,
) -> None:
    """Write the files in REPORT_FILES to a folder. Each file replaces an earlier file atomically.

    Args:
        folder: Folder of the report, which is created if it does not exist.
        summary: Content of report.json.
        predictions: Predictions for all images, for predictions.csv.
        name_of: Function that maps a position in the stored split to the image's file name.
        worst_pixels: Images of the mistakes in summary["worst"], uint8 [n, H, W, 3].
        title: Title of the plots.
    """
    from onecurve.run import plots

    class_names = summary["classes"]
    captions = []
    for mistake in summary["worst"]:
        image_name = plots.file_caption(mistake["file"]) or f"id {mistake['id']}"
        true_class, predicted_class = class_names[mistake["label"]], class_names[mistake["predicted"]]
        caption = plots.prediction_caption(true_class, predicted_class, mistake["probability"])
        captions.append(f"{image_name}\n{caption}")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".half-", dir=folder) as temporary_folder:
        report_paths = (Path(temporary_folder) / file_name for file_name in REPORT_FILES)
        worst_png, confusion_png, predictions_csv, report_json = report_paths
        plots.draw_image_sheet(worst_png, worst_pixels, captions, f"{title}: most confident mistakes")
        plots.draw_confusion(confusion_png, summary, f"{title}: top-1 {summary['top1']:.4f}")
        prediction_rows = (
            (image_id, image_file, class_names[label], class_names[predicted_class], f"{probability:.6f}")
            for image_id, image_file, label, predicted_class, probability in _image_rows(predictions, name_of)
        )
        write_csv(predictions_csv, [PREDICTION_COLUMNS, *prediction_rows])
        # json.dumps with indentation would write a million lines for the confusion matrix of 1,000 classes.
        json_lines = [f'"{report_key}": {json.dumps(value)}' for report_key, value in summary.items()]
        write_text(report_json, "{\n" + ",\n".join(json_lines) + "\n}\n")
        for file_name in REPORT_FILES:
            (Path(temporary_folder) / file_name).replace(folder / file_name)


def print_report(summary: dict[str, Any], title: str) -> None:
    """Print overall metrics, per-class metrics (all or the worst), and the confusion matrix if it fits.

    `summary` is the content of report.json.
    """
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    class_names = [class_name[:MAX_NAME_CHARACTERS] for class_name in summary["classes"]]
    per_class = summary["per_class"]
    overview_rows = [
        ("images", f"{summary['images']:,}"),
        ("top-1 accuracy", f"{summary['top1']:.4f}"),
        ("top-5 accuracy", f"{summary['top5']:.4f}"),
        ("loss", f"{summary['loss']:.4f}"),
        ("expected calibration error", f"{summary['expected_calibration_error']:.4f}"),
        ("preprocessing", preprocessing_text(summary)),
    ]
    if summary["images"] >= TIMED_IMAGES:
        overview_rows.append(("throughput", f"{summary['images_per_s']:,.0f} images/s"))
    overview_rows.append(("processes", f"{summary['processes']} x {summary['device']}"))
    console.print(rich_table(title, ["metric", "value"], overview_rows))
    shows_all_classes = len(class_names) <= PRINTED_CLASSES
    evaluated_classes = [
        class_index for class_index, image_count in enumerate(per_class["support"]) if image_count
    ]
    # Classes without images have no F1 to compare.
    lowest_f1_first = sorted(evaluated_classes, key=lambda class_index: per_class["f1"][class_index])
    printed_classes = range(len(class_names)) if shows_all_classes else lowest_f1_first[:WORST_CLASSES]
    class_rows = []
    for class_index in printed_classes:
        scores = {metric: per_class[metric][class_index] for metric in CLASS_METRICS}
        # `support` is a number of images, and all other metrics are fractions.
        score_texts = [f"{score:{',' if metric == 'support' else '.4f'}}" for metric, score in scores.items()]
        class_rows.append((class_names[class_index], *score_texts))
    lowest_f1_heading = f"metrics of the {len(class_rows)} classes with the lowest F1"
    table_heading = "metrics by class" if shows_all_classes else lowest_f1_heading
    console.print(rich_table(table_heading, ["class", *CLASS_METRICS], class_rows))
    if mistakes := summary.get("mistakes"):
        mistake_rows = [
            (class_names[true_class], class_names[predicted_class], f"{mistake_count:,}")
            for true_class, predicted_class, mistake_count in mistakes
        ]
        table_heading = "most frequently confused classes"
        console.print(rich_table(table_heading, ["true", "predicted", "images"], mistake_rows))
    if not shows_all_classes:
        return
    confusion_rows = [
        (f"{true_class} {class_names[true_class]}", *map(str, image_counts))
        for true_class, image_counts in enumerate(summary["confusion"])
    ]
    matrix_columns = ["true", *map(str, range(len(class_names)))]
    matrix_title = "confusion matrix with one row per true class"
    matrix_table = rich_table(matrix_title, matrix_columns, confusion_rows)
    unlimited_width = console.options.update(max_width=10_000)  # measure() returns at most this width
    if console.measure(matrix_table, options=unlimited_width).maximum <= console.width:
        console.print(matrix_table)


def preprocessing_text(summary: dict[str, Any]) -> str:
    """Return a text such as `224 pixels, bicubic, crop 0.875 center` from the content of report.json."""
    preprocessing = summary["preprocessing"]
    crop_text = "whole"  # images are only resized
    if summary["cropped"]:
        crop_text = f"crop {preprocessing['crop_pct']:g} {preprocessing['crop_mode']}"
    return f"{preprocessing['image_size']} pixels, {preprocessing['interpolation']}, {crop_text}"


def rich_table(title: str, headings: list[str], rows: Iterable[tuple[str, ...]]) -> Any:
    """Return a rich Table. All columns except the first are right-aligned."""
    from rich import box
    from rich.table import Column, Table

    right_aligned_columns = (Column(heading, justify="right", no_wrap=True) for heading in headings[1:])
    table = Table(headings[0], *right_aligned_columns, title=title, box=box.SIMPLE, pad_edge=False)
    for cells in rows:
        table.add_row(*cells)
    return table
