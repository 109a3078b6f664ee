"""Shows the progress of runs and of data preparation, as a bar on a terminal or as plain lines elsewhere."""

import math
import os
import sys
import time
from typing import TextIO

LINE_INTERVAL_S = 30  # seconds without output after which a plain line is printed
REDRAW_INTERVAL_S = 0.25  # seconds between updates of the text next to the bar
BAR_VALUES = ("train/images_per_s", "train/loss", "val/accuracy", "train/mfu_pct", "train/lr")


class Display:
    """Progress bar with a text on a terminal, or plain lines every LINE_INTERVAL_S seconds elsewhere.

    Args:
        total: Total amount of work, in the unit of `done` in show().
        text: Text next to the bar.
        file: Output stream. None means stdout.
    """

    def __init__(self, total: int, text: str, file: TextIO | None = None):
        self.file = file  # stays None for stdout, because the bar replaces sys.stdout
        output = file or sys.stdout
        self.shown_s, self.bar = time.monotonic(), None
        if output.isatty() and "NO_COLOR" not in os.environ:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn
            from rich.table import Column

            column = Column(no_wrap=True, overflow="ellipsis", ratio=1)
            columns = BarColumn(8), TextColumn("{task.description}", markup=False, table_column=column)
            self.bar = Progress(*columns, console=Console(file=output), expand=True)
            self.task = self.bar.add_task(text, total=total)
            self.bar.start()

    def is_due(self) -> bool:
        return time.monotonic() > self.shown_s + (REDRAW_INTERVAL_S if self.bar else LINE_INTERVAL_S)

    def show(self, text: str, done: int) -> None:
        self.shown_s = time.monotonic()
        if self.bar:
            self.bar.update(self.task, completed=done, description=text)
        else:
            self.print(text)

    def print(self, line: str, file: TextIO | None = None) -> None:
        """Print a line above the bar. `file` is a stream that replaces the default stream."""
        self.shown_s = time.monotonic()
        print(line, file=file or self.file, flush=True)

    def stop(self) -> None:
        if self.bar:
            self.bar.stop()


class TrainingProgress:
    """Display of a training run's progress.

    Args:
        epochs: Total number of epochs in the run.
        step: Number of steps that earlier processes have finished.
        steps: Total number of steps in the run.
        unit: Word for samples, such as `images`.
        val_name: Name of the split in the displayed `val/...` metrics.
    """

    def __init__(self, epochs: int, step: int, steps: int, unit: str, val_name: str = "val"):
        self.epochs, self.step, self.steps, self.unit = epochs, step, steps, unit
        self.val_name = val_name
        self.values: dict[str, float] = {}  # latest value of each metric
        self.began: tuple[float, int] | None = None  # time and step of the first advance()
        self.display = Display(steps, "starting")

    def advance(self, step: int) -> None:
        """Update the number of finished steps. Call this method after each micro-batch."""
        self.step = step
        self.began = self.began or (time.monotonic(), step)
        self.tell("")

    def tell(self, activity: str) -> None:
        """Show an activity of the run, such as an evaluation.

        An empty activity means that the run is training.
        """
        if self.display.is_due():
            position = f"step {self.step:,}/{self.steps:,}"
            values = {name: self.values[name] for name in BAR_VALUES if name in self.values}
            text = "  ".join(
                filter(None, [position, activity, self._remaining_time(), self._format_metrics(values)])
            )
            self.display.show(text if self.display.bar else activity or position, self.step)

    def show(self, step: int, epoch: float, values: dict[str, float]) -> None:
        """Print metrics as a line. A terminal with a bar shows only evaluation lines."""
        self.step, self.values = step, self.values | values
        position = f"epoch {math.ceil(epoch)}/{self.epochs}  step {step:,}/{self.steps:,}"
        if not self.display.bar:
            self.display.print(
                "  ".join(filter(None, [position, self._format_metrics(values), self._remaining_time()]))
            )
        elif "val/loss" in values:
            self.display.print(f"{position}  {self._format_metrics(values)}")

    def stop(self) -> None:
        if self.display.bar:
            self.display.shown_s = -math.inf
            self.tell("")
        self.display.stop()

    def _format_metrics(self, values: dict[str, float]) -> str:
        formats = {"lr": "lr {:.2e}", "images_per_s": f"{{:,.0f}} {self.unit}/s", "mfu_pct": "MFU {:.1f} %"}
        prefixes = {"train": "", "val": f"{self.val_name} "}
        parts = []
        for name, value in values.items():
            split, _, short = name.partition("/")
            label = prefixes.get(split, f"{split} ") + short.replace("_", " ")
            parts.append(formats[short].format(value) if short in formats else f"{label} {value:.4f}")
        return "  ".join(parts)

    def _remaining_time(self) -> str:
        """Estimate the remaining time from the mean speed since the first advance(), evaluations included."""
        if not self.began or self.step <= self.began[1]:
            return ""
        seconds_per_step = (time.monotonic() - self.began[0]) / (self.step - self.began[1])
        return f"{_duration((self.steps - self.step) * seconds_per_step)} left"


class ReadingProgress:
    """Display of the progress of reading one split, measured in bytes of image data.

    Args:
        split: Name of the split.
        total: Number of bytes of all images in the split.
        verb: Word for the activity in the output of tell(), such as `read`.
    """

    def __init__(self, split: str, total: int, verb: str = "read"):
        self.split, self.total, self.verb, self.began_s = split, total, verb, time.monotonic()
        self.display = Display(total, split)

    def __enter__(self) -> "ReadingProgress":
        return self

    def __exit__(self, *_) -> None:
        self.display.stop()

    def tell(self, done_bytes: int) -> None:
        """Show the number of processed bytes that are not image data, such as uploaded bytes."""
        self._show_if_due(f"{self.split}  {self._format_gib(done_bytes)} {self.verb}", done_bytes)

    def show(self, images: int, read_bytes: int) -> None:
        seconds_per_byte = (time.monotonic() - self.began_s) / max(1, read_bytes)
        left = f"{_duration((self.total - read_bytes) * seconds_per_byte)} left"
        self._show_if_due(f"{self._description(images, read_bytes)}  {left}", read_bytes)

    def end(self, images: int, read_bytes: int) -> None:
        self.display.print(f"{self._description(images, read_bytes)}  done")

    def _show_if_due(self, text: str, read_bytes: int) -> None:
        if self.display.is_due():
            self.display.show(text, read_bytes)

    def _description(self, images: int, read_bytes: int) -> str:
        seconds = max(time.monotonic() - self.began_s, 1e-3)
        speed = f"{images / seconds:,.0f} images/s  {read_bytes / seconds / 1e6:,.0f} MB/s"
        return f"{self.split}  {images:,} images  {self._format_gib(read_bytes)}  {speed}"

    def _format_gib(self, read_bytes: int) -> str:
        return f"{read_bytes / 2**30:,.2f} of {self.total / 2**30:,.2f} GiB"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
