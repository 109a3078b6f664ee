"""Tests that current code can resume runs that earlier versions stored.

docs/checkpoints.md describes how to store a run.
"""

import json
import shutil
from pathlib import Path

import pytest

from onecurve import __version__
from onecurve.checkpoint.format import FORMAT_VERSION
from tests.conftest import latest, metrics, run
from tests.support.compare import assert_same_losses, assert_same_tensors
from tools.logbook.page import run_page
from tools.logbook.run_record import RunRecord

STORED = Path(__file__).parent / "stored"
LATER = "step_00000020"  # Checkpoint that the stored run wrote after its step-16 checkpoint


def test_the_format_of_this_version_is_stored():
    assert (STORED / f"format_{FORMAT_VERSION}").is_dir()


@pytest.mark.parametrize("stored", sorted(STORED.iterdir()), ids=lambda folder: folder.name)
def test_a_stored_run_continues_with_the_same_result(stored, tmp_path, cache):
    """Resume stored runs at step 16, between two log lines. The best checkpoint was written at step 14."""
    folder = tmp_path / "run"
    shutil.copytree(stored, folder)
    shutil.rmtree(folder / "checkpoints" / LATER)
    argv = json.loads((stored / "recipe.json").read_text())["argv"]
    output = run([*argv[:-1], folder, *cache])
    assert "continuing at step 16" in output
    record = RunRecord(folder)
    assert [start.settings.get("step") for start in record.starts] == [None, 16]
    assert "started by an earlier version without records of starts" in run_page(record, "run", [])
    assert_same_losses(metrics(folder), metrics(stored))
    assert_same_tensors(folder, stored, tolerance=1e-5)


def test_runs_and_checkpoints_store_the_version(tmp_path):
    run(["train_hello.py", "--max_steps", "2", "--trackers", "none", "--output_dir", tmp_path / "run"])
    assert __version__[0].isdigit()
    record = RunRecord(tmp_path / "run")
    assert not record.problems
    assert record.recipe_file["version"] == __version__
    manifest = json.loads((latest(tmp_path / "run") / "manifest.json").read_text())
    assert manifest["written_by"]["version"] == __version__
    assert f"| version | {__version__} |" in run_page(record, "run", [])
