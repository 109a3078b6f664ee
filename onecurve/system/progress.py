"""Shows the progress of runs and of data preparation, as a bar on a terminal or as plain lines elsewhere."""

import math
import os
import sys
import time
from typing import TextIO

LINE_INTERVAL_S = 30  # seconds without output after which a plain line is printed
REDRAW_INTERVAL_S = 0.25  # seconds between updates of the text next to the bar
# Metrics in the text next to the bar, in this order
BAR_METRICS = ("train/images_per_s", "train/loss", "val/accuracy", "train/mfu_pct", "train/lr")


class Display:
    """Progress bar with a text on a terminal, or plain lines every LINE_INTERVAL_S seconds elsewhere.

    Args:
        total_work: Total amount of work, in the unit of `finished_work` in show().
        text: Text next to the bar.
        stream: Output stream. None means stdout.
    """

    def __init__(self, total_work: int, text: str, stream: TextIO | None = None):
        self.stream = stream  # stays None for stdout, because the bar replaces sys.stdout
        output_stream = stream or sys.stdout
        self.shown_s = time.monotonic()  # time of the last output
        self.bar = None
        if output_stream.isatty() and "NO_COLOR" not in os.environ:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn
            from rich.table import Column

            text_layout = Column(no_wrap=True, overflow="ellipsis", ratio=1)
            text_column = TextColumn("{task.description}", markup=False, table_column=text_layout)
            bar_columns = BarColumn(bar_width=8), text_column
            self.bar = Progress(*bar_columns, console=Console(file=output_stream), expand=True)
            self.bar_task = self.bar.add_task(text, total=total_work)
            self.bar.start()

    def is_due(self) -> bool:
        """Return True if the last output is older than the interval between two outputs."""
        interval_s = REDRAW_INTERVAL_S if self.bar else LINE_INTERVAL_S
        return time.monotonic() > self.shown_s + interval_s

    def show(self, text: str, finished_work: int) -> None:
        """Update the bar and the text next to it, or print the text as a line if there is no bar."""
        self.shown_s = time.monotonic()
        if self.bar:
            self.bar.update(self.bar_task, completed=finished_work, description=text)
        else:
            self.print(text)

    def print(self, line: str, stream: TextIO | None = None) -> None:
        """Print a line above the bar. `stream` replaces the default stream."""
        self.shown_s = time.monotonic()
        print(line, file=stream or self.stream, flush=True)

    def stop(self) -> None:
        if self.bar:
            self.bar.stop()


class TrainingProgress:
    """Display of a training run's progress.

    Args:
        total_epochs: Total number of epochs in the run.
        step: Number of steps that earlier processes have finished.
        total_steps: Total number of steps in the run.
        unit: Word for samples, such as `images`.
        val_name: Name of the split in the displayed `val/...` metrics.
    """

    def __init__(self, total_epochs: int, step: int, total_steps: int, unit: str, val_name: str = "val"):
        self.total_epochs, self.step, self.total_steps = total_epochs, step, total_steps
        self.unit, self.val_name = unit, val_name
        self.latest_metrics: dict[str, float] = {}  # latest value of each metric
        self.began_s: float | None = None  # time of the first advance()
        self.first_step = 0  # number of finished steps at the first advance()
        self.display = Display(total_steps, "starting")

    def advance(self, step: int) -> None:
        """Update the number of finished steps, and the display if it is due.

        Call this method after each micro-batch.
        """
        self.step = step
        if self.began_s is None:
            self.began_s, self.first_step = time.monotonic(), step
        self.tell(activity="")

    def tell(self, activity: str) -> None:
        """Show an activity of the run, such as an evaluation, if the display is due.

        An empty activity means that the run is training.
        """
        if self.display.is_due():
            step_text = f"step {self.step:,}/{self.total_steps:,}"
            metrics = {name: self.latest_metrics[name] for name in BAR_METRICS if name in self.latest_metrics}
            bar_parts = [step_text, activity, self._remaining_time(), self._format_metrics(metrics)]
            bar_text = "  ".join(filter(None, bar_parts))
            self.display.show(bar_text if self.display.bar else activity or step_text, self.step)

    def show(self, step: int, epoch: float, metrics: dict[str, float]) -> None:
        """Print metrics as a line. A terminal with a bar shows only evaluation lines."""
        self.step, self.latest_metrics = step, self.latest_metrics | metrics
        position_text = f"epoch {math.ceil(epoch)}/{self.total_epochs}  step {step:,}/{self.total_steps:,}"
        if not self.display.bar:
            line_parts = [position_text, self._format_metrics(metrics), self._remaining_time()]
            self.display.print("  ".join(filter(None, line_parts)))
        elif "val/loss" in metrics:
            self.display.print(f"{position_text}  {self._format_metrics(metrics)}")

    def stop(self) -> None:
        """Show the final step next to the bar, and stop the bar."""
        if self.display.bar:
            self.display.shown_s = -math.inf  # makes the display due
            self.tell(activity="")
        self.display.stop()

    def _format_metrics(self, metrics: dict[str, float]) -> str:
        """Join metrics to a text, for example `1,200 images/s  loss 0.5213  val accuracy 0.9100`."""
        speed_template = f"{{:,.0f}} {self.unit}/s"
        template_by_name = {"lr": "lr {:.2e}", "images_per_s": speed_template, "mfu_pct": "MFU {:.1f} %"}
        prefix_by_split = {"train": "", "val": f"{self.val_name} "}
        metric_texts = []
        for metric_key, metric_value in metrics.items():
            split, _, metric_name = metric_key.partition("/")
            label = prefix_by_split.get(split, f"{split} ") + metric_name.replace("_", " ")
            template = template_by_name.get(metric_name)
            metric_texts.append(template.format(metric_value) if template else f"{label} {metric_value:.4f}")
        return "  ".join(metric_texts)

    def _remaining_time(self) -> str:
        """Estimate the remaining time from the mean speed since the first advance(), evaluations included."""
        if self.began_s is None or self.step <= self.first_step:
            return ""  # there is no speed yet
        seconds_per_step = (time.monotonic() - self.began_s) / (self.step - self.first_step)
        return f"{_format_duration((self.total_steps - self.step) * seconds_per_step)} left"


