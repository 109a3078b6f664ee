"""Tests that trained models match classes by name on data with other classes or another class order."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import export
from onecurve.checkpoint.weights import load_trained
from tests.conftest import CNN, STRATEGIES, VIT, full, latest, metrics, mutate, python, run, torchrun
from tests.scripts.conftest import QUICK
from tests.scripts.test_validate import FP32, fails, words
from tests.support.commands import call
from tests.support.data_sets import encode, opened, write, write_parquet
from train_cnn_a import CnnA, build_model

REVERSED = "9876543210"  # Class names in reverse order, so that a digit's label is 9 minus the digit
FEW = "83"  # Classes of a small test set, in a different order than the model's classes


@pytest.fixture(scope="module")
def digits(cache):
    return opened("digits", cache[1])


@pytest.fixture(scope="module")
def data(digits, tmp_path_factory) -> dict[str, Path]:
    """Write the digits' held-out images as data sets with different classes and class orders.

    The data set `reversed` also contains the training images.
    """
    root, files = tmp_path_factory.mktemp("data"), {}
    held_out = [(encode(Image.fromarray(x), "PNG"), y) for x, y in pairs(digits.val)]
    training = [(encode(Image.fromarray(x), "PNG"), y) for x, y in pairs(digits.train)]
    for split, images in (("train", training), ("val", held_out)):
        table = root / "reversed" / f"{split}-0.parquet"
        write_parquet(table, [image for image, _ in images], [9 - y for _, y in images], list(REVERSED))
    few = [(image, FEW.index(str(y))) for image, y in held_out if str(y) in FEW]
    write_parquet(root / "few" / "train-0.parquet", *map(list, zip(*few, strict=True)), list(FEW))
    for k, (image, y) in enumerate(held_out):
        if y == 8:
            files[f"one/8/{k}.png"] = image
            files[f"unknown/8/{k}.png"] = files[f"unknown/fox/{k}.png"] = files[f"unknown/wolf/{k}.png"] = (
                image
            )
    write(root, files)
    return {path.name: path for path in root.iterdir()}


def pairs(split) -> zip:
    return zip(split.images, split.labels, strict=True)


@pytest.fixture(scope="module")
def logits(trained, digits) -> torch.Tensor:
    """Compute the trained model's logits for the 360 held-out images, as a tensor of shape [360, 10]."""
    script = __import__("train_cnn_a")
    model = build_model(CnnA(widths=(4, 8, 32)), 10)
    load_trained(model, latest(trained) / "model.safetensors")
    inputs = torch.from_numpy(np.array(digits.val.images)).permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (script.MEAN, script.STD))
    with torch.no_grad():
        return model.eval()((inputs - mean) / std)


@pytest.fixture(scope="module")
def models(trained, cache, tmp_path_factory) -> dict[str, list]:
    """Return the validate.py arguments that select each form of the model."""
    folder, lone = tmp_path_factory.mktemp("models") / "exported", ["--script", *CNN]
    assert call(export.main, trained, folder, *cache)[0] == 0
    file = tmp_path_factory.mktemp("lone") / "lone.safetensors"
    file.write_bytes((folder / "model.safetensors").read_bytes())
    return {
        "run": [trained],
        "exported": [folder],
        "a file beside config.json": [folder / "model.safetensors", *lone],
        "lone": [file, *lone],
    }


OVER_ALL = "The accuracy covers all 10 classes. Add --only_its_classes to exclude absent classes."
CASES = [  # Model, data set, validate.py flags, classes included in the accuracy, and expected message
    ("run", "reversed", (), range(10), "in a different order. Classes are matched by name."),
    ("run", "few", (), range(10), OVER_ALL),
    ("run", "few", ("--only_its_classes",), (3, 8), "The accuracy covers the 2 of 10 classes that have"),
    ("exported", "reversed", (), range(10), "in a different order. Classes are matched by name."),
    ("run", "one", (), range(10), "contains 1 of the 10 classes of"),
    ("a file beside config.json", "few", (), range(10), "contains 2 of the 10 classes of"),
    full("exported", "few", ("--only_its_classes",), (3, 8), "contains 2 of the 10 classes of"),
    full("run", "one", ("--only_its_classes",), (8,), "The accuracy covers the 1 of 10 classes that have"),
]


def expected(logits: torch.Tensor, labels: np.ndarray, name: str, predicted) -> float:
    """Return the model's accuracy on a data set if the model can predict only the classes in `predicted`."""
    digits = {"few": (3, 8), "one": (8,)}.get(name, range(10))
    rows = np.isin(labels, digits)
    masked = torch.full_like(logits, -torch.inf)
    masked[:, list(predicted)] = logits[:, list(predicted)]
    return float((masked.argmax(1).numpy() == labels)[rows].mean())


