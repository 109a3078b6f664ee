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
from onecurve.system.text import ending, printable, printable_lines

DPI = 100
# Maximum number of classes for readable class names, and for readable counts
NAMED_CLASSES, NUMBERED_CLASSES = 30, 20
NAMED_CURVES = 16
NAME = 28  # characters per line of a class name
# Image sheets: characters per line of a caption and per inch of the title; height of a line, edge length of
# an image, width of a column, and minimum width of the sheet, in inches
CAPTION, TITLE_PER_IN = 22, 11
LINE_IN, EDGE_IN, CELL_IN, MIN_SHEET_IN = 0.125, 1.25, 1.35, 4
POINTS = 500  # maximum number of points of a curve; longer curves are averaged


@dataclass
class Panel:
    """Panel with curves {name: ([x], [y])} or with horizontal bars {name: value}."""

    x: str
    y: str
    curves: dict[str, tuple[Sequence[float], Sequence[float]]] = field(default_factory=dict)
    bars: dict[str, float] = field(default_factory=dict)
    from_zero: bool = False  # the y axis starts at 0
    is_log: bool = False  # the y axis is logarithmic


def panel(lines: Sequence[dict[str, Any]], x: str, y: str, names: Sequence[str]) -> Panel:
    """Return a panel that plots the named values from a log's lines against the value `x`."""
    curves: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    for name in names:
        points = [(line[x], line[name]) for line in lines if name in line]
        if points:
            curves[name] = ([point[0] for point in points], [point[1] for point in points])
    return Panel(x, y, curves)


def plot_curves(folder: Path, lines: list[dict[str, Any]], title: str) -> None:
    """Draw the loss and, for models with classes, the accuracy per epoch from lines of metrics.jsonl."""
    best = max((line["val/accuracy"] for line in lines if "val/accuracy" in line), default=None)
    row = [panel(lines, "epoch", "loss", ("train/loss", "val/loss"))]
    row[0].is_log = best is None  # the loss of models without classes falls by several orders of magnitude
    if best is not None:
        row.append(panel(lines, "epoch", "accuracy", ("val/accuracy", "val/raw_accuracy")))
        title = f"{title}: best accuracy {best:.4f}"
    panels(folder / "plots" / "curves.png", [row], title)


def panels(path: Path, rows: Sequence[Sequence[Panel]], title: str) -> None:
    """Draw rows of panels. All rows must have the same number of panels."""
    columns = max(map(len, rows))
    with _figure(path, (4.5 * columns, 0.4 + 2.7 * len(rows))) as figure:
        grid = figure.subplots(len(rows), columns, squeeze=False)
        figure.suptitle(_plain(title))
        for axes, panel in zip(grid.flat, (panel for row in rows for panel in row), strict=True):
            names = [_short(name) for name in panel.bars]
            axes.barh(names, list(panel.bars.values()), height=0.6)
            for name, (x, y) in panel.curves.items():
                style = {"marker": "o" if len(x) < 40 else None, "markersize": 3, "linewidth": 1.2}
                axes.plot(*_averaged(x, y), label=_short(name), **style)
            if panel.bars:
                axes.invert_yaxis()
            if 1 < len(panel.curves) <= NAMED_CURVES:
                axes.legend(fontsize=8)
            axes.set(xlabel=_plain(panel.x), ylabel=_plain(panel.y))
            if panel.is_log:
                axes.set_yscale("log")
            if panel.from_zero:
                axes.set_ylim(0, 1.05 * axes.dataLim.ymax or 1)
            axes.grid(alpha=0.3)


def confusion(path: Path, mistakes: dict[str, Any], title: str) -> None:
    """Draw the `confusion` matrix of `classes`, or bars for the most frequent `mistakes`."""
    classes = mistakes["classes"]
    if "confusion" in mistakes:
        confusion_matrix(path, mistakes["confusion"], classes, title)
    else:
        bars = {
            f"{printable(classes[label])}, predicted {classes[guess]}": count
            for label, guess, count in mistakes["mistakes"]
        }
        panels(path, [[Panel("images", "", bars=bars)]], f"{title}: most frequent mistakes")


