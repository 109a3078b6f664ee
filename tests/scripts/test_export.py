"""Tests that other libraries load the models exported by export.py and compute bitwise identical outputs."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import timm
import torch
from PIL import ExifTags, Image
from safetensors.torch import load_file, save_file

import export
import train_cnn_a
from onecurve.checkpoint.weights import TrainedModel, find_model
from onecurve.models.preprocessing import DataConfig
from onecurve.models.script import load_script
from onecurve.system.files import write_json
from tests.conftest import RESNET, ROOT, STRATEGIES, VIT, full, metrics, python, result, rows_of, run
from tests.scripts.conftest import QUICK
from tests.support.commands import call
from tools.inference.exported import MODEL_PY_TEMPLATE, ExportedModel, open_trained
from tools.inference.pictures import Pictures, Preprocessing
from tools.logbook.card import model_card

SCRIPTS = {"cnn_b": RESNET, "vit": VIT}
IMAGES = 4
WITH_BATCH_NORM = ["train_vit.py", "--model", "test_efficientnet", "--image_size", "32", "--mixup", "0"]

# Program that prints a model's logits for PNG files and runs without this repository on its path
LOAD = """
import json, sys, torch
from PIL import Image
torch.set_num_threads(1)
found = {}
for folder, *files in json.loads(sys.argv[1]):
    if "vit" in folder:
        import timm
        model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        config = timm.data.resolve_model_data_config(model)
        transform = timm.data.create_transform(**config, is_training=False)
        images = [transform(Image.open(file).convert("RGB"))[None] for file in files]
        names = model.pretrained_cfg["label_names"]
        from transformers import pipeline
        classify = pipeline("image-classification", model=folder)
        inputs = classify.image_processor([Image.open(file).convert("RGB") for file in files])
        with torch.inference_mode():
            logits = classify.model(**inputs).logits
            assert torch.equal(logits, model(torch.cat(images)))
        best = [answer[0]["label"] for answer in classify(files)]
        assert best == [names[k] for k in logits.argmax(1)]
    else:
        sys.path.insert(0, folder)
        import model as exported
        del sys.path[0], sys.modules["model"]
        model, names = exported.load(), exported.class_names()
        images = [exported.prepare(Image.open(file)) for file in files]
    with torch.inference_mode():
        found[folder] = [model(image)[0].tolist() for image in images], list(names)
assert not any("onecurve" in name.split(".")[0] for name in sys.modules), sys.modules
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def runs(trained, tmp_path_factory, cache) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    for name, words in SCRIPTS.items():
        run([*python(), *words, *QUICK, "--max_steps", 4, *cache, "--output_dir", folder / name])
    return {"cnn_a": trained} | {name: folder / name for name in SCRIPTS}


@pytest.fixture(scope="module")
def exported(runs, tmp_path_factory, cache) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("exported")
    for name, run_folder in runs.items():
        made(run_folder, folder / f"my_{name}", *cache)
    return {name: folder / f"my_{name}" for name in runs}


def made(*words, status: int = 0) -> str:
    """Run export.py in this process, check its exit status, and return its output."""
    exit_status, output = call(export.main, *words)
    assert exit_status == status, output
    return output


def write_pictures(trained: ExportedModel, folder: Path, name: str = "") -> list[Path]:
    """Undo the normalization of the sample's images and write the images as PNG files."""
    mean, std = (np.reshape(values, (3, 1, 1)) for values in trained.preprocessing[:2])
    files = [folder / f"{name}{k}.png" for k in range(IMAGES)]
    for file, image in zip(files, trained.sample_inputs.numpy(), strict=True):
        pixels = np.rint((image * std + mean) * 255).astype(np.uint8)
        Image.fromarray(pixels.transpose(1, 2, 0)).save(file)
    return files


def open_run(run_folder: Path, scratch: Path, cache: list) -> ExportedModel:
    return open_trained(str(run_folder), "best", None, [str(word) for word in cache], scratch, IMAGES)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "I;16"])
