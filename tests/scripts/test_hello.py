"""train_hello.py learns its curve on any number of processes, and draws two pictures."""

import re

import pytest
from matplotlib.figure import Figure
from PIL import Image

from onecurve.run.plots import plot_curves
from tests.conftest import STRATEGIES, full, metrics, python, result, run, torchrun


@pytest.mark.parametrize(
    ("launcher", "processes"), [(python(), 1), full(torchrun(3), 3), full(STRATEGIES["zero3"], 2)]
)
def test_it_learns_the_curve(launcher, processes, tmp_path):
    words = ["train_hello.py", "--batch_size", 16 * processes, "--hidden_size", 48, "--data_size", 2000]
    output = run([*launcher, *words, "--output_dir", tmp_path / "run"])
    found = result(tmp_path / "run")
    assert (found["processes"], found["val_images"]) == (processes, 1000)
    assert found["parameters"] == 2_497  # 96 of the first layer, 2,352, and 49 of the head
    assert found["epoch_s"] == pytest.approx(found["train_s"] / 10)
    assert "2,497" in output
    assert found["final_loss"] < 0.05  # the noise alone has 0.01, the curve without learning 1
    assert found["best_accuracy"] is None
    assert "image" not in output, "it learns from points"
    assert re.search(rf"batch {16 * processes} = 16 points x {processes} process", output)
    assert re.search(r"[\d,]+ points/s", output)
    assert "validation points" in output
    shown = " ".join(re.sub("[\u2502\u2503]", "", output).split())
    assert "use this: best loss on the validation split" in shown
    losses = [line["val/loss"] for line in metrics(tmp_path / "run") if "val/loss" in line]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    for name in ("curves", "fit"):
        path = tmp_path / "run" / "plots" / f"{name}.png"
        assert str(path) in output
        with Image.open(path) as image:
            assert len(image.convert("RGB").getcolors(1 << 20)) > 50


@pytest.mark.parametrize(("name", "scale"), [("val/loss", "log"), ("val/accuracy", "linear")])
def test_a_loss_without_classes_is_plotted_on_a_log_scale(name, scale, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    lines = [{"step": k, "epoch": k, "train/loss": 10.0**-k, "val/loss": 0.1, name: 0.5} for k in range(3)]
    plot_curves(tmp_path, lines, "title")
    assert drawn[0].axes[0].get_yscale() == scale