def confusion_matrix(path: Path, matrix: list[list[int]], classes: Sequence[str], title: str) -> None:
    """Draw counts with a row per true class, shaded by their share of the row. Needs 2 to 1,000 classes."""
    counts = np.asarray(matrix, dtype=np.int64)  # [C, C]
    shares = counts / np.maximum(1, counts.sum(1, keepdims=True))
    is_numbered = len(classes) <= NUMBERED_CLASSES
    edge_in = min(6.5, max(4.0, 0.45 * len(classes)))
    # Names are not truncated. Long names use a small font and are wrapped to the height of a row.
    longest = max(map(len, classes))
    size = 10 if longest <= NAME else 6
    line = max(NAME, longest // max(1, int(edge_in / LINE_IN / len(classes))) + 8)
    room_in = 0.045 * max(0, min(line, longest) - NAME) if len(classes) <= NAMED_CLASSES else 0
    with _figure(path, (edge_in + room_in + 1.2, edge_in + room_in + 0.6)) as figure:
        axes = figure.subplots()
        image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        axes.set(title=_plain(title), xlabel="predicted", ylabel="true")
        if len(classes) <= NAMED_CLASSES:
            names = [_wrapped(name, line) for name in classes]
            upright = 90 if max(map(len, names)) > 2 else 0
            axes.set_xticks(range(len(names)), names, rotation=upright, fontsize=size)
            axes.set_yticks(range(len(names)), names, fontsize=size)
        if is_numbered:
            for (row, column), count in np.ndenumerate(counts):
                color = "white" if shares[row, column] > 0.5 else "black"
                axes.text(column, row, str(count), ha="center", va="center", fontsize=7, color=color)
        figure.colorbar(image, label="share of the true class", shrink=0.8)


def prediction_caption(label: str, guess: str, probability: float) -> str:
    """Return an image caption: the true class, the predicted class if different, and the probability."""
    return "\n".join([label, *([f"not {guess}"] if guess != label else []), f"{probability:.3f}"])


def image_sheet(
    path: Path, images: np.ndarray, captions: Sequence[str], title: str, wrong: Sequence[bool] = ()
) -> None:
    """Draw images, uint8 [n, H, W, 3], with captions below them. Captions of `wrong` images are red."""
    columns = min(8, max(1, len(images)))
    wrapped = [_wrapped(caption, CAPTION) for caption in captions]
    width_in = max(MIN_SHEET_IN, CELL_IN * columns)
    title = _wrapped(title, int(TITLE_PER_IN * width_in))
    tops_in, end_in = [], 0.15 + 0.25 * (title.count("\n") + 1)  # upper edge of each row of images
    for row in range(0, len(images), columns):
        tops_in.append(end_in)
        lines = max(caption.count("\n") + 1 for caption in wrapped[row : row + columns])
        end_in += CELL_IN + LINE_IN * lines + 0.1
    height_in, breadth_in = (EDGE_IN * n / max(images.shape[1:3]) for n in images.shape[1:3])
    with _figure(path, (width_in, end_in), layout=None) as figure:
        figure.suptitle(title, y=1 - 0.1 / end_in, va="top")
        axes = figure.add_axes(
            (0, 0, 1, 1)
        )  # one Axes for all images, because an Axes takes longer to draw than an image
        for i, (image, caption) in enumerate(zip(images, wrapped, strict=True)):
            x_in, bottom_in = (i % columns + 0.5) * CELL_IN, end_in - tops_in[i // columns] - EDGE_IN
            y_in = bottom_in + EDGE_IN / 2
            box = (x_in - breadth_in / 2, x_in + breadth_in / 2, y_in - height_in / 2, y_in + height_in / 2)
            axes.imshow(image, extent=box, interpolation="nearest")
            color = "firebrick" if len(wrong) > i and wrong[i] else "black"
            axes.text(x_in, bottom_in - 0.05, caption, ha="center", va="top", fontsize=7, color=color)
        axes.set(xlim=(0, width_in), ylim=(0, end_in), aspect="auto")
        axes.axis("off")


@contextmanager
def _figure(
    path: Path, size_in: tuple[float, float], layout: Literal["constrained"] | None = "constrained"
) -> Iterator[Any]:
    """Yield a figure, and write it to `path` at the end, without using pyplot's global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size_in, layout=layout, facecolor="white")
    yield figure
    # Run the layout only once, because savefig would draw everything twice
    if engine := figure.get_layout_engine():
        engine.execute(figure)
        figure.set_layout_engine(None)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    figure.savefig(content, dpi=DPI)
    write_bytes(path, content.getvalue())


def _averaged(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Average a long curve over segments with equal numbers of points."""
    if len(x) <= 2 * POINTS:
        return list(x), list(y)
    means_x, means_y = (
        [float(part.mean()) for part in np.array_split(np.asarray(v, float), POINTS)] for v in (x, y)
    )
    return means_x, means_y


def file_caption(name: str) -> str:
    """Return a file name for two lines of a caption. Long names keep the end, the most specific part."""
    return ending(_drawable(name), 2 * CAPTION)


def _drawable(text: str) -> str:
    """Escape characters that matplotlib's font lacks, for example as \\u732b."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    charmap = get_font(findfont(FontProperties())).get_charmap()
    shown = (c if ord(c) in charmap or c in "\n\t" else f"\\u{ord(c):04x}" for c in printable_lines(text))
    return "".join(shown)


def _plain(text: str) -> str:
    """Return the text in drawable characters. Dollar signs are escaped, because they start formulas."""
    return _drawable(text).replace("$", r"\$")


def _wrapped(text: str, width: int) -> str:
    """Wrap the whole text into lines of at most `width` characters."""
    lines = _drawable(text).splitlines()
    return _plain("\n".join(part for line in lines for part in textwrap.wrap(line, width)))


def _short(name: str, length: int = 28) -> str:
    """Shorten a name for legends and bars. Pages show the full name."""
    name = printable(name)
    return _plain(name if len(name) <= length else f"{name[: length - 1]}...")
