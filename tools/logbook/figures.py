"""Log book plots, such as curves, telemetry, confusion matrices, mistakes and comparisons."""

import math
from collections.abc import Sequence
from glob import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from onecurve.run.plots import Panel, curves_panel, draw_confusion, draw_panels
from onecurve.system.files import discard, files_inside
from onecurve.system.text import plural
from tools.logbook.comparison import Comparison
from tools.logbook.run_record import RunRecord, read_png_as_rgb
from tools.logbook.spent import MainProcess, main_processes


def draw_run(run: RunRecord, folder: Path) -> list[str]:
    """Replace a folder with new plots of a run. Return the plots' file names.

    If an image in the run folder is broken, add a message to run.problems.
    """
    scratch = folder.with_name(f".{folder.name}.tmp")
    discard(scratch)
    scratch.mkdir(parents=True)
    title = f"{run.model} on {run.data_name}, {run.strategies_and_devices}"
    panels_by_plot = {"curves": _curve_panels(run), "telemetry": _telemetry_panels(run)}
    for plot_name, panel_rows in panels_by_plot.items():
        if panel_rows:
            draw_panels(scratch / f"{plot_name}.png", panel_rows, title)
    for report_name, report in {"training": run.confusion, **run.validation_reports}.items():
        if {"confusion", "mistakes"} & report.keys():
            split_text = f", {report['split']} split" if "split" in report else ""
            draw_confusion(scratch / f"confusion_{report_name}.png", report, title + split_text)
        for worst_images in files_inside(run.folder, f"validation/{escape(report_name)}/worst.png"):
            try:
                read_png_as_rgb(worst_images).save(scratch / f"worst_{report_name}.png")
            except ValueError as error:
                run.problems.append(f"{worst_images.relative_to(run.folder)} {error}")
    discard(folder)  # plots that an earlier call has drawn
    scratch.rename(folder)
    return sorted(plot.name for plot in folder.iterdir())


def time_unit(seconds: float) -> tuple[str, float]:
    """Return a suitable unit for a duration, and the number of seconds per unit."""
    if seconds < 600:  # 10 min
        return "s", 1
    return ("min", 60) if seconds < 10_000 else ("h", 3600)  # 10,000 s are about 3 h


def _curve_panels(run: RunRecord) -> list[list[Panel]]:
    """Return rows of panels with loss, accuracy, learning rate and throughput.

    Loss and accuracy are plotted against steps and time, and the other two against steps. If the number of
    hosts changed, the last row plots it and the throughput against time. Rows without curves are left out.
    """
    x_unit, unit_s = time_unit(max((log_line["wall_s"] for log_line in run.metrics), default=0))
    time_key = f"time, {x_unit}"
    log_lines = [log_line | {time_key: log_line["wall_s"] / unit_s} for log_line in run.metrics]
    loss_keys, accuracy_keys = ("train/loss", "val/loss"), ("val/accuracy", "val/raw_accuracy")
    loss_row = [curves_panel(log_lines, x_key, "loss", loss_keys) for x_key in ("step", time_key)]
    accuracy_row = [curves_panel(log_lines, x_key, "accuracy", accuracy_keys) for x_key in ("step", time_key)]
    throughput_label, throughput_keys = f"{run.unit}/s", ("train/images_per_s",)
    throughput_row = [
        curves_panel(log_lines, "step", "learning rate", ("train/lr",)),
        curves_panel(log_lines, "step", throughput_label, throughput_keys),
    ]
    panel_rows = [loss_row, accuracy_row, throughput_row]
    if host_count_panel := _host_count_panel(run, time_key, unit_s):
        throughput_panel = curves_panel(log_lines, time_key, throughput_label, throughput_keys)
        panel_rows.append([host_count_panel, throughput_panel])
    has_accuracy = bool(accuracy_row[0].curves)
    for loss_panel in loss_row:
        loss_panel.has_log_scale = not has_accuracy  # a regression loss falls by several orders of magnitude
    return [panel_row for panel_row in panel_rows if panel_row[0].curves]


def _host_count_panel(run: RunRecord, time_label: str, unit_s: float) -> Panel | None:
    """Return a panel of the number of hosts over time, or None if no host joined or left the job."""
    host_changes = run.host_changes
    if not host_changes:
        return None
    change_times, host_counts = [0.0], [host_changes[0]["hosts_before"]]
    for host_change in host_changes:  # two points at the same time draw a vertical line
        change_times += [host_change["wall_s"] / unit_s] * 2
        host_counts += [host_counts[-1], host_change["hosts"]]
    change_times.append(run.metrics[-1]["wall_s"] / unit_s)
    host_counts.append(host_counts[-1])
    return Panel(time_label, "hosts", {"hosts": (change_times, host_counts)}, starts_at_zero=True)


