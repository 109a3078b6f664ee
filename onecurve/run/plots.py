"""Draws curves, bars, confusion matrices and image sheets as PNG files with a white background."""

import io
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from onecurve.system.files import write_bytes
from onecurve.system.text import printable, printable_lines, text_ending

DPI = 100
# Maximum number of classes for which a confusion matrix shows class names, and for which it shows counts
MAX_NAMED_CLASSES, MAX_NUMBERED_CLASSES = 30, 20
MAX_LEGEND_CURVES = 16  # Maximum number of curves in a panel with a legend
NAME_LENGTH = 28  # Maximum number of characters in a class name that is not wrapped
# Image sheets: maximum number of characters per caption line, and per inch of the title
CAPTION_LENGTH, TITLE_CHARACTERS_PER_IN = 22, 11
# Image sheets: line height, edge length of an image, column width, and minimum width of the sheet, in inches
LINE_IN, EDGE_IN, CELL_IN, MIN_SHEET_IN = 0.125, 1.25, 1.35, 4
# Number of points in an averaged curve. Only curves with more than twice as many points are averaged
POINTS = 500


@dataclass
class Panel:
    """Panel of a plot with curves {name: ([x], [y])} or with horizontal bars {name: value}."""

    x: str
    y: str
    curves: dict[str, tuple[Sequence[float], Sequence[float]]] = field(default_factory=dict)
    bars: dict[str, float] = field(default_factory=dict)
    from_zero: bool = False  # The y axis starts at 0
    is_log: bool = False  # The y axis is logarithmic


def curves_panel(log_entries: Sequence[dict[str, Any]], x: str, y: str, names: Sequence[str]) -> Panel:
    """Return a panel that plots the given keys of log lines against the key `x`."""
    curves: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    for name in names:
        points = [(log_entry[x], log_entry[name]) for log_entry in log_entries if name in log_entry]
        if points:
            curves[name] = ([point[0] for point in points], [point[1] for point in points])
    return Panel(x, y, curves)


def plot_curves(folder: Path, log_entries: list[dict[str, Any]], title: str) -> None:
    """Draw the loss and, for models with classes, the accuracy per epoch from lines of metrics.jsonl."""
    accuracies = [entry["val/accuracy"] for entry in log_entries if "val/accuracy" in entry]
    loss_panel = curves_panel(log_entries, "epoch", "loss", ("train/loss", "val/loss"))
    panels = [loss_panel]
    # The loss of a model without classes decreases by several orders of magnitude.
    loss_panel.is_log = not accuracies
    if accuracies:
        panels.append(curves_panel(log_entries, "epoch", "accuracy", ("val/accuracy", "val/raw_accuracy")))
        title = f"{title}: best accuracy {max(accuracies):.4f}"
    draw_panels(folder / "plots" / "curves.png", [panels], title)


def draw_panels(path: Path, rows: Sequence[Sequence[Panel]], title: str) -> None:
    """Draw rows of panels, each with the same number of panels, and write the image to a PNG file."""
    columns = max(map(len, rows))
    with _saved_figure(path, (4.5 * columns, 0.4 + 2.7 * len(rows))) as figure:
        grid = figure.subplots(len(rows), columns, squeeze=False)
        figure.suptitle(_literal_text(title))
        for axes, panel in zip(grid.flat, (panel for row in rows for panel in row), strict=True):
            names = [_short_label(name) for name in panel.bars]
            axes.barh(names, list(panel.bars.values()), height=0.6)
            for name, (x, y) in panel.curves.items():
                style = {"marker": "o" if len(x) < 40 else None, "markersize": 3, "linewidth": 1.2}
                axes.plot(*_averaged(x, y), label=_short_label(name), **style)
            if panel.bars:
                axes.invert_yaxis()
            if 1 < len(panel.curves) <= MAX_LEGEND_CURVES:
                axes.legend(fontsize=8)
            axes.set(xlabel=_literal_text(panel.x), ylabel=_literal_text(panel.y))
            if panel.is_log:
                axes.set_yscale("log")
            if panel.from_zero:
                axes.set_ylim(0, 1.05 * axes.dataLim.ymax or 1)
            axes.grid(alpha=0.3)


def draw_confusion(path: Path, mistakes: dict[str, Any], title: str) -> None:
    """Draw the confusion matrix, or bars for the most frequent mistakes if there are many classes."""
    classes = mistakes["classes"]
    if "confusion" in mistakes:
        draw_confusion_matrix(path, mistakes["confusion"], classes, title)
    else:
        bars = {
            f"{printable(classes[label])}, predicted {classes[predicted]}": count
            for label, predicted, count in mistakes["mistakes"]
        }
        draw_panels(path, [[Panel("images", "", bars=bars)]], f"{title}: most frequent mistakes")