@pytest.mark.parametrize(("model", "name", "flags", "predicted", "message"), CASES)
@pytest.mark.parametrize("processes", [1, full(2)])
def test_validate(
    processes, model, name, flags, predicted, message, models, data, digits, logits, cache, tmp_path
):
    launcher = python() if processes == 1 else torchrun(processes)
    command = [*launcher, "validate.py", *models[model], "--data", data[name], *flags, *cache, *FP32]
    assert message in run([*command, "--output_dir", tmp_path])
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["processes"] == processes
    assert report["top1"] == pytest.approx(expected(logits, digits.val.labels, name, predicted))
    assert report["classes"] == list("0123456789")
    assert report["classes_left_out"] == 10 - len(predicted)


def test_two_processes_map_labels(models, data, digits, logits, cache, tmp_path):
    command = [*torchrun(2), "validate.py", *models["run"], "--data", data["reversed"], *cache, *FP32]
    assert run([*command, "--output_dir", tmp_path]).count("in a different order") == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["top1"] == pytest.approx(expected(logits, digits.val.labels, "all", range(10)))


def test_a_lone_file_uses_the_order_of_the_data(models, data, digits, logits, cache, tmp_path):
    output = run(words(*models["lone"], "--data", data["reversed"], *cache, "--output_dir", tmp_path))
    assert "contains no class names. The model's classes are assumed to be the classes of" in output
    wrong = expected(logits, 9 - digits.val.labels, "all", range(10))
    assert json.loads((tmp_path / "report.json").read_text())["top1"] == pytest.approx(wrong)


def test_unknown_classes_are_refused(trained, data, cache, tmp_path):
    model = f"{latest(trained)}/model.safetensors"
    named = f"{data['unknown']} contains 2 classes that {model} was not trained on: fox, wolf. The model was"
    assert named in fails(words(trained, "--data", data["unknown"], *cache))
    status, output = call(
        export.main, trained, tmp_path / "out", "--data", data["unknown"], "--holdout", 0.5, *cache
    )
    assert (status, named in output) == (1, True)


# --- Resuming runs


@pytest.fixture(scope="module")
def vit(tmp_path_factory, cache) -> Path:
    folder = tmp_path_factory.mktemp("vit") / "run"
    run([*python(), *VIT, *QUICK, "--max_steps", 4, *cache, "--output_dir", folder])
    return folder


@pytest.mark.parametrize("strategy", ["single", "fsdp", *map(full, ("ddp", "zero2", "zero3"))])
def test_a_resumed_head_follows_the_order_of_the_classes(strategy, vit, data, cache, tmp_path):
    """Check the order of the head's rows in the model, the EMA and AdamW's moments.

    The resumed run trains no step, so each row must be bitwise identical to the same class's row before the
    resume.
    """
    command = [*STRATEGIES[strategy], *VIT, *QUICK, *cache, "--output_dir", tmp_path, "--max_steps", 4]
    output = run([*command, "--resume", vit, "--data", data["reversed"], "--allow_changed", "data"])
    assert "in a different order. Classes are matched by name. The rows of the classification head" in output
    assert metrics(tmp_path)[-1]["val/loss"] == pytest.approx(metrics(vit)[-1]["val/loss"], rel=1e-5)
    manifest = json.loads((latest(tmp_path) / "manifest.json").read_text())
    assert manifest["classes"] == list(REVERSED)
    for name in ("model", "ema", "optimizer"):
        before, after = (load_file(latest(folder) / f"{name}.safetensors") for folder in (vit, tmp_path))
        assert before.keys() == after.keys()
        for key, tensor in before.items():
            assert torch.equal(after[key], tensor.flip(0) if key.startswith("head.") else tensor), key


@pytest.mark.full
def test_an_optimizer_state_that_cannot_follow_the_classes_is_refused(data, cache, project_copy, tmp_path):
    """Resume with Adafactor, whose state contains sums over a matrix's rows and columns, not moments."""
    adamw = "torch.optim.AdamW(groups, lr=recipe.lr, fused=True)"
    mutate(project_copy, "train_vit.py", adamw, "torch.optim.Adafactor(groups, lr=recipe.lr)")
    command = [*python(), *VIT, *QUICK, *cache, "--max_steps", 1]
    run([*command, "--output_dir", tmp_path / "before"], cwd=project_copy)
    command += ["--resume", tmp_path / "before", "--output_dir", tmp_path / "after"]
    output = fails([*command, "--data", data["reversed"], "--allow_changed", "data"], cwd=project_copy)
    assert "the optimizer state head.weight/col_var in" in output
    assert "can't be reordered to match the data's class order. Specify the same optimizer" in output


@pytest.mark.parametrize(
    ("name", "differences"),
    [
        ("unknown", r"(new: fox, wolf; missing: 0, 1, 2, 3, 4 and 4 more)"),
        ("few", "(missing: 0, 1, 2, 4, 5 and 3 more)"),
    ],
)
def test_a_resume_refuses_other_classes(name, differences, trained, data, cache, tmp_path):
    command = [*python(), *CNN, *QUICK, *cache, "--resume", trained, "--output_dir", tmp_path]
    changed = ["--data", data[name], "--holdout", 0.5, "--batch_size", 16, "--max_steps", 12]
    output = fails([*command, *changed, "--allow_changed", "data,holdout,batch_size"])
    assert f"was trained on different classes {differences}. A resumed run can't change" in output
