"""Tests that predict.py predicts each picture once under any launcher and agrees with validate.py."""

import csv
import io
import json
import resource
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from accelerate import Accelerator
from PIL import Image
from safetensors.torch import load_file
from torch import nn

import predict
from onecurve.checkpoint.weights import find_model
from onecurve.data.cache import prepare_data
from onecurve.data.conversions import conversion_warnings
from onecurve.data.crops import evaluation_crop
from onecurve.data.images import open_images
from onecurve.numerics.augment import to_float
from tests.conftest import Job, full, lines, python, result, run, torchrun
from tools.inference.inference import record_head_inputs
from tools.inference.pictures import Pictures, Preprocessing, find_pictures, picture_batches

COUNT = 360  # Number of held-out digits


@pytest.fixture(scope="module")
def pictures(tmp_path_factory, cache) -> Path:
    """Write the held-out digits as PNG files in two folders, and add a file that is not an image."""
    folder = tmp_path_factory.mktemp("pictures")
    images = open_images(prepare_data("digits", Path(cache[1]))).val
    for k in range(COUNT):
        path = folder / ("even" if k % 2 == 0 else "odd/deeper") / f"{k:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.array(images.images[k])).save(path)
    (folder / "broken.png").write_bytes(b"\x89PNG, but no more")
    return folder


@pytest.mark.parametrize("launcher", [python(), torchrun(2), full(torchrun(3))], ids=["1", "2", "3"])
def test_each_picture_is_predicted_once_and_like_validate(launcher, trained, pictures, tmp_path, cache):
    """Predict with up to three processes, and check that a file that is not an image is skipped."""
    words = ["predict.py", trained, pictures / "even", f"{pictures}/odd/**/*.png", pictures / "broken.png"]
    words += ["--mixed_precision", "no", "--per_device_batch_size", 50, "--top", 3]
    words += ["--embeddings", tmp_path / "features.npy"]
    output = run([*launcher, *words, "--output_dir", tmp_path])
    best = result(trained)
    (model_line,) = [line for line in output.splitlines() if line.startswith("model ")]
    file, step_text = f"step_{best['best_step']:08d}/model.safetensors", f"step {best['best_step']:,}"
    assert model_line.endswith(f"/checkpoints/{file}, {step_text}, val accuracy {best['best_accuracy']:.4f}")
    assert f"{COUNT} images predicted, 1 skipped" in output
    assert "broken.png was skipped: " in output
    assert "sampled" not in output
    written = lines(tmp_path / "predictions.jsonl")
    rows = {Path(row["file"]).name: row for row in written}
    assert len(rows) == len(written)
    assert sorted(rows) == [*(f"{k:03d}.png" for k in range(COUNT)), "broken.png"]
    assert rows.pop("broken.png").keys() == {"file", "error"}
    assert all(len(row["classes"]) == 3 for row in rows.values())
    if launcher == python():
        run([*python(), "validate.py", trained, "--mixed_precision", "no", *cache])
        report = trained / "validation" / f"val_{result(trained)['best_step']}" / "report.json"
        for image in json.loads(report.read_text())["worst"]:
            row = rows[f"{image['id']:03d}.png"]
            assert row["classes"][0] == str(image["predicted"])
            assert row["probabilities"][0] == pytest.approx(image["probability"], abs=1e-5)
    table = list(csv.DictReader((tmp_path / "predictions.csv").open()))
    assert [row["file"] for row in table if row["class_1"]] == [row["file"] for row in rows.values()]
    with Image.open(tmp_path / "sheet.png") as picture:
        assert min(picture.size) > 300
    features = np.load(tmp_path / "features.npy")
    assert features["id"].tolist() == [row["file"] for row in rows.values()]
    head = load_file(trained / "checkpoints" / file)
    logits = torch.from_numpy(features["features"].copy()) @ head["head.weight"].T + head["head.bias"]
    surest = [row["probabilities"][0] for row in rows.values()]
    assert logits.softmax(1).amax(1).tolist() == pytest.approx(surest, abs=1e-5)


@pytest.mark.parametrize(("cropped", "expected"), [(False, False), (True, True), (None, True)])
def test_pictures_are_prepared_like_in_the_runs_evaluations(cropped, expected, trained, tmp_path):
    """Check that only the model's field `cropped` decides whether pictures are cropped, not the data's name.

    Models saved by earlier versions do not specify `cropped`, and their pictures are cropped.
    """
    model = find_model(str(trained), "best", tmp_path, lambda: None)
    assert model.cropped is False
    model = replace(model, recipe=model.recipe | {"data": "/data/pets"}, cropped=cropped)
    _, preparation = predict.build(Accelerator(cpu=True), predict.Prediction(), model)
    assert preparation.is_cropped == expected


@pytest.mark.parametrize("name", ["test_vit", "test_convnext", "test_efficientnet"])
def test_embeddings_are_timms_features_before_the_head(name):
    model, images = timm.create_model(name).eval(), torch.randn(2, 3, 160, 160)
    features = record_head_inputs(model)
    with torch.no_grad():
        model(images)
        expected = model.forward_head(model.forward_features(images), pre_logits=True)
    assert torch.equal(torch.from_numpy(features[0]), expected)


