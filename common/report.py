"""What one run shows at its end: a table, a plot of loss and accuracy, and at last how its page is made."""

import json
from pathlib import Path

from common.checkpoints import EMA, MODEL
from common.commands import ROOT, python_command, shortest
from common.plots import panel, panels


def show(folder: Path, val_name: str) -> None:
    """Prints the folder's result.json as a table and says where everything lies. Writes plots/curves.png."""
    from rich.console import Console
    from rich.table import Table

    result = json.loads((folder / "result.json").read_text())
    data = Path(result["data"]).name
    plot_curves(folder, f"{result['script']} on {data}, {result['strategy']} x {result['processes']}")
    table = Table(
        title=f"{result['script']}, {result['strategy']} on {result['processes']} x {result['device']}"
    )
    table.add_column("what")
    table.add_column("value", justify="right")
    measure = "loss" if result["best_accuracy"] is None else "accuracy"
    best, final = result[f"best_{measure}"], result[f"final_{measure}"]
    rows = {
        f"best {measure} ({val_name} split)": f"{best:.4f} at step {result['best_step']:,}",
        f"final {measure} ({val_name} split)": f"{final:.4f}",
        f"{val_name} images": f"{result['val_images']:,}",
        "training time": f"{result['train_s']:.1f} s",
        "whole time": f"{result['wall_s']:.1f} s",
        "speed": f"{result['images_per_s']:,.0f} images/s",
        "peak memory of a process": f"{result['peak_memory_gib']:.2f} GiB",
    }
    for what, value in rows.items():
        table.add_row(what, value)
    console = Console()
    console.print(table)
    # The best one can be elsewhere: in S3, where this machine found only the newest.
    places = [folder / result[name] for name in ("best_checkpoint", "checkpoint") if result[name]]
    files = [place / name for place in places for name in (EMA, MODEL)]
    weights = next(file for file in files if file.exists())
    plots = sorted((folder / "plots").glob("*.png"))
    for path in (weights, *plots, folder / "metrics.jsonl", folder / "result.json"):
        console.print(f"{path}", soft_wrap=True, highlight=False, markup=False)


def say_how_to_add(folder: Path) -> None:
    """The command that writes the run's page for the log book, however the run has ended."""
    print(python_command(shortest(ROOT / "logbook.py"), "add", folder), flush=True)


def plot_curves(folder: Path, title: str) -> None:
    """Loss and, where there is one, accuracy against epochs, from metrics.jsonl, into plots/curves.png."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    best = max((line["val/accuracy"] for line in lines if "val/accuracy" in line), default=None)
    row = [panel(lines, "epoch", "loss", ("train/loss", "val/loss"))]
    if best is not None:
        row.append(panel(lines, "epoch", "accuracy", ("val/accuracy", "val/raw_accuracy")))
        title = f"{title}: best accuracy {best:.4f}"
    panels(folder / "plots" / "curves.png", [row], title)
