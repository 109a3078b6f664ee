"""Tests that evaluation, export and fine-tuning of published models produce the same results as timm."""

import csv
import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow.parquet
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.data import ImageNetInfo, create_transform, resolve_model_data_config
from timm.models import save_for_hf

import export
from onecurve.checkpoint.published import published_class_names, published_from_name
from onecurve.checkpoint.weights import as_timm_model, find_model
from onecurve.models.preprocessing import CROP_FLAGS
from predict import Prediction
from tests.checkpoint.test_checkpoints import forge
from tests.conftest import VIT, Job, full, latest, metrics, python, run, torchrun
from tests.support.commands import call
from tests.support.data_sets import picture
from tests.support.pretrained import NAME, hub_folder, photographs_by_class

FP32 = ["--mixed_precision", "no"]
SYNSETS = ImageNetInfo("imagenet-1k").label_names()


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    return hub_folder(tmp_path_factory.mktemp("hub") / "lite0")


@pytest.fixture(scope="module")
def by_class(photographs, tmp_path_factory) -> Path:
    return photographs_by_class(photographs, tmp_path_factory.mktemp("photographs"))


@pytest.fixture(scope="module")
def timm_results(hub, photographs) -> tuple[float, list[str]]:
    """Return the loss computed by timm's pipeline, and timm's predicted class for each photograph."""
    model = timm.create_model(f"local-dir:{hub}", pretrained=True).eval()
    transform = create_transform(**resolve_model_data_config(model), is_training=False)
    files = sorted(photographs.glob("*.JPEG"))
    with torch.inference_mode():
        logits = torch.cat([model(transform(Image.open(file).convert("RGB"))[None]) for file in files])
    labels = torch.tensor([SYNSETS.index(file.name.partition("_")[0]) for file in files])
    return F.cross_entropy(logits, labels).item(), [SYNSETS[k] for k in logits.argmax(1).tolist()]


def shown(synsets: list[str]) -> list[str]:
    """Return the displayed names of ImageNet classes, given their synsets."""
    names = {synset: name for name, synset, *_ in published_class_names(published_from_name(NAME))}
    return [names[synset] for synset in synsets]


@pytest.mark.parametrize("launcher", [python(), full(torchrun(2))], ids=["1", "2"])
def test_validate_measures_what_timm_measures(launcher, hub, by_class, timm_results, cache, tmp_path):
    words = [hub, "--data", by_class, *FP32, *cache, "--output_dir", tmp_path]
    output = run([*launcher, "validate.py", *words])
    assert "contains 100 of the 1000 classes" in output
    assert "224 pixels, bicubic, crop 0.875 center" in " ".join(output.split())
    report, (loss, predicted) = json.loads((tmp_path / "report.json").read_text()), timm_results
    assert report["loss"] == pytest.approx(loss, abs=0.002)
    with open(tmp_path / "predictions.csv", newline="") as file:
        predictions = [row["predicted"] for row in csv.DictReader(file)]
    assert sum(name != timm_name for name, timm_name in zip(predictions, shown(predicted), strict=True)) <= 1


def test_predict_names_imagenets_classes(hub, photographs, timm_results, tmp_path):
    words = [hub, photographs, "--workers", "0", *FP32, "--output_dir", tmp_path]
    run([*python(), "predict.py", *words])
    rows = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    pairs = zip(rows, shown(timm_results[1]), strict=True)
    assert sum(row["classes"][0] != name for row, name in pairs) <= 1
    assert rows[0]["classes"][0] == "tench, Tinca tinca"


def test_an_exported_copy_has_the_same_logits(hub, by_class, cache, tmp_path):
    status, output = call(export.main, hub, tmp_path / "copy", "--data", by_class, *cache)
    assert status == 0, output
    copy, config = load_file(tmp_path / "copy" / "model.safetensors"), tmp_path / "copy" / "config.json"
    assert all(
        torch.equal(tensor, copy[name]) for name, tensor in load_file(hub / "model.safetensors").items()
    )
    exported = json.loads(config.read_text())["pretrained_cfg"]
    published = json.loads((hub / "config.json").read_text())["pretrained_cfg"]
    for name in ("interpolation", "crop_pct", "crop_mode", "mean", "std", "input_size"):
        assert exported[name] == published[name]


@pytest.mark.full
def test_a_linear_probe_of_cifar10(hub, cifar10, cache, tmp_path):
    """Train a linear probe on 2,000 images for four epochs, and require an accuracy of at least 0.7.

    With random weights, the accuracy would be only 0.1 to 0.3.
    """
    data = tmp_path / "data"
    data.mkdir()
    for split, count in (("train", 2000), ("test", 1000)):
        table = pyarrow.parquet.read_table(next(cifar10.glob(f"{split}-*.parquet")))
        pyarrow.parquet.write_table(table.slice(0, count), data / f"{split}-00000-of-00001.parquet")
    words = ["train_vit.py", "--model", NAME, "--weights", hub, "--freeze", "--data", data, *cache, *FP32]
    words += ["--epochs", "4", "--batch_size", "64", "--lr", "3e-3", "--mixup", "0", "--cutmix", "0"]
    words += ["--drop_path", "0", "--label_smoothing", "0", "--ema_decay", "0"]
    status, output = Job([*python(), *words, "--output_dir", tmp_path / "run"]).wait(900)
    assert status == 0, output
    assert max(line.get("val/accuracy", 0) for line in metrics(tmp_path / "run")) >= 0.70


