"""Draws curves, bars, confusion matrices and image sheets as PNG files with a white background."""

import io
import itertools
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from onecurve.system.files import write_bytes
from onecurve.system.text import printable, printable_lines, text_ending

DPI = 100  # Resolution of the PNG files in pixels per inch
MAX_NAMED_CLASSES = 30  # Maximum number of classes for which a confusion matrix shows class names
MAX_COUNTED_CLASSES = 20  # Maximum number of classes for which a confusion matrix shows counts
MAX_LEGEND_CURVES = 16  # Maximum number of curves in a panel with a legend
MAX_MARKED_POINTS = 39  # Maximum number of points in a curve with a marker at each point
MAX_LABEL_LENGTH = 28  # Longer legend entries and bar labels are shortened to 27 characters and "..."
MAX_UNWRAPPED_LENGTH = 28  # Maximum number of characters in a class name that is not wrapped
MAX_SHEET_COLUMNS = 8  # Maximum number of columns in an image sheet
MAX_CAPTION_LINE_LENGTH = 22  # Maximum number of characters in a line of an image caption
TITLE_CHARACTERS_PER_IN = 11  # Maximum number of characters per inch in the title of an image sheet
PANEL_WIDTH_IN, PANEL_HEIGHT_IN, TITLE_HEIGHT_IN = 4.5, 2.7, 0.4  # Layout of panels, in inches
MIN_MATRIX_EDGE_IN, MAX_MATRIX_EDGE_IN = 4.0, 6.5  # Edge length of a confusion matrix, in inches
MATRIX_CELL_IN = 0.45  # Edge length of a confusion matrix cell unless these limits apply, in inches
LINE_HEIGHT_IN = 0.125  # Height of a caption line or tick label line, in inches
IMAGE_EDGE_IN = 1.25  # Longer edge of an image in an image sheet, in inches
COLUMN_WIDTH_IN = 1.35  # Width of a column in an image sheet, in inches
MIN_SHEET_WIDTH_IN = 4  # Minimum width of an image sheet, in inches
SHEET_MARGIN_IN, TITLE_LINE_IN, ROW_GAP_IN = 0.15, 0.25, 0.1  # Vertical layout of an image sheet, in inches
# Number of points in an averaged curve. Only curves with more than twice as many points are averaged
AVERAGED_CURVE_POINTS = 500


@dataclass
class Panel:
    """Panel of a plot with curves {name: ([x], [y])} or with horizontal bars {name: value}."""

    x_label: str
    y_label: str
    curves: dict[str, tuple[Sequence[float], Sequence[float]]] = field(default_factory=dict)
    bars: dict[str, float] = field(default_factory=dict)
    starts_at_zero: bool = False  # The y axis starts at 0
    has_log_scale: bool = False  # The y axis is logarithmic


def curves_panel(
    log_entries: Sequence[dict[str, Any]], x_key: str, y_label: str, curve_keys: Sequence[str]
) -> Panel:
    """Return a panel that plots the given keys of log lines against the key `x_key`."""
    curves: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    for curve_key in curve_keys:
        entries_with_key = [log_entry for log_entry in log_entries if curve_key in log_entry]
        if entries_with_key:
            x_values = [log_entry[x_key] for log_entry in entries_with_key]
            curves[curve_key] = (x_values, [log_entry[curve_key] for log_entry in entries_with_key])
    return Panel(x_key, y_label, curves)


def plot_curves(folder: Path, log_entries: list[dict[str, Any]], title: str) -> None:
    """Draw the loss and, for models with classes, the accuracy per epoch in plots/curves.png.

    `folder` is the run folder, and `log_entries` are the lines of metrics.jsonl.
    """
    accuracies = [log_entry["val/accuracy"] for log_entry in log_entries if "val/accuracy" in log_entry]
    loss_panel = curves_panel(log_entries, "epoch", "loss", ("train/loss", "val/loss"))
    panels = [loss_panel]
    # The loss of a model without classes decreases by several orders of magnitude.
    loss_panel.has_log_scale = not accuracies
    if accuracies:
        panels.append(curves_panel(log_entries, "epoch", "accuracy", ("val/accuracy", "val/raw_accuracy")))
        title = f"{title}: best accuracy {max(accuracies):.4f}"
    draw_panels(folder / "plots" / "curves.png", [panels], title)