class ReadingProgress:
    """Display of the progress of reading one split, measured in bytes of image data.

    Args:
        split: Name of the split.
        total_bytes: Number of bytes of all images in the split.
        verb: Word for the activity in the output of tell(), such as `read`.
    """

    def __init__(self, split: str, total_bytes: int, verb: str = "read"):
        self.split, self.total_bytes, self.verb = split, total_bytes, verb
        self.began_s = time.monotonic()  # time at which reading began
        self.display = Display(total_bytes, split)

    def __enter__(self) -> "ReadingProgress":
        return self

    def __exit__(self, *_) -> None:
        self.display.stop()

    def tell(self, done_bytes: int) -> None:
        """Show the number of processed bytes that are not image data, such as uploaded bytes."""
        self._show_if_due(f"{self.split}  {self._format_gib_of_total(done_bytes)} {self.verb}", done_bytes)

    def show(self, image_count: int, read_bytes: int) -> None:
        """Show the numbers of images and bytes read so far, and the remaining time, if the display is due."""
        seconds_per_byte = (time.monotonic() - self.began_s) / max(1, read_bytes)
        remaining_time = _format_duration((self.total_bytes - read_bytes) * seconds_per_byte)
        self._show_if_due(
            f"{self._describe_progress(image_count, read_bytes)}  {remaining_time} left", read_bytes
        )

    def end(self, image_count: int, read_bytes: int) -> None:
        """Print the final numbers of images and bytes as a line."""
        self.display.print(f"{self._describe_progress(image_count, read_bytes)}  done")

    def _show_if_due(self, progress_text: str, done_bytes: int) -> None:
        if self.display.is_due():
            self.display.show(progress_text, done_bytes)

    def _describe_progress(self, image_count: int, read_bytes: int) -> str:
        """Describe the numbers of images and bytes read so far, and the mean reading speed."""
        elapsed_s = max(time.monotonic() - self.began_s, 1e-3)  # avoids a division by zero
        speed_text = f"{image_count / elapsed_s:,.0f} images/s  {read_bytes / elapsed_s / 1e6:,.0f} MB/s"
        return f"{self.split}  {image_count:,} images  {self._format_gib_of_total(read_bytes)}  {speed_text}"

    def _format_gib_of_total(self, done_bytes: int) -> str:
        return f"{done_bytes / 2**30:,.2f} of {self.total_bytes / 2**30:,.2f} GiB"


def _format_duration(duration_s: float) -> str:
    """Format a duration in seconds as minutes:seconds or hours:minutes:seconds."""
    minutes, seconds = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