# --- Small models with random weights, which need no photographs


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Write two class folders with pictures of different sizes, which the cache therefore stores encoded."""
    root = tmp_path_factory.mktemp("pictures")
    for split, count in (("train", 8), ("val", 4)):
        for k in range(2 * count):
            path = root / split / "ab"[k % 2] / f"{k}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture(k, 60 + k, 50).save(path)
    return root


def small(data: Path, cache: list, folder: Path, *flags) -> list:
    words = [*python(), *VIT, "--data", data, *cache, *FP32, "--batch_size", "4", "--log_every", "1"]
    return [*words, "--workers", "0", "--trackers", "none", "--output_dir", folder, *flags]


def records(folder: Path) -> list[dict]:
    files = [folder / "recipe.json", latest(folder) / "manifest.json"]
    return [json.loads(file.read_text()).get("preprocessing") for file in files]


def test_a_run_of_an_earlier_version_keeps_its_preprocessing(folders, cache, tmp_path):
    """Resume a run whose files do not record its preprocessing (bilinear, 224/256).

    The losses must be identical to those of a run whose files record the preprocessing.
    """
    legacy, run_ = tmp_path / "legacy", tmp_path / "run"
    run(small(folders, cache, legacy, "--interpolation", "legacy", "--max_steps", "6"))
    run(small(folders, cache, run_, "--interpolation", "legacy", "--max_steps", "3"))
    record = json.loads((run_ / "recipe.json").read_text())
    del record["preprocessing"]
    for name in CROP_FLAGS:
        del record["recipe"][name]
    (run_ / "recipe.json").write_text(json.dumps(record))
    recipe = json.loads((latest(run_) / "manifest.json").read_text())["recipe"]
    earlier = {name: value for name, value in recipe.items() if name not in CROP_FLAGS}
    forge(latest(run_), preprocessing={}, recipe=earlier)
    output = run(small(folders, cache, run_, "--max_steps", "6"))
    assert "continuing at step 3" in output
    resumed_note = "the run keeps its preprocessing (legacy interpolation, crop 0.875 center"
    assert f"{resumed_note}), although the model now has bicubic interpolation, crop 0.95 center" in output
    resumed, straight = (
        [line["train/loss"] for line in metrics(folder) if "train/loss" in line]
        + [line["val/loss"] for line in metrics(folder) if "val/loss" in line][-1:]
        for folder in (run_, legacy)
    )
    assert resumed == straight
    assert [record["interpolation"] for record in records(run_)] == ["legacy", "legacy"]


def test_a_run_records_the_models_own_preprocessing(folders, cache, tmp_path):
    run(small(folders, cache, tmp_path / "run", "--max_steps", "2", "--crop_pct", "0.8"))
    expected = {"interpolation": "bicubic", "crop_pct": 0.8, "crop_mode": "center"}
    expected |= {"mean": [0.5] * 3, "std": [0.5] * 3}
    assert records(tmp_path / "run") == [expected, expected]
    recipe = json.loads((tmp_path / "run" / "recipe.json").read_text())["recipe"]
    assert (recipe["interpolation"], recipe["crop_pct"]) == (None, 0.8)


@pytest.mark.parametrize("count", [1000, 11821, 21841, 21843, 11221])
def test_names_of_imagenets_classes(count):
    """Check that all displayed names are unique, and that data may also name a class by its synset."""
    names = published_class_names(replace(published_from_name(NAME), class_count=count))
    assert len({name for name, *_ in names}) == len(names) == count
    assert ("crane (n02012849)", "n02012849", "crane", "crane") in names or count != 1000


def test_a_lone_file_and_other_classes(hub, tmp_path):
    """Check that timm's model name determines the classes of a weights file, and that other classes are
    numbered.
    """
    file = shutil.copy(hub / "model.safetensors", tmp_path / "w.safetensors")
    model = as_timm_model(find_model(str(file), "best", tmp_path, lambda: None), NAME)
    assert (model.published, model.classes[0]) == (1000, "tench, Tinca tinca")
    assert model.preprocessing["interpolation"] == "bicubic"
    torch.manual_seed(0)
    small_model = timm.create_model("test_vit", num_classes=7)
    save_for_hf(small_model, str(tmp_path / "seven"), safe_serialization=True)
    model = find_model(str(tmp_path / "seven"), "best", tmp_path, lambda: None)
    assert (model.published, model.classes, model.recipe["image_size"]) == (7, None, 160)
    save_file({"x": torch.zeros(2)}, tmp_path / "headless.safetensors")
    lone = find_model(str(tmp_path / "headless.safetensors"), "best", tmp_path, lambda: None)
    with pytest.raises(ValueError, match="has no classification head"):
        as_timm_model(lone, "test_vit")


@pytest.mark.parametrize(
    ("name", "pretrained"),
    [("test_vit", True), ("timm/test_vit.r160_in1k", False), ("hf-hub:timm/test_vit", 0)],
)
def test_a_name_on_the_hub(name, pretrained, tmp_path, monkeypatch):
    """Check that the Hub client finds a cached model when there is no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    find_model = partial(Prediction(pretrained=pretrained)._find_model, name, tmp_path, lambda: None)
    with pytest.raises(ValueError, match=r"`hf download timm/test_vit.r160_in1k config.json model\.safe"):
        find_model()
    folder, revision = tmp_path / "cache" / "models--timm--test_vit.r160_in1k", "0" * 40
    save_for_hf(timm.create_model("test_vit"), str(folder / "snapshots" / revision), safe_serialization=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revision)
    model = find_model()
    assert model.name == f"timm/{name.rpartition('/')[2]}"
    assert (model.recipe["model"], model.published, model.preprocessing["crop_pct"]) == (
        "test_vit",
        1000,
        0.95,
    )
