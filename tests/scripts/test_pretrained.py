"""Models as their authors publish them: measured, exported and fine-tuned as timm does it."""

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
from onecurve.checkpoint.published import class_names, of_name
from onecurve.checkpoint.weights import find, of_model
from onecurve.models.preprocessing import FLAGS
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
def timms(hub, photographs) -> tuple[float, list[str]]:
    """The loss of timm's own pipeline, and the class that it predicts for each photograph."""
    model = timm.create_model(f"local-dir:{hub}", pretrained=True).eval()
    transform = create_transform(**resolve_model_data_config(model), is_training=False)
    files = sorted(photographs.glob("*.JPEG"))
    with torch.inference_mode():
        logits = torch.cat([model(transform(Image.open(file).convert("RGB"))[None]) for file in files])
    labels = torch.tensor([SYNSETS.index(file.name.partition("_")[0]) for file in files])
    return F.cross_entropy(logits, labels).item(), [SYNSETS[k] for k in logits.argmax(1).tolist()]


def shown(synsets: list[str]) -> list[str]:
    """The names by which ImageNet's classes are shown."""
    names = {synset: name for name, synset, *_ in class_names(of_name(NAME))}
    return [names[synset] for synset in synsets]


@pytest.mark.parametrize("launcher", [python(), full(torchrun(2))], ids=["1", "2"])
def test_validate_measures_what_timm_measures(launcher, hub, by_class, timms, cache, tmp_path):
    words = [hub, "--data", by_class, *FP32, *cache, "--output_dir", tmp_path]
    output = run([*launcher, "validate.py", *words])
    assert "has 100 of the 1000 classes" in output
    assert "224 pixels, bicubic, crop 0.875 center" in " ".join(output.split())
    report, (loss, predicted) = json.loads((tmp_path / "report.json").read_text()), timms
    assert report["loss"] == pytest.approx(loss, abs=0.002)
    with open(tmp_path / "predictions.csv", newline="") as file:
        ours = [row["predicted"] for row in csv.DictReader(file)]
    assert sum(mine != other for mine, other in zip(ours, shown(predicted), strict=True)) <= 1


def test_predict_names_imagenets_classes(hub, photographs, timms, tmp_path):
    words = [hub, photographs, "--workers", "0", *FP32, "--output_dir", tmp_path]
    run([*python(), "predict.py", *words])
    rows = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    pairs = zip(rows, shown(timms[1]), strict=True)
    assert sum(row["classes"][0] != name for row, name in pairs) <= 1
    assert rows[0]["classes"][0] == "tench, Tinca tinca"


def test_an_exported_copy_has_the_same_logits(hub, by_class, cache, tmp_path):
    status, output = call(export.main, hub, tmp_path / "copy", "--data", by_class, *cache)
    assert status == 0, output
    copy, config = load_file(tmp_path / "copy" / "model.safetensors"), tmp_path / "copy" / "config.json"
    assert all(
        torch.equal(tensor, copy[name]) for name, tensor in load_file(hub / "model.safetensors").items()
    )
    about = json.loads(config.read_text())["pretrained_cfg"]
    theirs = json.loads((hub / "config.json").read_text())["pretrained_cfg"]
    for name in ("interpolation", "crop_pct", "crop_mode", "mean", "std", "input_size"):
        assert about[name] == theirs[name]


@pytest.mark.full
def test_a_linear_probe_of_cifar10(hub, cifar10, cache, tmp_path):
    """On 2,000 images, four epochs; the accuracy of random weights would be 0.1 to 0.3."""
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


