"""Tests of the complete messages for user mistakes in messages.yaml.

Tests in other files check only the error type and the flag name.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from onecurve.data.cache import prepare_data
from onecurve.data.decode import decode_image
from onecurve.data.sources import find_source
from onecurve.flags.recipe import ImageRecipe, parse, share_out
from tests.conftest import ROOT
from tools.prepare.archives import open_stream
from train_cnn_a import CnnA
from train_vit import Vit, build_model


def data(path: str, **flags) -> None:
    find_source(ImageRecipe(data=path, **flags), lambda: None)


def images(*files: str) -> None:
    """Create empty image files at these paths."""
    for file in files:
        os.makedirs(os.path.dirname(file) or ".", exist_ok=True)
        open(file, "wb").close()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 123\n" % (b"0" * 64)
MISTAKES: dict[str, Callable[[], object]] = {
    "unknown flag": lambda: parse(CnnA, ["--epoch", "3"]),
    "a flag near none": lambda: parse(CnnA, ["--steps", "3"]),
    "flags of timm": lambda: parse(CnnA, ["--clip-grad=1"]),
    "a flag of timm in another script": lambda: parse(CnnA, ["--opt", "sgd"]),
    "a flag of timm with two equivalents": lambda: parse(CnnA, ["--output=x"]),
    "a flag of timm without an equivalent": lambda: parse(CnnA, ["--sync-bn"]),
    "a flag's beginning": lambda: parse(CnnA, ["--checkpoint", "3"]),
    "a flag that has left": lambda: parse(CnnA, ["--no_half_residual"]),
    "a launcher's file": lambda: (
        shutil.copy(ROOT / "accelerate_configs" / "cpu.yaml", "."),
        parse(CnnA, ["--config", "cpu.yaml"]),
    ),
    "no such choice": lambda: parse(CnnA, ["--mixed_precision", "fp8"]),
    "no config file": lambda: parse(CnnA, ["--config", "nothing.yaml"]),
    "batch and processes": lambda: share_out(100, None, 3),
    "batch and micro-batch": lambda: share_out(100, 32, 2),
    "a name near another": lambda: data("digit"),
    "no such data": lambda: data("/nowhere"),
    "no images": lambda: (images("d/notes.txt"), data("d")),
    "lists in the folder": lambda: (images("d/pets.csv", "d/more.csv", "d/img/1.txt"), data("d")),
    "a folder of Kaggle": lambda: (
        images("d/labels.csv", "d/a.csv", "d/sample_submission.csv", "d/train_set.csv", "d/test/1.jpg"),
        data("d"),
    ),
    "tar files in the folder": lambda: (images("d/train-0.tar"), data("d")),
    "a list with two labels of a file": lambda: (
        images("d/a.png", "d/b.png"),
        Path("d/pets.csv").write_text("file,label\na.png,cat\nb.png,dog\n./a.png,dog\n"),
        data("d/pets.csv"),
    ),
    "a list with a list of labels": lambda: (
        images("d/a.png"),
        Path("d/pets.jsonl").write_text('{"file": "a.png", "labels": ["cat", "dog"]}'),
        data("d/pets.jsonl"),
    ),
    "one class": lambda: (images("d/cat/a.jpg", "d/readme.txt"), data("d")),
    "two held-out splits and --holdout": lambda: (
        images("d/train/cat/a.jpg", "d/val/cat/b.jpg", "d/test/cat/c.jpg"),
        data("d", holdout=0.5),
    ),
    "no validation images": lambda: (images("d/train/cat/a.jpg"), data("d")),
    "class folders in a folder": lambda: (images("d/all/cat/a.jpg", "d/all/dog/more/a.TIF"), data("d")),
    "neither a share nor a number": lambda: parse(CnnA, ["--holdout", "2.5"]),
    "no fold": lambda: parse(CnnA, ["--fold", "6/5"]),
    "no training images": lambda: (images("d/test/cat/a.jpg"), data("d")),
    "other classes": lambda: (images("d/train/cat/a.jpg", "d/val/dog/a.jpg"), data("d")),
    "empty classes": lambda: (images("d/train/cat/a.jpg", "d/val/cat/a"), data("d")),
    "no such archive": lambda: open_stream("nothing.tar"),
    "no such weights": lambda: build_model(Vit(model="test_vit", weights="nothing.safetensors"), 10),
    "weights of another kind": lambda: (
        images("w.safetensors"),
        build_model(Vit(model="test_vit", weights="w.safetensors"), 10),
    ),
    "an image of Git LFS": lambda: decode_image(POINTER),
    "a table of Git LFS": lambda: (
        Path("data.parquet").write_bytes(POINTER),
        prepare_data("data.parquet", Path("cache"), holdout=0.5),
    ),
    "weights of Git LFS": lambda: (
        Path("w.safetensors").write_bytes(POINTER),
        build_model(Vit(model="test_vit", weights="w.safetensors"), 10),
    ),
    "no weights of timm": lambda: build_model(Vit(model="vit_base_r26_s32_224", pretrained=True), 10),
    "no such model": lambda: build_model(Vit(model="vit_nothing"), 10),
    "no such tag": lambda: build_model(Vit(model="hf-hub:timm/test_vit.nothing"), 10),
    "a model of another owner": lambda: Vit(model="hf-hub:me/vit"),
    "a model in a folder": lambda: Vit(model="local-dir:models/vit"),
    "no patches": lambda: build_model(Vit(model="resnet18", patch_size=4), 10),
    "shared parameters": lambda: build_model(Vit(model="coat_lite_tiny", image_size=32), 10),
    "no such size": lambda: build_model(Vit(model="test_maxvit", image_size=40), 10),
}
MESSAGES = yaml.safe_load(Path(__file__).with_name("messages.yaml").read_text())


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_has_this_message(mistake, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_cnn_a.py"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises((ValueError, SystemExit)) as raised:
        MISTAKES[mistake]()
    message = capsys.readouterr().err.strip() if raised.type is SystemExit else str(raised.value)
    assert message == MESSAGES[mistake].format(here=tmp_path)


def test_timms_validate_has_other_flags_than_its_train(monkeypatch, capsys):
    for script, expected in {
        "validate.py": "unknown flag --img_size. Use --image_size N instead.",
        "train_cnn_a.py": "unknown flag --img_size: did you mean --image_size?",
    }.items():
        monkeypatch.setattr(sys, "argv", [script])
        with pytest.raises(SystemExit):
            parse(CnnA, ["--img-size", "64"])
        assert capsys.readouterr().err == f"{script}: error: {expected}\n"


@pytest.mark.parametrize(("offline", "reason"), [(False, "refused"), (True, "")])
def test_a_hub_out_of_reach_is_one_line(offline, reason, monkeypatch, capfd, caplog):
    """Check that an unreachable Hub causes a one-line error that suggests a download, without five retries
    per file.
    """
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    began = time.monotonic()
    model, file = "vit_tiny_patch16_224.augreg_in21k", "model.safetensors"
    reason += r"\)\. On a machine with internet access, run `hf download timm/"
    reason += (
        rf"{model} {file} --local-dir \.`\. Then copy the file to this machine and use --weights {file}\.$"
    )
    with pytest.raises(ValueError, match=rf"the Hub can't be reached \(.*{reason}"):
        build_model(Vit(model=model, pretrained=True), 10)
    assert time.monotonic() - began < 5
    assert (*capfd.readouterr(), caplog.text) == ("", "", "")


def test_heic_without_its_package_is_reported(tmp_path):
    """Check that HEIC files are recognized by their extension, or by their first bytes if the extension
    differs.
    """
    images(*(f"{tmp_path}/d/{name}" for name in ("cat/1.HEIC", "cat/2.heic", "dog/3.heif")))
    code = """import sys
sys.modules["pillow_heif"] = None
from onecurve.data.class_folders import list_splits, IgnoredFiles
from onecurve.data.decode import decode_image
from pathlib import Path
folder, file = Path(sys.argv[1]), b"....ftypheic" + bytes(99)
for mistake in (lambda: list_splits(folder, IgnoredFiles()), lambda: decode_image(file)):
    try:
        mistake()
    except ValueError as error:
        print(error)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "d")]
    messages = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60
    ).stdout.splitlines()
    remedy = (
        "to read HEIC files, run `pip install pillow-heif`, or convert the files with"
        " `magick mogrify -format jpg *.heic`"
    )
    assert messages[0].endswith(f". Left out: 2 .heic, 1 .heif ({remedy})")
    assert messages[1].endswith(
        "HEIC format. To read the file, run `pip install pillow-heif`, or convert the file with"
        " `magick heic:FILE NEW.jpg`"
    )