def test_an_exported_model_prepares_pictures_like_predict(mode, tmp_path):
    """Check that EXIF rotations are applied, transparent pixels become white and 16-bit values are scaled."""
    values = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.3)}
    config = values | {"input_size": (3, 32, 32), "crop_pct": 1.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.py").write_text(MODEL_PY_TEMPLATE.render(script="mine", model=""))
    noise = np.random.RandomState(0).randint(0, 256, (32, 32, 4), np.uint8)
    pixels = {"RGB": noise[..., :3], "RGBA": noise, "I;16": noise[..., 0] * np.uint16(257)}[mode]
    (exif := Image.Exif())[ExifTags.Base.Orientation] = 6
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    pictures = Pictures([str(tmp_path / "a.png")], Preprocessing(32, **values, is_cropped=False))
    prepared = load_script(tmp_path / "model.py").prepare(Image.open(tmp_path / "a.png"))
    assert torch.allclose(prepared[0], pictures[0][1], atol=1e-6)


def test_other_libraries_load_an_export_and_get_the_same_logits(runs, exported, tmp_path, cache):
    """Compute logits with timm, and for the ViT also with transformers, in a process without this project."""
    models = {name: open_run(run_folder, tmp_path, cache) for name, run_folder in runs.items()}
    files = {name: map(str, write_pictures(trained, tmp_path, name)) for name, trained in models.items()}
    request = [[str(exported[name]), *files[name]] for name in models]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    words = [sys.executable, "-B", "-c", LOAD, json.dumps(request)]
    output = subprocess.run(words, cwd=tmp_path, env=env, check=True, capture_output=True, text=True).stdout
    answers = json.loads(output.splitlines()[-1])
    for name, trained in models.items():
        logits, classes = answers[str(exported[name])]
        with torch.inference_mode():
            assert torch.tensor(logits) == pytest.approx(trained.model(trained.sample_inputs), abs=1e-5)
        assert classes == list("0123456789")
    trained_ema = load_file(runs["vit"] / "checkpoints" / best_step(runs["vit"]) / "ema.safetensors")
    exported_tensors = load_file(exported["vit"] / "model.safetensors")
    assert trained_ema.keys() == exported_tensors.keys()
    assert all(torch.equal(trained_ema[name], exported_tensors[name]) for name in trained_ema), (
        "an EMA is what is exported"
    )


@pytest.mark.parametrize("name", ["cnn_b", full("cnn_a"), full("vit")])
def test_onnx(name, runs, tmp_path, cache):
    import onnxruntime

    made(runs[name], tmp_path / "out", "--onnx", *cache)
    trained = open_run(runs[name], tmp_path, cache)
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    (logits,) = session.run(None, {"images": trained.sample_inputs.numpy()})
    assert logits == pytest.approx(trained.model(trained.sample_inputs).detach().numpy(), abs=1e-4)
    metadata = {key: json.loads(value) for key, value in session.get_modelmeta().custom_metadata_map.items()}
    assert metadata["label_names"] == list("0123456789")
    assert (metadata["mean"], metadata["std"]) == tuple(map(list, trained.preprocessing[:2]))
    assert (metadata["input_size"], metadata["crop_pct"]) == ([3, 32, 32], 1.0)


def test_the_card_says_what_the_run_reached(runs, exported):
    facts, text = result(runs["cnn_a"]), (exported["cnn_a"] / "README.md").read_text()
    assert f"value: {facts['best_accuracy']}" in text
    assert f"| accuracy | {facts['best_accuracy']:.4f} |" in text
    assert "| licence | not specified; add the licence |" in text
    matrix = json.loads((runs["cnn_a"] / "confusion.json").read_text())["confusion"]
    rows = [line.split(" | ") for line in text.splitlines() if re.match(r"\| \d \|", line)]
    assert [row[2] for row in rows] == [f"{row[k] / sum(row):.4f}" for k, row in enumerate(matrix)]


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["fsdp", "single", "ddp"])
def test_an_ema_of_a_model_with_batch_norm(strategy, tmp_path, cache):
    """Check that training, resuming, validation and export use the same EMA model, including its buffers."""
    run_folder = tmp_path / "run"
    flags = [*QUICK, "--batch_size", "96", "--lr", "1e-2", "--ema_decay", "0.8", *cache]
    for steps in ("6", "14"):
        words = ["--max_steps", steps, "--log_every", "1", "--output_dir", run_folder]
        run([*STRATEGIES[strategy], *WITH_BATCH_NORM, *flags, *words])
    step = best_step(run_folder)
    ema_file, raw_file = (
        run_folder / "checkpoints" / step / f"{name}.safetensors" for name in ("ema", "model")
    )
    averaged, raw = load_file(ema_file), load_file(raw_file)
    buffers = [name for name in averaged if "running_" in name or "num_batches" in name]
    assert len(buffers) == 39
    assert all(torch.equal(averaged[name], raw[name]) for name in buffers)
    assert not torch.equal(averaged["classifier.weight"], raw["classifier.weight"])

    trained = open_run(run_folder, tmp_path, cache)
    with torch.inference_mode():
        logits = trained.model(trained.sample_inputs)
    run([*python(), "validate.py", run_folder, "--mixed_precision", "no", *cache])
    report = json.loads((run_folder / "validation" / f"val_{int(step[5:])}" / "report.json").read_text())
    assert report["top1"] == result(run_folder)["best_accuracy"]
    evaluations = [
        line for line in metrics(run_folder) if line["step"] == int(step[5:]) and "val/loss" in line
    ]
    assert report["loss"] == pytest.approx(evaluations[0]["val/loss"], abs=1e-6)
    assert report["checkpoint"].endswith("ema.safetensors")
    words = [raw_file, "--mixed_precision", "no", *cache, "--output_dir", tmp_path / "raw"]
    run([*python(), "validate.py", *words])
    raw_accuracy = json.loads((tmp_path / "raw" / "report.json").read_text())["top1"]
    assert raw_accuracy == evaluations[0]["val/raw_accuracy"] != evaluations[0]["val/accuracy"]
    made(raw_file, tmp_path / "of_raw", *cache)
    assert f"value: {raw_accuracy}\n" in (tmp_path / "of_raw" / "README.md").read_text()

    made(run_folder, tmp_path / "out", *cache)
    exported = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    with torch.inference_mode():
        assert torch.equal(exported(trained.sample_inputs), logits)