def draw_panels(path: Path, panel_rows: Sequence[Sequence[Panel]], title: str) -> None:
    """Draw rows of panels, each with the same number of panels, and write the image to a PNG file."""
    column_count = max(map(len, panel_rows))
    figure_height_in = TITLE_HEIGHT_IN + PANEL_HEIGHT_IN * len(panel_rows)
    with _saved_figure(path, (PANEL_WIDTH_IN * column_count, figure_height_in)) as figure:
        axes_grid = figure.subplots(len(panel_rows), column_count, squeeze=False)
        figure.suptitle(_literal_text(title))
        for axes, panel in zip(axes_grid.flat, itertools.chain.from_iterable(panel_rows), strict=True):
            bar_labels = [_short_label(bar_name) for bar_name in panel.bars]
            axes.barh(bar_labels, list(panel.bars.values()), height=0.6)
            for curve_name, (x, y) in panel.curves.items():
                point_marker = "o" if len(x) <= MAX_MARKED_POINTS else None
                curve_style = {"marker": point_marker, "markersize": 3, "linewidth": 1.2}
                axes.plot(*_averaged_curve(x, y), label=_short_label(curve_name), **curve_style)
            if panel.bars:
                axes.invert_yaxis()  # Draws the first bar at the top
            if 1 < len(panel.curves) <= MAX_LEGEND_CURVES:
                axes.legend(fontsize=8)
            axes.set(xlabel=_literal_text(panel.x_label), ylabel=_literal_text(panel.y_label))
            if panel.has_log_scale:
                axes.set_yscale("log")
            if panel.starts_at_zero:
                axes.set_ylim(0, 1.05 * axes.dataLim.ymax or 1)  # 1 if all values are 0
            axes.grid(alpha=0.3)


def draw_confusion(path: Path, confusion_json: dict[str, Any], title: str) -> None:
    """Draw the confusion matrix, or bars for the most frequent mistakes if there are many classes.

    `confusion_json` is the content of confusion.json.
    """
    class_names = confusion_json["classes"]
    if "confusion" in confusion_json:
        draw_confusion_matrix(path, confusion_json["confusion"], class_names, title)
    else:
        count_by_mistake = {
            f"{printable(class_names[true_class])}, predicted {class_names[predicted_class]}": image_count
            for true_class, predicted_class, image_count in confusion_json["mistakes"]
        }
        draw_panels(path, [[Panel("images", "", bars=count_by_mistake)]], f"{title}: most frequent mistakes")


