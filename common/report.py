"""What one run shows at its end: a table, and a plot of loss and accuracy."""

import json
from pathlib import Path


def show(folder: Path, val_name: str) -> None:
    """Prints the folder's result.json as a table and says where everything lies. Writes plots/curves.png."""
    from rich.console import Console
    from rich.table import Table

    result = json.loads((folder / "result.json").read_text())
    data = Path(result["data"]).name
    plot = plot_curves(folder, f"{result['script']} on {data}, {result['strategy']} x {result['processes']}")
    table = Table(
        title=f"{result['script']}, {result['strategy']} on {result['processes']} x {result['device']}"
    )
    table.add_column("what")
    table.add_column("value", justify="right")
    rows = {
        f"best accuracy ({val_name} split)": f"{result['best_accuracy']:.4f} at step {result['best_step']:,}",
        f"final accuracy ({val_name} split)": f"{result['final_accuracy']:.4f}",
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
    for name in (
        result["checkpoint"] + "/model.safetensors",
        plot.relative_to(folder),
        "metrics.jsonl",
        "result.json",
    ):
        console.print(f"{folder / name}", soft_wrap=True, highlight=False)


def plot_curves(folder: Path, title: str) -> Path:
    """Loss and accuracy against epochs, from metrics.jsonl, into plots/curves.png."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for axes, names in ((left, ("train/loss", "val/loss")), (right, ("val/accuracy", "val/raw_accuracy"))):
        for name in names:
            points = [(line["epoch"], line[name]) for line in lines if name in line]
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    label=name,
                    marker="o" if len(points) < 40 else None,
                    markersize=3,
                )
        axes.set_xlabel("epoch")
        axes.grid(alpha=0.3)
        axes.legend()
    left.set_ylabel("cross-entropy")
    right.set_ylabel("accuracy")
    best = max((line["val/accuracy"] for line in lines if "val/accuracy" in line), default=0)
    figure.suptitle(f"{title}: best accuracy {best:.4f}")
    path = folder / "plots" / "curves.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
