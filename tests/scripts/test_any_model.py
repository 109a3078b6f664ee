"""The table of docs/models.md: each model trains everywhere, resumes, and is exported."""

import re

import pytest
import timm
import torch

import export
from common.timm_models import block_classes
from tests.conftest import HALF_THE_CORES, ROOT, STRATEGIES, Job, full, result
from tests.support.commands import call
from tests.support.compare import assert_same_training

TABLE = re.findall(r"^\| `([\w.]+)` \|.*\| (.*) \|$", (ROOT / "docs" / "models.md").read_text(), re.MULTILINE)
QUICK = ("test_efficientnet", "pit_ti_224")  # with BatchNorm and three kinds of blocks; without blocks
FLAGS = ["--data", "digits", "--image_size", "32", "--batch_size", "16", "--per_device_batch_size", "8"]
FLAGS += ["--mixed_precision", "no", "--trackers", "none", "--log_every", "1", "--log_samples"]
FLAGS += ["--max_steps", "4"]
WHOLE = "has no blocks: it is gathered or compiled as a whole"


@pytest.mark.parametrize(
    ("model", "blocks"), [row if row[0] in QUICK else full(*row) for row in TABLE], ids=lambda text: text
)
def test_a_model_trains_the_same_everywhere_and_is_exported(model, blocks, tmp_path, cache, stoppable):
    """FSDP2's run is stopped after 2 steps, and DDP resumes it."""

    def train(strategy: str, folder: str, stop_at: str = "-1") -> str:
        words = ["train_vit.py", "--model", model, *FLAGS, *cache, "--output_dir", tmp_path / folder]
        env = {"STOP_AT": stop_at} | (HALF_THE_CORES if strategy == "single" else {})
        _, output = Job([*STRATEGIES[strategy], *words], cwd=stoppable, env=env).wait()
        ended = "finished" if stop_at == "-1" else "preempted"
        assert result(tmp_path / folder)["status"] == ended, output
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
            found = block_classes(timm.create_model(model))
        assert blocks == (", ".join(found) or "the whole model"), model