def _telemetry_panels(run: RunRecord) -> list[list[Panel]]:
    """Return one row of panels with the GPUs' utilisation, memory and power over time, or no rows.

    Without GPUs, the panels show the hosts' CPU utilisation and memory.
    """
    has_gpus = any(telemetry_line.get("gpus") for lines in run.telemetry.values() for telemetry_line in lines)
    label_by_key = {"cpu_pct": "CPU utilisation, %", "memory_gib": "host memory in use, GiB"}
    if has_gpus:
        label_by_key = {"utilisation_pct": "GPU utilisation, %", "memory_gib": "GPU memory in use, GiB"}
        label_by_key |= {"power_w": "power, W"}
    first_time = min((line["t"] for lines in run.telemetry.values() for line in lines), default=0.0)
    # For a run from an earlier version, which does not record its main processes, assume a single process.
    processes = main_processes(run) or [MainProcess(first_time, math.inf, 0.0)]

    def elapsed_seconds_at(timestamp: float) -> float:
        """Return the run's elapsed seconds at a time, excluding pauses between main processes."""
        durations = (min(timestamp, process.ended_at) - process.began_at for process in processes)
        return sum(max(0.0, duration) for duration in durations)

    samples: list[tuple[float, str, dict[str, Any]]] = []  # seconds, curve name and measured values
    for host, host_lines in run.telemetry.items():
        for telemetry_line in host_lines:
            if "host" in telemetry_line:  # a process's first line contains no measured values
                continue
            seconds = elapsed_seconds_at(telemetry_line["t"])
            if has_gpus:
                gpus = telemetry_line.get("gpus", [])
                samples += [(seconds, f"{host}, GPU {gpu.get('index')}", gpu) for gpu in gpus]
            else:
                samples.append((seconds, host, telemetry_line))
    x_unit, unit_s = time_unit(max((seconds for seconds, *_ in samples), default=0))
    telemetry_panels = []
    for sample_key, axis_label in label_by_key.items():
        curves: dict[str, tuple[list[float], list[float]]] = {}
        for seconds, curve_name, measured_values in samples:
            if measured_values.get(sample_key) is not None:
                curve_times, curve_values = curves.setdefault(curve_name, ([], []))
                curve_times.append(seconds / unit_s)
                curve_values.append(measured_values[sample_key])
        telemetry_panels.append(Panel(f"time, {x_unit}", axis_label, dict(curves), starts_at_zero=True))
    panels_with_curves = [panel for panel in telemetry_panels if panel.curves]
    return [panels_with_curves] if panels_with_curves else []


def draw_comparison(comparison: Comparison, file: Path) -> None:
    """Plot each run's accuracy, loss, throughput and total time, or their means over seeds, as a PNG file."""
    first_run, groups = comparison.runs[0], comparison.groups
    if groups:
        runs_by_name = {f"{group.name} ({plural(len(group.runs), 'run')})": group.runs for group in groups}
        accuracy_panel = Panel("step", "accuracy, mean over runs")
        loss_panel = Panel("step", "train/loss, mean over runs")
        accuracy_x_key, accuracy_x_divisor = "step", 1.0
    else:
        runs_by_name = {name: (run,) for name, run in zip(comparison.names, comparison.runs, strict=True)}
        logged_times = [log_line["wall_s"] for run in comparison.runs for log_line in run.metrics]
        x_unit, unit_s = time_unit(max(logged_times, default=0))
        accuracy_panel, loss_panel = Panel(f"time, {x_unit}", "accuracy"), Panel("step", "train/loss")
        accuracy_x_key, accuracy_x_divisor = "wall_s", unit_s
    bar_panels = {"images_per_s": Panel(f"{first_run.unit}/s", ""), "wall_s": Panel("total time, s", "")}
    for curve_name, runs in runs_by_name.items():
        _add_mean_curve(accuracy_panel, curve_name, runs, "val/accuracy", accuracy_x_key, accuracy_x_divisor)
        _add_mean_curve(loss_panel, curve_name, runs, "train/loss", "step", 1.0)
        for result_key, bar_panel in bar_panels.items():
            results = [run.result_values[result_key] for run in runs if result_key in run.result_values]
            if results:
                bar_panel.bars[curve_name] = fmean(results)
    plot_title = f"{first_run.model} on {first_run.data_name}"
    draw_panels(file, [[accuracy_panel, loss_panel], list(bar_panels.values())], plot_title)


def _add_mean_curve(
    panel: Panel, curve_name: str, runs: Sequence[RunRecord], y_key: str, x_key: str, x_divisor: float
) -> None:
    """Add the curve of the runs' mean values to a panel, at the steps or times that all runs logged.

    Logged steps or times are divided by `x_divisor`, for example 60 for minutes.
    """
    logged_lines = [[line for line in run.metrics if y_key in line] for run in runs]
    run_curves = [{line[x_key] / x_divisor: line[y_key] for line in run_lines} for run_lines in logged_lines]
    if common_x := sorted(set.intersection(*map(set, run_curves))):
        panel.curves[curve_name] = (common_x, [fmean(curve[x] for curve in run_curves) for x in common_x])
