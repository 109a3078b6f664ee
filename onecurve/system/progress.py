"""Shows the progress of runs and data preparation: a bar on a terminal, plain lines elsewhere."""

import math
import os
import sys
import time
from typing import TextIO

LINE_S = 30  # seconds without output after which a line is printed
DRAW_S = 0.25  # seconds between updates of the text next to the bar
BAR_VALUES = ("train/images_per_s", "train/loss", "val/accuracy", "train/mfu_pct", "train/lr")


class Display:
    """Progress bar with a text on a terminal. Elsewhere, prints a line every LINE_S seconds.

    file: Stream for the output. None means stdout.
    """

    def __init__(self, total: int, text: str, file: TextIO | None = None):
        self.file = file  # None is not resolved here, because the bar replaces sys.stdout
        out = file or sys.stdout
        self.shown_s, self.bar = time.monotonic(), None
        if out.isatty() and "NO_COLOR" not in os.environ:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn
            from rich.table import Column

            column = Column(no_wrap=True, overflow="ellipsis", ratio=1)
            columns = BarColumn(8), TextColumn("{task.description}", markup=False, table_column=column)
            self.bar = Progress(*columns, console=Console(file=out), expand=True)
            self.task = self.bar.add_task(text, total=total)
            self.bar.start()

    def is_due(self) -> bool:
        return time.monotonic() > self.shown_s + (DRAW_S if self.bar else LINE_S)

    def show(self, text: str, done: int) -> None:
        self.shown_s = time.monotonic()
        if self.bar:
            self.bar.update(self.task, completed=done, description=text)
        else:
            self.print(text)

    def print(self, line: str, file: TextIO | None = None) -> None:
        """Print a line, above the bar if there is one. `file`: a stream other than the bar's stream."""
        self.shown_s = time.monotonic()
        print(line, file=file or self.file, flush=True)

    def stop(self) -> None:
        if self.bar:
            self.bar.stop()


class TrainingProgress:
    """Progress of a run.

    Args:
        epochs: Epochs of the whole run.
        step: First step of this process.
        steps: Steps of the whole run.
        unit: Word for samples, for example `images`.
        val_name: Word for the split that the `val/...` values describe.
    """

    def __init__(self, epochs: int, step: int, steps: int, unit: str, val_name: str = "val"):
        self.epochs, self.step, self.steps, self.unit = epochs, step, steps, unit
        self.val_name = val_name
        self.values: dict[str, float] = {}  # latest value of each metric
        self.began: tuple[float, int] | None = None  # time and step of the first advance()
        self.display = Display(steps, "starting")

    def advance(self, step: int) -> None:
        """Show the number of finished steps. Call this method after each micro-batch."""
        self.step = step
        self.began = self.began or (time.monotonic(), step)
        self.tell("")

    def tell(self, activity: str) -> None:
        """Show an activity of the run other than training steps."""
        if self.display.is_due():
            position = f"step {self.step:,}/{self.steps:,}"
            values = {name: self.values[name] for name in BAR_VALUES if name in self.values}
            text = "  ".join(filter(None, [position, activity, self._left(), self._numbers(values)]))
            self.display.show(text if self.display.bar else activity or position, self.step)

    def show(self, step: int, epoch: float, values: dict[str, float]) -> None:
        """Print a line of the log. If there is a bar, print only evaluations."""
        self.step, self.values = step, self.values | values
        position = f"epoch {math.ceil(epoch)}/{self.epochs}  step {step:,}/{self.steps:,}"
        if not self.display.bar:
            self.display.print("  ".join(filter(None, [position, self._numbers(values), self._left()])))
        elif "val/loss" in values:
            self.display.print(f"{position}  {self._numbers(values)}")

    def stop(self) -> None:
        if self.display.bar:
            self.display.shown_s = -math.inf
            self.tell("")
        self.display.stop()

    def _numbers(self, values: dict[str, float]) -> str:
        formats = {"lr": "lr {:.2e}", "images_per_s": f"{{:,.0f}} {self.unit}/s", "mfu_pct": "MFU {:.1f} %"}
        prefixes = {"train": "", "val": f"{self.val_name} "}
        parts = []
        for name, value in values.items():
            split, _, short = name.partition("/")
            label = prefixes.get(split, f"{split} ") + short.replace("_", " ")
            parts.append(formats[short].format(value) if short in formats else f"{label} {value:.4f}")
        return "  ".join(parts)

    def _left(self) -> str:
        """Return the remaining time at the mean speed since the first advance(), including evaluations."""
        if not self.began or self.step <= self.began[1]:
            return ""
        seconds_per_step = (time.monotonic() - self.began[0]) / (self.step - self.began[1])
        return f"{_duration((self.steps - self.step) * seconds_per_step)} left"


class ReadingProgress:
    """Progress of reading one split, measured in bytes of image data.

    Args:
        total: Bytes of all images.
        doing: Word with which tell() describes the activity.
    """

    def __init__(self, split: str, total: int, doing: str = "read"):
        self.split, self.total, self.doing, self.began_s = split, total, doing, time.monotonic()
        self.display = Display(total, split)

    def __enter__(self) -> "ReadingProgress":
        return self

    def __exit__(self, *_) -> None:
        self.display.stop()

    def tell(self, done: int) -> None:
        """Show progress in bytes that are not image data, for example uploaded bytes."""
        self._show(f"{self.split}  {self._gib(done)} {self.doing}", done)

    def show(self, images: int, read: int) -> None:
        seconds_per_byte = (time.monotonic() - self.began_s) / max(1, read)
        left = f"{_duration((self.total - read) * seconds_per_byte)} left"
        self._show(f"{self._text(images, read)}  {left}", read)

    def end(self, images: int, read: int) -> None:
        self.display.print(f"{self._text(images, read)}  done")

    def _show(self, text: str, read: int) -> None:
        if self.display.is_due():
            self.display.show(text, read)

    def _text(self, images: int, read: int) -> str:
        seconds = max(time.monotonic() - self.began_s, 1e-3)
        speed = f"{images / seconds:,.0f} images/s  {read / seconds / 1e6:,.0f} MB/s"
        return f"{self.split}  {images:,} images  {self._gib(read)}  {speed}"

    def _gib(self, read: int) -> str:
        return f"{read / 2**30:,.2f} of {self.total / 2**30:,.2f} GiB"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
