"""Tests of the commands in docs/fine_tuning.md."""

import re
import shlex

import pytest
import timm
from safetensors.torch import save_file

from onecurve.flags.recipe import parse
from tests.conftest import ROOT, full, latest, python, result, run, tensors
from tests.scripts.test_launchers import SMALL
from train_vit import Vit

BLOCKS = "".join(re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "fine_tuning.md").read_text(), re.DOTALL))
COMMANDS = [line for line in BLOCKS.splitlines() if line.startswith("python train_vit.py")]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_understood(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    recipe = parse(Vit, shlex.split(command)[2:])
    assert recipe.pretrained or recipe.weights
    assert recipe.data == "/data/photographs"


def test_the_readme_uses_the_learning_rate_of_the_page():
    """Check that the README command divides the recipe's learning rate and batch size by the same factor."""
    [line] = re.findall(r"^python (train_vit.py .*finetune_small.*)$", (ROOT / "README.md").read_text(), re.M)
    recipe = parse(Vit, [*shlex.split(line)[1:], f"--config={ROOT}/recipes/vit_b16_finetune_small.yaml"])
    of_file = parse(Vit, [f"--config={ROOT}/recipes/vit_b16_finetune_small.yaml"])
    assert recipe.lr / recipe.batch_size == pytest.approx(of_file.lr / of_file.batch_size, rel=0.1)


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_trains(command, tmp_path, cache):
    """Run each command with a small model's weights instead of weights from the Hub or from a run."""
    model = timm.create_model("test_vit", img_size=32, patch_size=8, num_classes=5)
    save_file(model.state_dict(), tmp_path / "small.safetensors")
    small = [*SMALL["train_vit.py"], *cache, "--weights", tmp_path / "small.safetensors"]
    run([*python(), *shlex.split(command)[1:], *small, "--output_dir", tmp_path / "run"])
    assert result(tmp_path / "run")["status"] == "finished"


@pytest.mark.parametrize("name", [full("finetune"), "linear_probe"])
def test_dinov3(name, tmp_path, cache):
    """Train the DINOv3 recipes on a small DINOv3 model with local weights instead of weights from the Hub."""
    model = timm.create_model("vit_small_patch16_dinov3", img_size=32, depth=1, num_classes=0)
    file = tmp_path / "small.safetensors"
    save_file(model.state_dict(), file)
    small = ["--model", "vit_small_patch16_dinov3", "--depth", "1", "--image_size", "32", "--weights", file]
    words = [*small, "--data", "digits", *cache, "--batch_size", "16", "--max_steps", "2"]
    config = f"recipes/vit_b16_dinov3_{name}.yaml"
    run([*python(), "train_vit.py", "--config", config, *words, "--output_dir", tmp_path / "run"])
    assert result(tmp_path / "run")["steps"] == 2
    trained = tensors(latest(tmp_path / "run"))
    kept = [trained[f"model:{key}"].equal(tensor) for key, tensor in model.state_dict().items()]
    assert all(kept) == (name == "linear_probe")  # A linear probe keeps the backbone frozen
