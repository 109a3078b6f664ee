"""What a run, or a preparation, shows while it goes on: a live line on a terminal, plain lines elsewhere."""

import math
import os
import sys
import time

LINE_S = 30  # of silence


def progress(epochs: int, first_step: int, steps: int) -> "Lines | Bar":
    """epochs, steps: of the whole run. first_step: where it goes on."""
    on_terminal = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return (Bar if on_terminal else Lines)(epochs, first_step, steps)


class Lines:
    """Progress as plain lines, for logs and pipes."""

    def __init__(self, epochs: int, first_step: int, steps: int):
        self.epochs, self.first_step, self.steps = epochs, first_step, steps
        self.began = self.shown = time.perf_counter()

    def show(self, step: int, epoch: float, values: dict[str, float]) -> None:
        per_step_s = (time.perf_counter() - self.began) / max(1, step - self.first_step)
        left_s = per_step_s * (self.steps - step)
        print(f"{_where(step, epoch, self)}  {_numbers(values)}  {_duration(left_s)} left", flush=True)
        self.shown = time.perf_counter()

    def tell(self, doing: str) -> None:
        if time.perf_counter() - self.shown > LINE_S:
            print(doing, flush=True)
            self.shown = time.perf_counter()

    def stop(self) -> None:
        pass


class Bar:
    """Progress as one live line on a terminal; evaluations stay above it."""

    def __init__(self, epochs: int, first_step: int, steps: int):
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.epochs, self.steps, self.values = epochs, steps, {}
        columns = [
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TimeRemainingColumn(),
            TextColumn("left  {task.fields[doing]}"),
        ]
        self.bar = Progress(*columns, refresh_per_second=4)
        self.task = self.bar.add_task("starting", total=steps, completed=first_step, doing="")
        self.bar.start()

    def show(self, step: int, epoch: float, values: dict[str, float]) -> None:
        self.values |= values
        names = ("train/loss", "val/accuracy", "train/lr", "train/images_per_s")
        shown = {name: self.values[name] for name in names if name in self.values}
        line = f"{_where(step, epoch, self)}  {_numbers(shown)}"
        self.bar.update(self.task, completed=step, description=line, doing="")
        if "val/loss" in values:
            self.bar.console.print(f"{_where(step, epoch, self)}  {_numbers(values)}")

    def tell(self, doing: str) -> None:
        self.bar.update(self.task, doing=doing)

    def stop(self) -> None:
        self.bar.stop()


class Reading:
    """Of one split, by the bytes of its images: a bar on a terminal, else a line every LINE_S."""

    def __init__(self, split: str, images: int, read: int, total: int, doing: str = "read"):
        """images and read: done before an interruption. doing: of tell()."""
        self.split, self.first_image, self.first_byte, self.total = split, images, read, total
        self.doing, self.showing = doing, False
        self.began_s = self.shown_s = time.monotonic()
        self.bar = None
        if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(20), TimeRemainingColumn())
            self.bar = Progress(*columns, refresh_per_second=4)
            self.task = self.bar.add_task(split, total=total, completed=read)

    def __enter__(self) -> "Reading":
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_) -> None:
        if self.bar:
            self.bar.stop()

    def tell(self, done: int) -> None:
        """Bytes out of which no images come: what is only hashed, say. The clock begins behind them: once
        there are images, this does nothing."""
        if self.showing:
            return
        self.began_s = time.monotonic()
        line = f"{self.split}  {done / 2**30:,.2f} of {self.total / 2**30:,.2f} GiB {self.doing}"
        if self.bar:
            self.bar.update(self.task, completed=done, description=line)
        elif self.began_s > self.shown_s + LINE_S:
            self.shown_s = self.began_s
            print(line, flush=True)

    def show(self, images: int, read: int) -> None:
        if self.bar and not self.showing:
            self.bar.reset(self.task, completed=read)  # and so its speed
        self.showing = True
        if self.bar:
            self.bar.update(self.task, completed=read, description=self._line(images, read))
        elif time.monotonic() > self.shown_s + LINE_S:
            self.shown_s = time.monotonic()
            left_s = (self.total - read) * (self.shown_s - self.began_s) / (read - self.first_byte)
            print(f"{self._line(images, read)}  {_duration(left_s)} left", flush=True)

    def end(self, images: int, read: int) -> None:
        if self.bar:
            self.bar.update(self.task, completed=self.total)
        print(f"{self._line(images, read)}  done", flush=True)

    def _line(self, images: int, read: int) -> str:
        seconds = max(time.monotonic() - self.began_s, 1e-3)
        speed = f"{(images - self.first_image) / seconds:,.0f} images/s"
        return (
            f"{self.split}  {images:,} images  {read / 2**30:,.2f} of {self.total / 2**30:,.2f} GiB  {speed}"
            f"  {(read - self.first_byte) / seconds / 1e6:,.0f} MB/s"
        )


def _where(step: int, epoch: float, progress: Lines | Bar) -> str:
    return f"epoch {math.ceil(epoch)}/{progress.epochs}  step {step:,}/{progress.steps:,}"


def _numbers(values: dict[str, float]) -> str:
    forms = {"lr": "lr {:.2e}", "images_per_s": "{:,.0f} images/s"}
    parts = []
    for name, value in values.items():
        kind, _, short = name.partition("/")
        label = f"{kind} {short}".replace("train ", "").replace("_", " ")
        parts.append(forms[short].format(value) if short in forms else f"{label} {value:.4f}")
    return "  ".join(parts)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
