"""A finished run on the terminal: tables of results and weights, curves, and the command for its page."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.checkpoint.format import EMA_FILE, MODEL_FILE, step_name
from common.system.files import read_json, read_lines
from common.system.paths import ROOT, python_command, shortest

if TYPE_CHECKING:  # imported where it is needed
    from rich.table import Table


def show(folder: Path) -> None:
    """Prints the folder's result.json and its weights as tables, and its files."""
    from rich.console import Console

    result, record = (read_json(folder / name) for name in ("result.json", "recipe.json"))
    lines = read_lines(folder / "metrics.jsonl")
    console = Console(markup=False, highlight=False)
    console.print(_results(result, record["unit"]))
    console.print(_weights(folder, result, lines))
    if result["best_accuracy"] is not None:
        validate = python_command(shortest(ROOT / "validate.py"), folder)
        console.print(f"all metrics of the best weights: {validate}", soft_wrap=True)
        if result["best_checkpoint"] != result["checkpoint"]:
            console.print(f"of the last: {validate} --which latest", soft_wrap=True)
    plots = sorted((folder / "plots").glob("*.png"))
    for path in (_to_use(folder, result), *plots, folder / "metrics.jsonl", folder / "result.json"):
        console.print(f"{path}", soft_wrap=True)


def _results(result: dict[str, Any], unit: str) -> "Table":
    from rich.table import Table

    place = f"{result['strategy']} on {result['processes']} x {result['device']}"
    table = Table("what", title=f"{result['script']}, {place}")
    table.add_column("value", justify="right")
    measure, val_name, test_name = _measure(result), result["val_name"], result.get("test_name")
    best, final = result[f"best_{measure}"], result[f"final_{measure}"]
    rows: dict[str, str] = {}
    if by := result.get("stopped_by"):
        rows[f"ended early, by {by}"] = f"step {result['steps']:,} of {result['total_steps']:,}"
    if test_name:
        rows[f"{measure} of the best weights ({test_name} split)"] = f"{result[f'test_{measure}']:.4f}"
        rows[f"{test_name} {unit}"] = f"{result['test_images']:,}"
    rows |= {
        f"best {measure} ({val_name} split)": f"{best:.4f} at step {result['best_step']:,}",
        f"final {measure} ({val_name} split)": f"{final:.4f}",
        f"{val_name} {unit}": f"{result['val_images']:,}",
        "training time": f"{result['train_s']:.1f} s",
        "whole time": f"{result['wall_s']:.1f} s",
        "speed": f"{result['images_per_s']:,.0f} {unit}/s",
        "peak memory of a process": f"{result['peak_memory_gib']:.2f} GiB",
    }
    for row in rows.items():
        table.add_row(*row)
    return table


def _weights(folder: Path, result: dict[str, Any], lines: list[dict[str, Any]]) -> "Table":
    """A table of the files with weights: their accuracy or loss, and their use."""
    from rich.table import Table

    measure, best, last = _measure(result), result["best_checkpoint"], result["checkpoint"]
    at_step = {step_name(line["step"]): line for line in lines if "val/loss" in line}
    table = Table(title="weights: which file to use")
    table.add_column("file in checkpoints/", no_wrap=True)
    table.add_column(measure, justify="right")
    table.add_column("why")
    is_best = f"best {measure} on the {result['val_name']} split"
    for checkpoint in dict.fromkeys((best, last)):
        line = at_step.get(Path(checkpoint).name, {})
        reason = is_best if checkpoint == best else "the last step"
        reason += ", and the last step" if best == last else ""
        files = [name for name in (EMA_FILE, MODEL_FILE) if (folder / checkpoint / name).exists()]
        for name in files:
            is_raw = name == MODEL_FILE and EMA_FILE in files
            use = "use this: " if folder / checkpoint / name == _to_use(folder, result) else ""
            kind = "averaged weights (EMA), " if name == EMA_FILE else ""
            why = "the same step without the average" if is_raw else f"{use}{kind}{reason}"
            value = line.get(f"val/raw_{measure}" if is_raw else f"val/{measure}")
            table.add_row(f"{Path(checkpoint).name}/{name}", "-" if value is None else f"{value:.4f}", why)
    return table


def _to_use(folder: Path, result: dict[str, Any]) -> Path:
    """The best checkpoint's weights, or the newest's when the best is only in S3; an EMA's come first."""
    places = [folder / result[name] for name in ("best_checkpoint", "checkpoint") if result[name]]
    files = [place / name for place in places for name in (EMA_FILE, MODEL_FILE)]
    return next(file for file in files if file.exists())


def _measure(result: dict[str, Any]) -> str:
    return "loss" if result["best_accuracy"] is None else "accuracy"


def print_how_to_add(folder: Path) -> None:
    """Prints the command that writes the run's page for the log book."""
    print(python_command(shortest(ROOT / "logbook.py"), "add", folder), flush=True)


def early_end(facts: Mapping[str, Any]) -> str:
    """`ended at step 20 of 58, by --max_steps 20`; empty for a whole run, and for an unfinished one."""
    if not {"steps", "total_steps"} <= facts.keys() or not facts.get("stopped_by"):
        return ""
    return f"ended at step {facts['steps']:,} of {facts['total_steps']:,}, by {facts['stopped_by']}"


def draw(folder: Path, result: dict[str, Any]) -> None:
    """Draws plots/curves.png from metrics.jsonl."""
    title = f"{result['script']} on {Path(result['data']).name}, {result['strategy']} x {result['processes']}"
    plot_curves(folder, read_lines(folder / "metrics.jsonl"), title)


def plot_curves(folder: Path, lines: list[dict[str, Any]], title: str) -> None:
    """Draws loss and, where there is one, accuracy against epochs. lines: of metrics.jsonl."""
    from common.run.plots import panel, panels

    best = max((line["val/accuracy"] for line in lines if "val/accuracy" in line), default=None)
    row = [panel(lines, "epoch", "loss", ("train/loss", "val/loss"))]
    row[0].is_log = best is None  # without classes: the loss falls over several orders of magnitude
    if best is not None:
        row.append(panel(lines, "epoch", "accuracy", ("val/accuracy", "val/raw_accuracy")))
        title = f"{title}: best accuracy {best:.4f}"
    panels(folder / "plots" / "curves.png", [row], title)