@pytest.mark.parametrize(("data", "shown"), rows_of("data on a card"))
def test_the_card_has_no_private_path(data, shown, tmp_path):
    recipe = train_cnn_a.CnnA(data="/moved/since")
    weights = "/home/alice/ward 7/step_00000009/model.safetensors"
    # Runs of version 1.0 recorded the flag `data_root`.
    recipe_values = vars(recipe) | {"data": data, "weights": weights, "data_root": [data]}
    trained = TrainedModel(weights, "", "", 9, "train_cnn_a", recipe_values, ["a", "b"])
    model, ones = torch.nn.Linear(2, 2), DataConfig((1.0,) * 3, (1.0,) * 3)
    exported = ExportedModel(trained, train_cnn_a, recipe, model, ("a", "b"), ones, False, torch.ones(1))
    text = model_card("mine", exported, {"architecture": "Linear"})
    assert not re.search(r"alice|ward ?7|private", text)
    assert f"| data | {shown} |" in text
    assert f"| `data` | `{data if data.startswith('hub:') else shown}` |" in text
    assert "| `weights` | `model.safetensors` |" in text
    (tmp_path / "checkpoints").mkdir()
    in_run_folder = replace(trained, weights=f"{tmp_path}/checkpoints/step_00000009/m")
    exported = replace(exported, trained_model=in_run_folder)
    write_json(tmp_path / "result.json", {"best_step": 9, "best_accuracy": 0.5, "val_name": "val"})
    for max_images, images in ((None, "val split"), (7, "7 images of the val split")):
        write_json(tmp_path / "recipe.json", {"recipe": {"max_val_images": max_images}})
        text = model_card("mine", exported, {"architecture": "Linear"})
        assert f"The metrics were measured at step 9, on the {images}." in text
        assert ("model-index" in text, f"name: {shown}\n" in text) == (max_images is None, max_images is None)
        assert "The recipe changed" not in text
    write_json(tmp_path / "result.json", {"steps": 20})
    changes = [{"lr": [0.1, 0.01], "data": ["/home/alice/old", "/home/alice/new"]}, {"lr": [0.01, 0.5]}]
    starts = [{"step": 0}, *({"step": 5 + 10 * k, "changed": change} for k, change in enumerate(changes))]
    (tmp_path / "starts.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
    text = model_card("mine", exported, {"architecture": "Linear"})
    assert "- step 5: lr was 0.1, now 0.01; data was old, now new\n" in text
    assert "step 15" not in text, "after the exported step 9"


@pytest.mark.parametrize("name", ["cnn_a", full("vit")])
def test_an_exported_folder_is_accepted_as_a_model(name, runs, exported, tmp_path, cache):
    """Run validate.py and predict.py on an exported folder after deleting its model.py.

    Neither command executes code from the folder. Other users can read the folder's files.
    """
    folder = shutil.copytree(exported[name], tmp_path / "mine")
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    (folder / "model.py").unlink(missing_ok=True)
    words = [folder, "--mixed_precision", "no", *cache, "--output_dir", tmp_path / "out"]
    run([*python(), "validate.py", *words])
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["top1"] == result(runs[name])["best_accuracy"]
    picture = write_pictures(open_run(runs[name], tmp_path, cache), tmp_path)[0]
    words = [picture, "--workers", 0, "--output_dir", tmp_path]
    assert "1 image predicted" in run([*python(), "predict.py", folder, *words])
    (folder / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="describes neither a timm model nor the training"):
        find_model(str(folder), "best", tmp_path, lambda: None)


def best_step(folder: Path) -> str:
    return f"step_{result(folder)['best_step']:08d}"


def test_an_export_with_other_logits_is_refused(runs, tmp_path, cache, monkeypatch):
    def spoil(tensors, file):
        save_file({name: tensor + 1e-3 for name, tensor in tensors.items()}, file)

    monkeypatch.setattr("safetensors.torch.save_file", spoil)
    assert "computes different logits" in made(runs["cnn_a"], tmp_path / "new" / "out", *cache, status=1)
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize(("words", "message"), rows_of("refused exports"))
def test_what_is_refused(words, message, runs, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    save_file({"weight": torch.zeros(1)}, tmp_path / "lone.safetensors")
    folders = {name: str(run_folder) for name, run_folder in runs.items()}
    words = [word.format(tmp=tmp_path, step=best_step(runs["vit"]), **folders) for word in words]
    assert message in made(*words, status=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "lone.safetensors"]


def test_a_training_warns_about_an_export_that_will_be_refused(project_copy, tmp_path, cache):
    scripts = {"train_cnn_a": [], "train_cnn_b": ["--width", "8"], "train_cnn_c": []}
    text = (project_copy / "train_cnn_a.py").read_text()
    (project_copy / "train_cnn_c.py").write_text(text.replace("return Net(", "reseed, F; return Net("))
    for name, flags in scripts.items():
        words = [*python(), f"{name}.py", *flags, "--data", "digits", "--max_steps", 1, "--trackers", "none"]
        output = run([*words, *cache, "--output_dir", tmp_path / name], cwd=project_copy)
        warning = "warning: export.py will fail, because the Model section needs reseed. Move imports"
        assert (warning in output, "will fail" in output) == (name == "train_cnn_c",) * 2, output


def test_code_that_needs_more_than_torch_is_refused(runs, tmp_path, cache):
    file = tmp_path / "train_cnn_a.py"
    file.write_text((ROOT / "train_cnn_a.py").read_text().replace("return Net(", "reseed; return Net("))
    output = made(runs["cnn_a"], tmp_path / "out", "--script", file, *cache, status=1)
    assert "the Model section uses reseed. Move imports and definitions" in output
    assert not (tmp_path / "out").exists()


class Hub(BaseHTTPRequestHandler):
    """Fake Hub server that answers all requests needed to upload small files."""

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        self.server.requests.append((self.path, self.headers.get("Authorization"), body))
        base = f"http://127.0.0.1:{self.server.server_port}"
        if self.path.endswith("/preupload/main"):
            upload_mode, files = {"uploadMode": "regular", "shouldIgnore": False}, json.loads(body)["files"]
            answer: dict = {"files": [upload_mode | {"path": file["path"]} for file in files]}
        elif "/commit/" in self.path:
            answer = {"commitUrl": f"{base}/me/digits/commit/1", "commitOid": "1" * 40}
        else:
            answer = {"url": f"{base}/me/digits", "name": "me/digits"}
        self.answer(answer)

    def do_GET(self) -> None:
        self.answer({"id": "me/digits", "sha": "1" * 40, "siblings": []})

    def answer(self, content: dict) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_) -> None:
        pass


def test_push(exported, runs, tmp_path, cache):
    """Upload an exported folder with the Hub client to a server on the loopback interface."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.requests = []
        Thread(target=server.serve_forever, daemon=True).start()
        env = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_TOKEN": "hf_secret"}
        env |= {"HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "127.0.0.1"}
        words = [*python(), "export.py", runs["cnn_a"], tmp_path / "out", "--push", "me/digits", *cache]
        output = run(words, env=env)
        server.shutdown()
    assert "/me/digits" in output
    assert "hf_secret" not in output
    (commit,) = [body for path, _, body in server.requests if "/commit/" in path]
    sent = [json.loads(line) for line in commit.splitlines()]
    names = {line["value"]["path"] for line in sent if line["key"] == "file"}
    assert names == {path.name for path in (tmp_path / "out").iterdir()}
    assert {key for _, key, _ in server.requests} == {"Bearer hf_secret"}