# --- Small models with random weights, for which no photographs are needed


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Pictures that stay encoded, as they differ in size, in two class folders."""
    root = tmp_path_factory.mktemp("pictures")
    for split, count in (("train", 8), ("val", 4)):
        for k in range(2 * count):
            place = root / split / "ab"[k % 2] / f"{k}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            picture(k, 60 + k, 50).save(place)
    return root


def small(data: Path, cache: list, folder: Path, *flags) -> list:
    words = [*python(), *VIT, "--data", data, *cache, *FP32, "--batch_size", "4", "--log_every", "1"]
    return [*words, "--workers", "0", "--trackers", "none", "--output_dir", folder, *flags]


def records(folder: Path) -> list[dict]:
    files = [folder / "recipe.json", latest(folder) / "manifest.json"]
    return [json.loads(file.read_text()).get("preprocessing") for file in files]


def test_a_run_of_an_earlier_version_keeps_its_preprocessing(folders, cache, tmp_path):
    """Its files do not record any: bilinear, 224/256. The resumed run has the losses of one that says so."""
    legacy, run_ = tmp_path / "legacy", tmp_path / "run"
    run(small(folders, cache, legacy, "--interpolation", "legacy", "--max_steps", "6"))
    run(small(folders, cache, run_, "--interpolation", "legacy", "--max_steps", "3"))
    about = json.loads((run_ / "recipe.json").read_text())
    del about["preprocessing"]
    for name in FLAGS:
        del about["recipe"][name]
    (run_ / "recipe.json").write_text(json.dumps(about))
    recipe = json.loads((latest(run_) / "manifest.json").read_text())["recipe"]
    earlier = {name: value for name, value in recipe.items() if name not in FLAGS}
    forge(latest(run_), preprocessing={}, recipe=earlier)
    output = run(small(folders, cache, run_, "--max_steps", "6"))
    assert "continuing at step 3" in output
    kept = "preprocessing: the run keeps legacy interpolation, crop 0.875 center"
    assert f"{kept}, although the model now has bicubic interpolation, crop 0.95 center" in output
    resumed, straight = (
        [line["train/loss"] for line in metrics(folder) if "train/loss" in line]
        + [line["val/loss"] for line in metrics(folder) if "val/loss" in line][-1:]
        for folder in (run_, legacy)
    )
    assert resumed == straight
    assert [record["interpolation"] for record in records(run_)] == ["legacy", "legacy"]


def test_a_run_records_the_models_own_preprocessing(folders, cache, tmp_path):
    run(small(folders, cache, tmp_path / "run", "--max_steps", "2", "--crop_pct", "0.8"))
    own = {"interpolation": "bicubic", "crop_pct": 0.8, "crop_mode": "center"}
    own |= {"mean": [0.5] * 3, "std": [0.5] * 3}
    assert records(tmp_path / "run") == [own, own]
    recipe = json.loads((tmp_path / "run" / "recipe.json").read_text())["recipe"]
    assert (recipe["interpolation"], recipe["crop_pct"]) == (None, 0.8)


@pytest.mark.parametrize("count", [1000, 11821, 21841, 21843, 11221])
def test_names_of_imagenets_classes(count):
    """Shown names are unique; data may also call a class by its synset."""
    names = class_names(replace(of_name(NAME), classes=count))
    assert len({name for name, *_ in names}) == len(names) == count
    assert ("crane (n02012849)", "n02012849", "crane", "crane") in names or count != 1000


def test_a_lone_file_and_other_classes(hub, tmp_path):
    """timm's name says what is in it. Names that nobody knows are numbers."""
    file = shutil.copy(hub / "model.safetensors", tmp_path / "w.safetensors")
    found = of_model(find(str(file), "best", tmp_path, lambda: None), NAME)
    assert (found.published, found.classes[0]) == (1000, "tench, Tinca tinca")
    assert found.preprocessing["interpolation"] == "bicubic"
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=7)
    save_for_hf(model, str(tmp_path / "seven"), safe_serialization=True)
    found = find(str(tmp_path / "seven"), "best", tmp_path, lambda: None)
    assert (found.published, found.classes, found.recipe["image_size"]) == (7, None, 160)
    save_file({"x": torch.zeros(2)}, tmp_path / "headless.safetensors")
    lone = find(str(tmp_path / "headless.safetensors"), "best", tmp_path, lambda: None)
    with pytest.raises(ValueError, match="has no head"):
        of_model(lone, "test_vit")


@pytest.mark.parametrize(
    ("name", "pretrained"),
    [("test_vit", True), ("timm/test_vit.r160_in1k", False), ("hf-hub:timm/test_vit", 0)],
)
def test_a_name_on_the_hub(name, pretrained, tmp_path, monkeypatch):
    """The hub's own client finds it in its cache, as without a network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    find_model = partial(Prediction(pretrained=pretrained)._find, name, tmp_path, lambda: None)
    with pytest.raises(ValueError, match=r"`hf download timm/test_vit.r160_in1k config.json model\.safe"):
        find_model()
    folder, revision = tmp_path / "cache" / "models--timm--test_vit.r160_in1k", "0" * 40
    save_for_hf(timm.create_model("test_vit"), str(folder / "snapshots" / revision), safe_serialization=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revision)
    found = find_model()
    assert found.name == f"timm/{name.rpartition('/')[2]}"
    assert (found.recipe["model"], found.published, found.preprocessing["crop_pct"]) == (
        "test_vit",
        1000,
        0.95,
    )
