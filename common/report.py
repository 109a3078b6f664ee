"""What one run shows at its end: a table, and a plot of loss and accuracy."""

import json
from pathlib import Path

from common.checkpoints import EMA, MODEL


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
        console.print(f"{path}", soft_wrap=True, highlight=False)


def plot_curves(folder: Path, title: str) -> None:
    """Loss and, where there is one, accuracy against epochs, from metrics.jsonl, into plots/curves.png."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    panels = {"loss": ("train/loss", "val/loss"), "accuracy": ("val/accuracy", "val/raw_accuracy")}
    best = max((line["val/accuracy"] for line in lines if "val/accuracy" in line), default=None)
    if best is None:
        del panels["accuracy"]
    figure, row = plt.subplots(
        1, len(panels), figsize=(5 * len(panels), 3.6), layout="constrained", squeeze=False
    )
    for axes, (label, names) in zip(row[0], panels.items(), strict=True):
        for name in names:
            points = [(line["epoch"], line[name]) for line in lines if name in line]
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    label=name,
                    marker="o" if len(points) < 40 else None,
                    markersize=3,
                )
        axes.set(xlabel="epoch", ylabel=label)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title if best is None else f"{title}: best accuracy {best:.4f}")
    path = folder / "plots" / "curves.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
