"""Progress of a run or a preparation: a live line on a terminal, plain lines elsewhere."""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

LINE_S = 30  # without output, after which a line is printed
MIN_BAR, MAX_BAR = 8, 20  # characters


def progress(
    epochs: int, first_step: int, steps: int, batch_size: int, unit: str
) -> "PlainProgress | BarProgress":
    """A live line on a terminal, else plain lines.

    epochs, steps: of the whole run. first_step: of this process. unit: the word for samples, as `images`.
    """
    return (BarProgress if _is_terminal() else PlainProgress)(epochs, first_step, steps, batch_size, unit)


class PlainProgress:
    """Progress as plain lines, for logs and pipes."""

    def __init__(self, epochs: int, first_step: int, steps: int, batch_size: int, unit: str):
        self.epochs, self.step, self.steps = epochs, first_step, steps
        self.batch_size, self.unit = batch_size, unit
        self.began: tuple[float, int] | None = None  # time and step of the first call of advance
        self.shown = time.perf_counter()

    def advance(self, step: int) -> None:
        """Shows the number of finished steps. Called after each micro-batch."""
        self._count(step)
        self.tell(f"step {step:,}/{self.steps:,}")

    def show(self, step: int, epoch: float, values: dict[str, float]) -> None:
        self.step = step
        parts = [_where(step, epoch, self), _numbers(values, self.unit), self._left()]
        print("  ".join(filter(None, parts)), flush=True)
        self.shown = time.perf_counter()

    def tell(self, doing: str) -> None:
        if time.perf_counter() - self.shown > LINE_S:
            print(doing, flush=True)
            self.shown = time.perf_counter()

    def stop(self) -> None:
        pass

    def _count(self, step: int) -> None:
        self.step = step
        self.began = self.began or (time.perf_counter(), step)

    def _steps_per_s(self) -> float | None:
        """Speed since the first call of advance(), including evaluations and saves; None before one step."""
        if not self.began or self.step <= self.began[1]:
            return None
        return (self.step - self.began[1]) / max(1e-9, time.perf_counter() - self.began[0])

    def _left(self) -> str:
        steps_per_s = self._steps_per_s()
        return f"{_duration((self.steps - self.step) / steps_per_s)} left" if steps_per_s else ""


class BarProgress(PlainProgress):
    """Progress as one live line on a terminal; evaluations stay above it."""

    def __init__(self, epochs: int, first_step: int, steps: int, batch_size: int, unit: str):
        super().__init__(epochs, first_step, steps, batch_size, unit)
        self.epochs_per_step, self.doing = 0.0, "starting"
        self.values: dict[str, float] = {}  # the newest ones
        self.line = LiveLine(lambda: (self.step / self.steps, self._parts()))
        self.line.start()

    def advance(self, step: int) -> None:
        self._count(step)
        self.doing = ""

    def show(self, step: int, epoch: float, values: dict[str, float]) -> None:
        self.step, self.epochs_per_step, self.doing = step, epoch / step, ""
        self.values |= values
        if "val/loss" in values:
            self.line.print(f"{_where(step, epoch, self)}  {_numbers(values, self.unit)}")

    def tell(self, doing: str) -> None:
        self.doing = doing

    def stop(self) -> None:
        self.doing = ""
        self.line.stop()

    def _parts(self) -> list[tuple[int, str]]:
        steps_per_s, speed = self._steps_per_s(), self.values.get("train/images_per_s")
        epoch = max(1, math.ceil(round(self.step * self.epochs_per_step, 6)))
        if speed is None and steps_per_s:
            speed = steps_per_s * self.batch_size

        def value(name: str) -> str:
            return _numbers({name: self.values[name]}, self.unit) if name in self.values else ""

        return [
            (5, f"epoch {epoch}/{self.epochs}"),
            (0, f"step {self.step:,}/{self.steps:,}"),
            (1, self.doing),
            (4, value("train/loss")),
            (6, value("val/accuracy")),
            (7, value("train/lr")),
            (8, value("train/mfu_pct")),
            (3, "" if speed is None else _numbers({"train/images_per_s": speed}, self.unit)),
            (2, self._left()),
        ]


