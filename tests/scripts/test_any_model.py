"""Tests of all models listed in docs/models.md.

Every launcher trains each model to bitwise identical weights. Each model also resumes and can be exported.
"""

import json
import re
from collections.abc import Iterable

import pytest
import timm
import torch

import export
from onecurve.models.timm_models import block_classes
from tests.conftest import CNN, HALF_THE_CORES, RESNET, ROOT, STRATEGIES, Job, full, python, result, torchrun
from tests.support.commands import call
from tests.support.compare import assert_same_training

SECTION = (ROOT / "docs" / "models.md").read_text().partition("## Models to train\n")[2]
TABLE = re.findall(r"^\| `([\w.]+)` \|.*\| (.*) \|$", SECTION.partition("\n## ")[0], re.MULTILINE)
QUICK = ("test_efficientnet",)  # Model with BatchNorm and three block classes
# Models in which BatchNorm averages so few values that rounding errors grow beyond the tolerance. Tests of
# these models use --deterministic.
ROUGH = ("densenet121", "ghostnet_050", "rexnet_100")
FLAGS = ["--data", "digits", "--image_size", "32", "--batch_size", "16", "--per_device_batch_size", "8"]
FLAGS += ["--mixed_precision", "no", "--trackers", "none", "--log_every", "1", "--log_samples"]
FLAGS += ["--max_steps", "4", "--max_val_images", "64"]
WHOLE = "defines no block classes, so the model is gathered or compiled as a whole"

# Models with convolutions whose inputs or weights contain a single pixel or image, which makes the memory
# format ambiguous
AMBIGUOUS = ("test_resnet", "test_efficientnet", "test_coatnet")
AMBIGUOUS += ("pvt_v2_b0", "mobilevit_xxs", "efficientvit_m0")
PROJECT_MODELS = [
    [*RESNET, "--image_size", "8", "--per_device_batch_size", "4"],
    [*RESNET, "--stem", "imagenet", "--per_device_batch_size", "4"],
    [*RESNET, "--per_device_batch_size", "1"],
    [*CNN, "--per_device_batch_size", "1"],
]


def timm_commands(models: Iterable[str], *sizes: str) -> list[list[str]]:
    command = ["train_vit.py", "--per_device_batch_size", "2", "--model"]
    return [[*command, model, "--image_size", size] for model in models for size in sizes]


@pytest.mark.parametrize(
    "rows",
    [
        [PROJECT_MODELS[0], *timm_commands(AMBIGUOUS[1:2], "32")],
        full([*PROJECT_MODELS, *timm_commands([model for model, _ in TABLE], "32", "64")]),
    ],
    ids=["some", "all"],
)
def test_the_bits_of_one_process(rows, tmp_path):
    """Check that all launchers train each model to bitwise identical weights in two --deterministic steps."""
    (tmp_path / "rows").write_text(json.dumps(rows))

    def bits(launcher: list) -> list[str]:
        command = [*launcher, ROOT / "tests" / "support" / "same_bits.py", tmp_path / "rows"]
        status, output = Job(command, env={"PYTHONPATH": str(ROOT)}).wait(timeout_s=1800)
        assert status == 0, output
        return [line for line in output.splitlines() if line.startswith('["train_')]

    one_process = bits(python())
    assert len(set(one_process)) == len(rows)
    assert bits(torchrun(3)) == one_process
    assert bits(STRATEGIES["fsdp"]) == one_process


@pytest.mark.parametrize(
    ("model", "blocks"), [row if row[0] in QUICK else full(*row) for row in TABLE], ids=lambda text: text
)
def test_a_model_trains_the_same_everywhere_and_is_exported(model, blocks, tmp_path, cache, stoppable):
    """Stop a run under FSDP2 after 2 steps, resume the run under DDP, and export the model."""

    def train(strategy: str, folder: str, stop_at: str = "-1") -> str:
        command = ["train_vit.py", "--model", model, *FLAGS, *cache, "--output_dir", tmp_path / folder]
        command += ["--deterministic"] if model in ROUGH else []
        env = {"STOP_AT": stop_at} | (HALF_THE_CORES if strategy == "single" else {})
        _, output = Job([*STRATEGIES[strategy], *command], cwd=stoppable, env=env).wait()
        expected_status = "finished" if stop_at == "-1" else "preempted"
        assert result(tmp_path / folder)["status"] == expected_status, output
        return output

    train("single", "single")
    assert (WHOLE in train("fsdp", "run", "2")) == (blocks == "the whole model")
    assert "continuing at step 2" in train("ddp", "run")
    assert_same_training(tmp_path / "run", tmp_path / "single")
    status, output = call(export.main, tmp_path / "run", tmp_path / "exported", *cache)
    assert status == 0, output


def test_the_table_has_the_blocks_of_at_least_20_models():
    assert len(TABLE) >= 20
    for model, blocks in TABLE:
        with torch.device("meta"):
            classes = block_classes(timm.create_model(model))
        assert blocks == (", ".join(classes) or "the whole model"), model
