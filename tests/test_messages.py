"""Whole sentences of a user's mistakes. Other tests look for the kind of an error and the flag's name."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from common.batch_norm import RunningStatistics
from common.data.sources import find_source
from common.distributed.launch_config import check_launch_config
from common.distributed.strategy import without_gradient
from common.order import Shuffled, steps_per_epoch
from common.recipe import ImageRecipe, parse, share_out
from tools.launch.hosts import read_hostfile, select
from tools.prepare.archives import open_stream
from train_cnn_a import CnnA
from train_vit import Vit, build_model

DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "zero.json"}


def data(place: str) -> None:
    find_source(ImageRecipe(data=place), lambda: None)


def images(*files: str) -> None:
    """Empty files."""
    for file in files:
        os.makedirs(os.path.dirname(file) or ".", exist_ok=True)
        open(file, "wb").close()


def hosts(text: str, include: str = "") -> None:
    with open("hostfile", "w") as file:
        file.write(text)
    select(read_hostfile(Path("hostfile")), include, "")


def deepspeed(json: str) -> None:
    with open("zero.json", "w") as file:
        file.write(json)
    check_launch_config(DEEPSPEED, 2)


MESSAGES: dict[str, tuple[Callable[[], object], str]] = {  # {here}: the working folder
    "unknown flag": (
        lambda: parse(CnnA, ["--epoch", "3"]),
        "train_cnn_a.py: error: unknown flag --epoch: did you mean --epochs?",
    ),
    "not a number": (
        lambda: parse(CnnA, ["--epochs", "many"]),
        "train_cnn_a.py: error: --epochs many: must be a whole number",
    ),
    "out of bounds": (
        lambda: parse(CnnA, ["--label_smoothing", "2"]),
        "train_cnn_a.py: error: --label_smoothing 2.0: must be from 0 to 1",
    ),
    "no such choice": (
        lambda: parse(CnnA, ["--mixed_precision", "fp8"]),
        "train_cnn_a.py: error: --mixed_precision fp8: choose among no, bf16, fp16",
    ),
    "two folders": (
        lambda: parse(CnnA, ["--output_dir", "a", "--model_folder", "b"]),
        "train_cnn_a.py: error: --output_dir and --model_folder exclude one another: give one of them",
    ),
    "no config file": (
        lambda: parse(CnnA, ["--config", "nothing.yaml"]),
        "train_cnn_a.py: error: --config nothing.yaml: No such file or directory",
    ),
    "batch and processes": (
        lambda: share_out(100, None, 3),
        "--batch_size 100 does not divide among 3 processes: choose 99 or 102",
    ),
    "batch and micro-batch": (
        lambda: share_out(100, 32, 2),
        "--batch_size 100 is no multiple of --per_device_batch_size 32 x 2 processes = 64: choose 64 or 128",
    ),
    "batch and data": (
        lambda: steps_per_epoch(Shuffled(10), share_out(16, None, 2)),
        "--batch_size 16 is more than the 10 training images: choose at most 10 (with 2 processes a multiple"
        " of 2)",
    ),
    "a name near another": (
        lambda: data("digit"),
        "--data digit: does not exist; did you mean digits?",
    ),
    "no such data": (
        lambda: data("/nowhere"),
        "--data /nowhere: does not exist; give a folder or one of: digits, cifar10, synthetic",
    ),
    "no images": (
        lambda: (images("d/notes.txt"), data("d")),
        "--data {here}/d holds neither parquet files (train-*.parquet, test-*.parquet) nor class folders"
        " (train/<class>/*.jpg, val/<class>/*.jpg)",
    ),
    "a list in the folder": (
        lambda: (images("d/pets.csv", "d/img/1.txt"), data("d")),
        "--data {here}/d holds neither parquet files (train-*.parquet, test-*.parquet) nor class folders"
        " (train/<class>/*.jpg, val/<class>/*.jpg); for images that a list names give --data"
        " {here}/d/pets.csv",
    ),
    "no validation images": (
        lambda: (images("d/train/cat/a.jpg"), data("d")),
        "--data d has no val, validation, valid or test to evaluate on: give it one, or hold out a tenth of"
        " its training images by --holdout 0.1",
    ),
    "class folders in a folder": (
        lambda: (images("d/all/cat/a.jpg", "d/all/dog/more/a.TIF"), data("d")),
        "--data {here}/d has images in one folder alone, all: give --data {here}/d/all if the"
        " classes are in it",
    ),
    "neither a share nor a number": (
        lambda: parse(CnnA, ["--holdout", "2.5"]),
        "train_cnn_a.py: error: --holdout 2.5: must be a share below 1, or a whole number of images",
    ),
    "no training images": (
        lambda: (images("d/test/cat/a.jpg"), data("d")),
        "--data {here}/d has test/, but no train/",
    ),
    "other classes": (
        lambda: (images("d/train/cat/a.jpg", "d/val/dog/a.jpg"), data("d")),
        "--data {here}/d: the class folders of train/ and val/ differ: only in train: cat. only in val: dog.",
    ),
    "an empty class": (
        lambda: (images("d/train/cat/a.jpg", "d/train/dog/a.txt", "d/val/cat/a.jpg"), data("d")),
        "no images (.jpg .jpeg .jpe .jfif .png .webp .bmp .tif .tiff .gif .ppm .pgm .pbm .pnm .avif) in"
        " {here}/d/train/dog: fill or remove the folder",
    ),
    "precision of a launcher": (
        lambda: check_launch_config({"ACCELERATE_MIXED_PRECISION": "fp8"}, 2),
        "the accelerate config has mixed_precision: fp8, which is not supported: choose bf16, fp16 or no",
    ),
    "FSDP 1": (
        lambda: check_launch_config({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, 2),
        "the accelerate config has fsdp_version: 1, which is not supported: choose fsdp_version: 2",
    ),
    "MPI": (
        lambda: check_launch_config({"OMPI_COMM_WORLD_SIZE": "2"}, 1),
        "the accelerate config has mpirun_config: yes, which is not supported: choose multi-GPU, which is"
        " also how several processes rehearse on a CPU",
    ),
    "an optimizer of DeepSpeed": (
        lambda: deepspeed('{"zero_optimization": {"stage": 2}, "optimizer": {"type": "Adam"}}'),
        "zero.json has optimizer, which is not supported: the script has its own",
    ),
    "DeepSpeed without ZeRO": (
        lambda: deepspeed("{}"),
        "zero.json has no zero_optimization: take one of ds_configs/",
    ),
    "malformed JSON": (
        lambda: deepspeed('{"zero_optimization" 2}'),
        "deepspeed_config_file zero.json, line 1, is no JSON: Expecting ':' delimiter",
    ),
    "a host twice": (
        lambda: hosts("a slots=1\nb slots=1\na slots=2\n"),
        "hostfile, line 3: a is in line 1 already",
    ),
    "a host without slots": (
        lambda: hosts("a\n"),
        "hostfile, line 1: expected `name slots=N`, found `a`",
    ),
    "no such host": (
        lambda: hosts("a slots=1\n", include="b"),
        "--include b: no host b; there are a",
    ),
    "no such archive": (
        lambda: open_stream("nothing.tar"),
        "nothing.tar is no file: give the path or s3:// url of an archive",
    ),
    "no such weights": (
        lambda: build_model(Vit(model="test_vit", weights="nothing.safetensors"), 10),
        "--weights nothing.safetensors: there is no such file",
    ),
    "weights of another kind": (
        lambda: (images("w.safetensors"), build_model(Vit(model="test_vit", weights="w.safetensors"), 10)),
        "--weights w.safetensors is not a safetensors file: Error while deserializing header: header too"
        " small",
    ),
    "no such model": (
        lambda: build_model(Vit(model="vit_nothing"), 10),
        "--model vit_nothing is not in timm: timm.list_models('vit_*') names them",
    ),
    "no transformer": (
        lambda: build_model(Vit(model="resnet18"), 10),
        "--model resnet18 is no Vision Transformer that timm builds like this: ResNet.__init__() got an"
        " unexpected keyword argument 'img_size'",
    ),
    "no way to the hub": (
        lambda: build_model(Vit(model="vit_tiny_patch16_224", pretrained=True), 10),
        "--pretrained: the hub can't be reached (An error happened while trying to locate the file on the Hub"
        " and we cannot find the requested files in the local cache. Please check your connection and try"
        " again or make sure your Internet connection is on.): fetch the file where it can, by `hf download"
        " timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k model.safetensors --local-dir .`, copy it here, and"
        " give --weights model.safetensors",
    ),
    "another BatchNorm": (
        lambda: RunningStatistics(nn.Sequential(nn.SyncBatchNorm(2))),
        "the model has SyncBatchNorm, whose statistics depend on the number of"
        " processes: use BatchNorm1d, 2d or 3d, or timm's BatchNormAct2d",
    ),
}


@pytest.mark.parametrize("mistake", MESSAGES)
def test_a_mistake_has_this_message(mistake, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_cnn_a.py"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    make, message = MESSAGES[mistake]
    with pytest.raises((ValueError, SystemExit)) as raised:
        make()
    said = capsys.readouterr().err.strip() if raised.type is SystemExit else str(raised.value)
    assert said == message.format(here=tmp_path)


def test_a_missing_gradient_has_this_message():
    assert without_gradient(["head.bias"]) == (
        "under DDP every trained parameter needs a gradient in each step, and head.bias had none: set its"
        " requires_grad to False, or train with FSDP or ZeRO"
    )