class LiveLine:
    """One line at the bottom of a terminal: a bar, and as many parts beside it as fit, none truncated.

    look: returns the finished share, and the parts in order, each with its priority (0 is the highest). It is
    called four times a second from a thread.
    """

    def __init__(self, look: Callable[[], tuple[float, list[tuple[int, str]]]]):
        from rich.live import Live

        self.look = look
        self.live = Live(self, refresh_per_second=4)
        self.start, self.stop = self.live.start, self.live.stop

    def print(self, line: str) -> None:
        """Prints above the live line."""
        self.live.console.print(line, soft_wrap=True)

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        share, parts = self.look()
        parts = [(priority, text) for priority, text in parts if text]
        room = options.max_width - MIN_BAR
        shown = set()
        for priority, text in sorted(parts):
            if len(text) + 2 <= room:
                room -= len(text) + 2
                shown.add(priority)
        line = Table.grid(padding=(0, 2, 0, 0))
        bar = ProgressBar(total=1, completed=share, width=min(MAX_BAR, MIN_BAR + room))
        line.add_row(bar, *(text for priority, text in parts if priority in shown))
        yield line


class ReadingProgress:
    """Progress of reading one split, by the bytes of its images: a bar on a terminal, else lines."""

    def __init__(self, split: str, images: int, read: int, total: int, doing: str = "read"):
        """images, read: images and bytes done before an interruption. doing: the word that tell() shows."""
        self.split, self.first_image, self.first_byte, self.total = split, images, read, total
        self.doing, self.showing = doing, False
        self.images, self.read = images, read
        self.began_s = self.shown_s = time.monotonic()
        self.line = LiveLine(self._look) if _is_terminal() else None

    def __enter__(self) -> "ReadingProgress":
        if self.line:
            self.line.start()
        return self

    def __exit__(self, *_) -> None:
        if self.line:
            self.line.stop()

    def tell(self, done: int) -> None:
        """Shows bytes that yield no images, such as bytes that are only hashed.

        They do not count for the speed. Does nothing once there are images.
        """
        if self.showing:
            return
        self.began_s, self.read = time.monotonic(), done
        if not self.line and self.began_s > self.shown_s + LINE_S:
            self.shown_s = self.began_s
            print(f"{self.split}  {self._gib()} {self.doing}", flush=True)

    def show(self, images: int, read: int) -> None:
        self.showing, self.images, self.read = True, images, read
        if not self.line and time.monotonic() > self.shown_s + LINE_S:
            self.shown_s = time.monotonic()
            print(f"{self._text()}  {self._left()}", flush=True)

    def end(self, images: int, read: int) -> None:
        self.showing, self.images, self.read = True, images, read
        print(f"{self._text()}  done", flush=True)

    def _look(self) -> tuple[float, list[tuple[int, str]]]:
        images, images_per_s, mb_per_s = self._measures()
        share = self.read / max(1, self.total)
        if not self.showing:
            return share, [(0, self.split), (1, f"{self._gib()} {self.doing}")]
        parts = [(1, self.split), (4, images), (0, self._gib()), (3, images_per_s), (5, mb_per_s)]
        return share, [*parts, (2, self._left())]

    def _text(self) -> str:
        images, images_per_s, mb_per_s = self._measures()
        return "  ".join([self.split, images, self._gib(), images_per_s, mb_per_s])

    def _measures(self) -> tuple[str, str, str]:
        seconds = max(time.monotonic() - self.began_s, 1e-3)
        images_per_s = (self.images - self.first_image) / seconds
        mb_per_s = (self.read - self.first_byte) / seconds / 1e6
        return f"{self.images:,} images", f"{images_per_s:,.0f} images/s", f"{mb_per_s:,.0f} MB/s"

    def _gib(self) -> str:
        return f"{self.read / 2**30:,.2f} of {self.total / 2**30:,.2f} GiB"

    def _left(self) -> str:
        read = self.read - self.first_byte
        seconds = time.monotonic() - self.began_s
        return f"{_duration((self.total - self.read) * seconds / read)} left" if read > 0 else ""


def _is_terminal() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def _where(step: int, epoch: float, progress: PlainProgress) -> str:
    return f"epoch {math.ceil(epoch)}/{progress.epochs}  step {step:,}/{progress.steps:,}"


def _numbers(values: dict[str, float], unit: str) -> str:
    forms = {"lr": "lr {:.2e}", "images_per_s": f"{{:,.0f}} {unit}/s", "mfu_pct": "MFU {:.1f} %"}
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