def test_a_larger_picture_is_cropped_as_in_evaluations(tmp_path):
    """Check that predict.py crops and normalizes a picture in the same way as an image data set."""
    noise = np.random.RandomState(0).randint(0, 256, (50, 70, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.png")
    preparation = Preprocessing(32, (0.5, 0.4, 0.3), (0.2, 0.2, 0.3), is_cropped=True)
    (batch,) = picture_batches(Pictures([str(tmp_path / "a.png")], preparation), [0], 8, workers=0)
    expected = to_float(torch.from_numpy(evaluation_crop(noise, 32).copy())[None], *preparation[1:3], 32)
    assert torch.equal(batch.inputs, expected)


def test_an_output_that_is_not_finite_is_refused(pictures):
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2))
    nn.init.constant_(model[1].bias, torch.nan)
    inputs = Pictures([str(pictures / "even" / "000.png")], Preprocessing(8, (0.5,) * 3, (0.2,) * 3, False))
    single = SimpleNamespace(device=torch.device("cpu"), process_index=0, num_processes=1)
    single.precision = SimpleNamespace(mixed_precision="no")
    with pytest.raises(ValueError, match="The model diverged, or --mixed_precision overflows"):
        predict.predict_images(single, model, inputs, ["a", "b"], predict.Prediction(workers=0))


class Unsent(Pictures):
    """Pictures that a worker process can't send, because the worker is not allowed to open another file."""

    def __getitem__(self, i):
        resource.setrlimit(resource.RLIMIT_NOFILE, (4, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        return i, torch.zeros(3, 32, 32)


def test_a_worker_that_can_not_send_pictures_ends_the_command():
    pictures = Unsent(["a.png"], Preprocessing(32, (0.5,) * 3, (0.2,) * 3, is_cropped=False))
    with pytest.raises(ValueError, match="a decoding process was killed"):
        next(picture_batches(pictures, [0], 8, workers=1))


def test_no_name_is_a_formula_in_a_spreadsheet(tmp_path, monkeypatch):
    monkeypatch.setattr(predict, "draw_sheet", lambda *_: None)
    (tmp_path / "sheet.png").touch()
    names = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "cat"]
    shown = ["'=1+1", "'+1", "'-1", "'@SUM(A1)", r"\x09=1", r"\x0d=1", "cat"]
    pairs = {"classes": names, "probabilities": [1 / 7] * 7}
    rows = [{"file": "=cmd.png"} | pairs, {"file": "-.png", "error": "@error"}]
    predict.write_predictions(tmp_path, rows, None)
    assert not (tmp_path / "sheet.png").exists(), "that of an earlier call stayed"
    with open(tmp_path / "predictions.csv", newline="") as file:
        good, bad = csv.DictReader(file)
    assert [good[f"class_{k}"] for k in range(1, 8)] == shown
    assert (good["file"], bad["file"], bad["error"]) == ("'=cmd.png", "'-.png", "'@error")
    exact = lines(tmp_path / "predictions.jsonl")
    assert (exact[0]["classes"], exact[1]["file"]) == (names, "-.png")


def test_pictures_whose_conversion_may_erase_the_signal_are_named(tmp_path):
    """Check conversion warnings, which examine only the pictures on the sheet. The sheet decodes
    them anyway.
    """
    values = np.random.RandomState(0).randint(0, 4096, (20, 100)).astype(np.uint16)
    Image.fromarray(values).save(tmp_path / "a.png")
    row = {"file": str(tmp_path / "a.png"), "classes": ["cat"], "probabilities": [1.0]}
    looks = predict.write_predictions(tmp_path, [row] * 40, SimpleNamespace(script="train_cnn_a"))
    levels, shape = conversion_warnings(looks, is_cropped=True)
    assert levels.startswith("the pixels of 32 sampled images use only levels 0 to 15 of 255")
    assert "100 x 20 pixels" in shape


def test_words_for_pictures(pictures, monkeypatch):
    first, second = (str(pictures / "even" / f"{k:03d}.png") for k in (0, 2))
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{second}\n\n{first}\r\nnot there.jpg\n"))
    assert find_pictures(["-", first]) == [second, first, "not there.jpg"]
    assert len(find_pictures([str(pictures / "odd"), str(pictures / "*.png")])) == COUNT // 2 + 1
    # find_pictures also returns missing files, which are reported when they are opened.
    assert find_pictures([str(pictures / "none")]) == [str(pictures / "none")]
    with pytest.raises(ValueError, match="matches no file"):
        find_pictures(["nothing/*.jpg"])
    with pytest.raises(ValueError, match="no images were specified"):
        find_pictures([])


def test_what_is_refused(trained, pictures, tmp_path):
    for words, message in (
        ([trained], "MODEL and IMAGE are required"),
        ([tmp_path / "nothing", pictures], "nothing does not exist"),
    ):
        status, output = Job(["predict.py", *words]).wait()
        assert status == 1
        assert message in output
        assert "Traceback" not in output
