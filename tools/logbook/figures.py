"""Log book plots, such as curves, telemetry, confusion matrices, mistakes and comparisons."""

import math
from glob import escape
from pathlib import Path
from statistics import fmean

from onecurve.run.plots import Panel, curves_panel, draw_confusion, draw_panels
from onecurve.system.files import discard, own_files
from onecurve.system.text import plural
from tools.logbook.comparison import Comparison
from tools.logbook.run_record import RunRecord, read_picture
from tools.logbook.spent import MainProcess, main_processes


def draw_run(run: RunRecord, folder: Path) -> list[str]:
    """Replace a folder with new plots of a run. Return the plots' file names."""
    scratch = folder.with_name(f".{folder.name}.tmp")
    discard(scratch)
    scratch.mkdir(parents=True)
    title = f"{run.model} on {run.data}, {run.where}"
    for name, rows in {"curves": _curves(run), "telemetry": _telemetry(run)}.items():
        if rows:
            draw_panels(scratch / f"{name}.png", rows, title)
    for name, report in {"training": run.confusion, **run.reports}.items():
        if {"confusion", "mistakes"} & report.keys():
            split = f", {report['split']} split" if "split" in report else ""
            draw_confusion(scratch / f"confusion_{name}.png", report, title + split)
        for worst in own_files(run.folder, f"validation/{escape(name)}/worst.png"):
            try:
                read_picture(worst).save(scratch / f"worst_{name}.png")
            except ValueError as error:
                run.problems.append(f"{worst.relative_to(run.folder)} {error}")
    discard(folder)
    scratch.rename(folder)
    return sorted(path.name for path in folder.iterdir())


def time_unit(seconds: float) -> tuple[str, float]:
    """Return a suitable unit for a duration, and the number of seconds per unit."""
    if seconds < 600:
        return "s", 1
    return ("min", 60) if seconds < 10_000 else ("h", 3600)


def _curves(run: RunRecord) -> list[list[Panel]]:
    """Plot loss and accuracy against steps and time, and learning rate and throughput against steps."""
    unit, unit_s = time_unit(max((line["wall_s"] for line in run.metrics), default=0))
    time = f"time, {unit}"
    lines = [line | {time: line["wall_s"] / unit_s} for line in run.metrics]
    loss, accuracy = ("train/loss", "val/loss"), ("val/accuracy", "val/raw_accuracy")
    rows = [
        [curves_panel(lines, "step", "loss", loss), curves_panel(lines, time, "loss", loss)],
        [curves_panel(lines, "step", "accuracy", accuracy), curves_panel(lines, time, "accuracy", accuracy)],
        [
            curves_panel(lines, "step", "learning rate", ("train/lr",)),
            curves_panel(lines, "step", f"{run.unit}/s", ("train/images_per_s",)),
        ],
    ]
    if over_time := _hosts_over_time(run, time, unit_s):
        rows.append([over_time, curves_panel(lines, time, f"{run.unit}/s", ("train/images_per_s",))])
    has_accuracy = bool(rows[1][0].curves)
    for loss_panel in rows[0]:
        loss_panel.has_log_scale = not has_accuracy  # a regression loss falls by several orders of magnitude
    return [row for row in rows if row[0].curves]


def _hosts_over_time(run: RunRecord, time: str, unit_s: float) -> Panel | None:
    """Plot the number of hosts against time. Return None if no host joined or left the job."""
    changes = run.changes
    if not changes:
        return None
    times, hosts = [0.0], [changes[0]["hosts_before"]]
    for change in changes:
        times += [change["wall_s"] / unit_s] * 2
        hosts += [hosts[-1], change["hosts"]]
    times.append(run.metrics[-1]["wall_s"] / unit_s)
    return Panel(time, "hosts", {"hosts": (times, [*hosts, hosts[-1]])}, starts_at_zero=True)


def _telemetry(run: RunRecord) -> list[list[Panel]]:
    """Plot the utilisation, memory and power of GPUs over time. Plot hosts if there are no GPUs."""
    has_gpus = any(line.get("gpus") for lines in run.telemetry.values() for line in lines)
    labels = {"cpu_pct": "CPU utilisation, %", "memory_gib": "host memory in use, GiB"}
    if has_gpus:
        labels = {"utilisation_pct": "GPU utilisation, %", "memory_gib": "GPU memory in use, GiB"}
        labels |= {"power_w": "power, W"}
    first_time = min((line["t"] for lines in run.telemetry.values() for line in lines), default=0.0)
    # Runs from earlier versions do not record their main processes.
    processes = main_processes(run) or [MainProcess(first_time, math.inf, 0.0)]

    def seconds_at(t: float) -> float:
        """Return the run's elapsed seconds at time t, excluding pauses between main processes."""
        return sum(max(0.0, min(t, process.ended_at) - process.began_at) for process in processes)

    points = [
        (seconds_at(line["t"]), f"{host}, GPU {device.get('index')}" if has_gpus else host, device)
        for host, lines in run.telemetry.items()
        for line in lines
        if "host" not in line
        for device in (line.get("gpus", []) if has_gpus else [line])
    ]
    unit, unit_s = time_unit(max((seconds for seconds, *_ in points), default=0))
    telemetry_panels = []
    for name, label in labels.items():
        curves: dict[str, tuple[list[float], list[float]]] = {}
        for seconds, curve, device in points:
            if device.get(name) is not None:
                times, values = curves.setdefault(curve, ([], []))
                times.append(seconds / unit_s)
                values.append(device[name])
        telemetry_panels.append(Panel(f"time, {unit}", label, dict(curves), starts_at_zero=True))
    with_curves = [curves_panel for curves_panel in telemetry_panels if curves_panel.curves]
    return [with_curves] if with_curves else []


def draw_comparison(comparison: Comparison, file: Path) -> None:
    """Plot each run's accuracy, loss, throughput and total time, or their means over seeds."""
    first, groups = comparison.runs[0], comparison.groups
    if groups:
        members = {f"{group.name} ({plural(len(group.runs), 'run')})": group.runs for group in groups}
        accuracy = Panel("step", "accuracy, mean over runs")
        loss = Panel("step", "train/loss, mean over runs")
        curves = [(accuracy, "val/accuracy", "step", 1.0), (loss, "train/loss", "step", 1.0)]
    else:
        members = {name: (run,) for name, run in zip(comparison.names, comparison.runs, strict=True)}
        times = [line["wall_s"] for run in comparison.runs for line in run.metrics]
        unit, unit_s = time_unit(max(times, default=0))
        accuracy, loss = Panel(f"time, {unit}", "accuracy"), Panel("step", "train/loss")
        curves = [(accuracy, "val/accuracy", "wall_s", unit_s), (loss, "train/loss", "step", 1.0)]
    bars = {"images_per_s": Panel(f"{first.unit}/s", ""), "wall_s": Panel("total time, s", "")}
    for name, runs in members.items():
        for curve_panel, key, x_key, x_unit in curves:
            lines = [[line for line in run.metrics if key in line] for run in runs]
            run_curves = [{line[x_key] / x_unit: line[key] for line in run_lines} for run_lines in lines]
            if common_x := sorted(set.intersection(*map(set, run_curves))):
                means = [fmean(curve[x] for curve in run_curves) for x in common_x]
                curve_panel.curves[name] = (common_x, means)
        for fact, bar_panel in bars.items():
            if values := [run.facts[fact] for run in runs if fact in run.facts]:
                bar_panel.bars[name] = fmean(values)
    draw_panels(file, [[accuracy, loss], list(bars.values())], f"{first.model} on {first.data}")