def draw_confusion_matrix(path: Path, matrix: list[list[int]], classes: Sequence[str], title: str) -> None:
    """Draw a confusion matrix for 2 to 1,000 classes, with a row per true class.

    A cell's shade shows its fraction of the row's total.
    """
    counts = np.asarray(matrix, dtype=np.int64)  # [C, C]
    shares = counts / np.maximum(1, counts.sum(1, keepdims=True))
    is_numbered = len(classes) <= MAX_NUMBERED_CLASSES
    edge_in = min(6.5, max(4.0, 0.45 * len(classes)))
    # Class names are not truncated. Long class names use a small font and are wrapped to the height of a row.
    longest_name = max(map(len, classes))
    font_size = 10 if longest_name <= NAME_LENGTH else 6
    lines_per_row = max(1, int(edge_in / LINE_IN / len(classes)))
    line_length = max(NAME_LENGTH, longest_name // lines_per_row + 8)
    margin_in = 0.0
    if len(classes) <= MAX_NAMED_CLASSES:
        margin_in = 0.045 * max(0, min(line_length, longest_name) - NAME_LENGTH)
    with _saved_figure(path, (edge_in + margin_in + 1.2, edge_in + margin_in + 0.6)) as figure:
        axes = figure.subplots()
        image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        axes.set(title=_literal_text(title), xlabel="predicted", ylabel="true")
        if len(classes) <= MAX_NAMED_CLASSES:
            tick_labels = [_wrapped(class_name, line_length) for class_name in classes]
            rotation = 90 if max(map(len, tick_labels)) > 2 else 0
            axes.set_xticks(range(len(tick_labels)), tick_labels, rotation=rotation, fontsize=font_size)
            axes.set_yticks(range(len(tick_labels)), tick_labels, fontsize=font_size)
        if is_numbered:
            for (row, column), count in np.ndenumerate(counts):
                color = "white" if shares[row, column] > 0.5 else "black"
                axes.text(column, row, str(count), ha="center", va="center", fontsize=7, color=color)
        figure.colorbar(image, label="share of the images in the true class", shrink=0.8)


def prediction_caption(label: str, predicted: str, probability: float) -> str:
    """Return a caption with the true class, the predicted class if it is wrong, and the probability."""
    return "\n".join([label, *([f"not {predicted}"] if predicted != label else []), f"{probability:.3f}"])


def draw_image_sheet(
    path: Path, images: np.ndarray, captions: Sequence[str], title: str, is_wrong: Sequence[bool] = ()
) -> None:
    """Draw images, uint8 [n, H, W, 3], with captions below. The captions of `is_wrong` images are red."""
    columns = min(8, max(1, len(images)))
    wrapped_captions = [_wrapped(caption, CAPTION_LENGTH) for caption in captions]
    width_in = max(MIN_SHEET_IN, CELL_IN * columns)
    title = _wrapped(title, int(TITLE_CHARACTERS_PER_IN * width_in))
    tops_in, end_in = [], 0.15 + 0.25 * (title.count("\n") + 1)  # Upper edge of each row of images, in inches
    for row in range(0, len(images), columns):
        tops_in.append(end_in)
        caption_lines = max(caption.count("\n") + 1 for caption in wrapped_captions[row : row + columns])
        end_in += CELL_IN + LINE_IN * caption_lines + 0.1
    image_height_in, image_width_in = (EDGE_IN * size / max(images.shape[1:3]) for size in images.shape[1:3])
    with _saved_figure(path, (width_in, end_in), layout=None) as figure:
        figure.suptitle(title, y=1 - 0.1 / end_in, va="top")
        # Use one Axes for all images, because drawing an Axes takes longer than drawing an image.
        axes = figure.add_axes((0, 0, 1, 1))
        for index, (image, caption) in enumerate(zip(images, wrapped_captions, strict=True)):
            row, column = divmod(index, columns)
            x_in, bottom_in = (column + 0.5) * CELL_IN, end_in - tops_in[row] - EDGE_IN
            y_in = bottom_in + EDGE_IN / 2
            left_right_in = (x_in - image_width_in / 2, x_in + image_width_in / 2)
            bottom_top_in = (y_in - image_height_in / 2, y_in + image_height_in / 2)
            axes.imshow(image, extent=(*left_right_in, *bottom_top_in), interpolation="nearest")
            color = "firebrick" if len(is_wrong) > index and is_wrong[index] else "black"
            axes.text(x_in, bottom_in - 0.05, caption, ha="center", va="top", fontsize=7, color=color)
        axes.set(xlim=(0, width_in), ylim=(0, end_in), aspect="auto")
        axes.axis("off")


@contextmanager
def _saved_figure(
    path: Path, size_in: tuple[float, float], layout: Literal["constrained"] | None = "constrained"
) -> Iterator[Any]:
    """Yield a figure, and write it to `path` afterwards. The function does not use pyplot's global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size_in, layout=layout, facecolor="white")
    yield figure
    # Run the layout engine only once, because savefig would otherwise draw everything twice.
    if engine := figure.get_layout_engine():
        engine.execute(figure)
        figure.set_layout_engine(None)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    figure.savefig(content, dpi=DPI)
    write_bytes(path, content.getvalue())


def _averaged(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Average a long curve over POINTS segments of similar length."""
    if len(x) <= 2 * POINTS:
        return list(x), list(y)

    def means(coordinates: Sequence[float]) -> list[float]:
        return [float(segment.mean()) for segment in np.array_split(np.asarray(coordinates, float), POINTS)]

    return means(x), means(y)


def file_caption(name: str) -> str:
    """Return a file name that fits in two caption lines. A long file name is truncated at the beginning."""
    return text_ending(_drawable(name), 2 * CAPTION_LENGTH)


def _drawable(text: str) -> str:
    """Escape characters that are missing from matplotlib's font. Escapes have the form \\u732b."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    charmap = get_font(findfont(FontProperties())).get_charmap()
    return "".join(
        character if ord(character) in charmap or character in "\n\t" else f"\\u{ord(character):04x}"
        for character in printable_lines(text)
    )


def _literal_text(text: str) -> str:
    """Escape dollar signs, which would start a formula, and characters that can't be drawn."""
    return _drawable(text).replace("$", r"\$")


def _wrapped(text: str, width: int) -> str:
    """Wrap a text into lines of at most `width` characters."""
    wrapped_lines = [
        wrapped_line for line in _drawable(text).splitlines() for wrapped_line in textwrap.wrap(line, width)
    ]
    return _literal_text("\n".join(wrapped_lines))


def _short_label(name: str, max_length: int = 28) -> str:
    """Shorten a name for legends and bar labels. Pages show the full name."""
    name = printable(name)
    return _literal_text(name if len(name) <= max_length else f"{name[: max_length - 1]}...")