def draw_confusion_matrix(path: Path, matrix: list[list[int]], classes: Sequence[str], title: str) -> None:
    """Draw a confusion matrix for 2 to 1,000 classes, with a row per true class.

    A cell's shade shows its fraction of the row's total.
    """
    image_counts = np.asarray(matrix, dtype=np.int64)  # [C, C]
    row_shares = image_counts / np.maximum(1, image_counts.sum(1, keepdims=True))
    are_counts_shown = len(classes) <= MAX_COUNTED_CLASSES
    matrix_edge_in = min(MAX_MATRIX_EDGE_IN, max(MIN_MATRIX_EDGE_IN, MATRIX_CELL_IN * len(classes)))
    # Class names are not truncated. Long class names use a small font and are wrapped to the height of a row.
    longest_name_length = max(map(len, classes))
    font_size = 10 if longest_name_length <= MAX_UNWRAPPED_LENGTH else 6
    lines_per_row = max(1, int(matrix_edge_in / LINE_HEIGHT_IN / len(classes)))
    # Lines may break early at a word, so each line has 8 more characters than the mean.
    max_line_length = max(MAX_UNWRAPPED_LENGTH, longest_name_length // lines_per_row + 8)
    label_margin_in = 0.0  # Additional space for long class names, with 0.045 inches per character
    if len(classes) <= MAX_NAMED_CLASSES:
        label_margin_in = 0.045 * max(0, min(max_line_length, longest_name_length) - MAX_UNWRAPPED_LENGTH)
    # Add 1.2 inches for the color bar and the y labels, and 0.6 inches for the title and the x labels
    width_in, height_in = matrix_edge_in + label_margin_in + 1.2, matrix_edge_in + label_margin_in + 0.6
    with _saved_figure(path, (width_in, height_in)) as figure:
        axes = figure.subplots()
        matrix_image = axes.imshow(row_shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        axes.set(title=_literal_text(title), xlabel="predicted", ylabel="true")
        if len(classes) <= MAX_NAMED_CLASSES:
            tick_labels = [_wrapped_text(class_name, max_line_length) for class_name in classes]
            rotation = 90 if max(map(len, tick_labels)) > 2 else 0
            axes.set_xticks(range(len(tick_labels)), tick_labels, rotation=rotation, fontsize=font_size)
            axes.set_yticks(range(len(tick_labels)), tick_labels, fontsize=font_size)
        if are_counts_shown:
            for (row, column), count in np.ndenumerate(image_counts):
                # Dark cells need light text
                count_color = "white" if row_shares[row, column] > 0.5 else "black"
                axes.text(column, row, str(count), ha="center", va="center", fontsize=7, color=count_color)
        figure.colorbar(matrix_image, label="share of the images in the true class", shrink=0.8)


def prediction_caption(true_class: str, predicted_class: str, probability: float) -> str:
    """Return a caption with the true class, the predicted class if it is wrong, and the probability."""
    mistake_line = f"not {predicted_class}\n" if predicted_class != true_class else ""
    return f"{true_class}\n{mistake_line}{probability:.3f}"


def draw_image_sheet(
    path: Path, images: np.ndarray, captions: Sequence[str], title: str, is_wrong: Sequence[bool] = ()
) -> None:
    """Draw images with captions in rows, and write the sheet to a PNG file.

    Args:
        path: Path of the PNG file.
        images: Images, uint8 [n, H, W, 3].
        captions: Caption below each image.
        title: Title of the sheet.
        is_wrong: True for each image with a red caption. Images at the end may be left out.
    """
    column_count = min(MAX_SHEET_COLUMNS, max(1, len(images)))
    wrapped_captions = [_wrapped_text(caption, MAX_CAPTION_LINE_LENGTH) for caption in captions]
    sheet_width_in = max(MIN_SHEET_WIDTH_IN, COLUMN_WIDTH_IN * column_count)
    wrapped_title = _wrapped_text(title, int(TITLE_CHARACTERS_PER_IN * sheet_width_in))
    sheet_height_in = SHEET_MARGIN_IN + TITLE_LINE_IN * (wrapped_title.count("\n") + 1)
    row_tops_in = []  # Distance between the sheet's upper edge and each row of images
    for first_image_index in range(0, len(images), column_count):
        row_tops_in.append(sheet_height_in)
        row_captions = wrapped_captions[first_image_index : first_image_index + column_count]
        caption_lines = max(caption.count("\n") + 1 for caption in row_captions)
        sheet_height_in += COLUMN_WIDTH_IN + LINE_HEIGHT_IN * caption_lines + ROW_GAP_IN
    _, height_px, width_px, _ = images.shape
    image_height_in = IMAGE_EDGE_IN * height_px / max(height_px, width_px)
    image_width_in = IMAGE_EDGE_IN * width_px / max(height_px, width_px)
    # All positions are computed here, so the figure has no layout engine.
    with _saved_figure(path, (sheet_width_in, sheet_height_in), layout=None) as figure:
        figure.suptitle(wrapped_title, y=1 - 0.1 / sheet_height_in, va="top")  # 0.1 inches below the edge
        # Use one Axes for all images, because drawing an Axes takes longer than drawing an image.
        sheet_axes = figure.add_axes((0, 0, 1, 1))
        for image_index, (image, caption) in enumerate(zip(images, wrapped_captions, strict=True)):
            sheet_row, sheet_column = divmod(image_index, column_count)
            image_center_x_in = (sheet_column + 0.5) * COLUMN_WIDTH_IN
            cell_bottom_in = sheet_height_in - row_tops_in[sheet_row] - IMAGE_EDGE_IN
            image_center_y_in = cell_bottom_in + IMAGE_EDGE_IN / 2
            left_right_in = (image_center_x_in - image_width_in / 2, image_center_x_in + image_width_in / 2)
            bottom_top_in = (image_center_y_in - image_height_in / 2, image_center_y_in + image_height_in / 2)
            sheet_axes.imshow(image, extent=(*left_right_in, *bottom_top_in), interpolation="nearest")
            caption_color = "firebrick" if len(is_wrong) > image_index and is_wrong[image_index] else "black"
            caption_style = {"ha": "center", "va": "top", "fontsize": 7, "color": caption_color}
            # The caption begins 0.05 inches below the image's cell.
            sheet_axes.text(image_center_x_in, cell_bottom_in - 0.05, caption, **caption_style)
        sheet_axes.set(xlim=(0, sheet_width_in), ylim=(0, sheet_height_in), aspect="auto")
        sheet_axes.axis("off")


@contextmanager
def _saved_figure(
    path: Path, figure_size_in: tuple[float, float], layout: Literal["constrained"] | None = "constrained"
) -> Iterator[Any]:
    """Yield a matplotlib figure, and write it to `path` as a PNG file afterwards.

    The figure is not registered in pyplot's global state.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=figure_size_in, layout=layout, facecolor="white")
    yield figure
    # Run the layout engine only once, because savefig would otherwise draw everything twice.
    if layout_engine := figure.get_layout_engine():
        layout_engine.execute(figure)
        figure.set_layout_engine(None)
    path.parent.mkdir(parents=True, exist_ok=True)
    png_buffer = io.BytesIO()
    figure.savefig(png_buffer, dpi=DPI)
    write_bytes(path, png_buffer.getvalue())


def _averaged_curve(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Average a long curve over AVERAGED_CURVE_POINTS segments of similar length."""
    if len(x) <= 2 * AVERAGED_CURVE_POINTS:
        return list(x), list(y)

    def segment_means(coordinates: Sequence[float]) -> list[float]:
        segments = np.array_split(np.asarray(coordinates, float), AVERAGED_CURVE_POINTS)
        return [float(segment.mean()) for segment in segments]

    return segment_means(x), segment_means(y)


def file_caption(file_name: str) -> str:
    """Return a file name that fits in two caption lines. A long file name is truncated at the beginning."""
    return text_ending(_drawable_text(file_name), 2 * MAX_CAPTION_LINE_LENGTH)


def _drawable_text(raw_text: str) -> str:
    """Escape characters that are missing from matplotlib's font. Escapes have the form \\u732b."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    charmap = get_font(findfont(FontProperties())).get_charmap()
    return "".join(
        character if ord(character) in charmap or character in "\n\t" else f"\\u{ord(character):04x}"
        for character in printable_lines(raw_text)
    )


def _literal_text(plain_text: str) -> str:
    """Escape dollar signs, which would start a formula, and characters that can't be drawn."""
    return _drawable_text(plain_text).replace("$", r"\$")


def _wrapped_text(unwrapped_text: str, max_line_length: int) -> str:
    """Wrap a text into lines of at most `max_line_length` characters."""
    wrapped_lines: list[str] = []
    for unwrapped_line in _drawable_text(unwrapped_text).splitlines():
        wrapped_lines += textwrap.wrap(unwrapped_line, max_line_length)
    return _literal_text("\n".join(wrapped_lines))


def _short_label(full_name: str) -> str:
    """Shorten a name for legends and bar labels. Pages show the full name."""
    label = printable(full_name)
    return _literal_text(label if len(label) <= MAX_LABEL_LENGTH else f"{label[: MAX_LABEL_LENGTH - 1]}...")
