"""What a run shows while it goes on: a live line on a terminal, plain lines elsewhere."""

import math
import os
import sys
import time


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
        if time.perf_counter() - self.shown > 30:
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
