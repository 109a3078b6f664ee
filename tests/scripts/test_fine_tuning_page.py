"""The commands of docs/fine_tuning.md."""

import re
import shlex

import pytest
import timm
from safetensors.torch import save_file

from common.recipe import parse
from tests.conftest import ROOT, python, result, run
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


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_trains(command, tmp_path, cache):
    """With a small model's weights in place of the hub's, or of a run's."""
    model = timm.create_model("test_vit", img_size=32, patch_size=8, num_classes=5)
    save_file(model.state_dict(), tmp_path / "small.safetensors")
    small = [*SMALL["train_vit.py"], *cache, "--weights", tmp_path / "small.safetensors"]
    run([*python(), *shlex.split(command)[1:], *small, "--output_dir", tmp_path / "run"])
    assert result(tmp_path / "run")["status"] == "finished"
