"""Tests that starts.jsonl records every start and that pages, tables and titles name every start."""

import json
import os
from pathlib import Path

import pytest

from onecurve.run.starts import STARTS_FILE, add_start, join_with_then, kept_starts, starts_in_order
from onecurve.system.files import read_lines
from tests.conftest import CNN, STRATEGIES, full, python, run
from tools.logbook.history import resume_verdict
from tools.logbook.run_record import RunRecord

FLAGS = ["--data", "digits", "--batch_size", 64, "--epochs", 2, "--telemetry_s", 0, "--trackers", "none"]
FLAGS += ["--mixed_precision", "no", "--log_every", 10]
LAUNCHES = {  # Launcher and additional flags of each start
    "one process": [(python(), ["--max_steps", 20]), (python(), ["--lr", 1e-3, "--allow_changed", "lr"])],
    "strategies": [
        (STRATEGIES["ddp"], ["--max_steps", 12]),
        (STRATEGIES["fsdp"], ["--max_steps", 30]),
        (python(), ["--lr", 1e-3, "--allow_changed", "lr"]),
    ],
}
EXPECTED = {
    "one process": ("one process on 1 x CPU", [(0, 20), (20, 44)], "single on 1 x CPU"),
    "strategies": (
        "DDP on 2 x CPU, then FSDP2 on 2 x CPU, then one process on 1 x CPU",
        [(0, 12), (12, 30), (30, 44)],
        "ddp on 2 x CPU, then fsdp on 2 x CPU, then single on 1 x CPU",
    ),
}


@pytest.mark.parametrize("name", ["one process", full("strategies")])
def test_a_run_records_each_of_its_starts(name, tmp_path, cache):
    devices, steps, title = EXPECTED[name]
    for launcher, flags in LAUNCHES[name]:
        output = run([*launcher, *CNN, *FLAGS, *cache, *flags, "--output_dir", tmp_path / "run"])
    record = RunRecord(tmp_path / "run")
    assert record.strategies_and_devices.replace(" (x86_64)", "") == devices
    assert [(start.begin_step, start.last_kept_step) for start in record.kept_starts] == steps
    last = record.starts[-1].settings
    assert last["changed"] == {"lr": [0.003, 0.001]}
    assert resume_verdict(record) == f"The recipe changed. Step {steps[-1][0]}: lr was 0.003, now 0.001."
    assert {name: last[name] for name in record.recipe_file if name in last} == {
        name: value for name, value in record.recipe_file.items() if name != "defaults"
    }
    assert f"train_cnn_a, {title}" in " ".join(output.split()).replace(" (x86_64)", "")


def start(step: int, **changes) -> dict:
    facts = {"step": step, "source": "digits-1", "cropped": None, "has_optimizer": True, "argv": ["secret"]}
    return {"recipe": {"lr": 0.1, "name": "mine"}} | facts | changes


MANIFEST = {"recipe": {"lr": 0.1}, "data": "digits-1", "written_by": {"strategy": "ddp", "processes": 2}}


def test_a_start_changes_no_earlier_line(tmp_path):
    add_start(tmp_path, start(0), None, ())
    first = (tmp_path / STARTS_FILE).read_bytes()
    # Simulates a full disk that cut off the last line
    (tmp_path / STARTS_FILE).write_bytes(first + b'{"step": 5, "rec')
    changed = {"recipe": {"lr": 0.2}, "source": "digits-2", "has_optimizer": False}
    add_start(tmp_path, start(7, **changed), MANIFEST, ())
    assert (tmp_path / STARTS_FILE).read_bytes().startswith(first)
    assert [line["step"] for line in read_lines(tmp_path / STARTS_FILE)] == [0, 7]
    assert read_lines(tmp_path / STARTS_FILE)[1]["changed"] == {
        "lr": [0.1, 0.2],
        "content of the data": ["digits-1", "digits-2"],
        "state of the optimizer": ["restored", "zero"],
    }
    assert b"secret" not in (tmp_path / STARTS_FILE).read_bytes()


def test_another_path_to_the_same_data_is_no_change(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    manifest = MANIFEST | {"recipe": {"data": str(tmp_path / "pictures")}}
    add_start(tmp_path, start(7, recipe={"data": "pictures"}), manifest, ["data"])
    assert read_lines(tmp_path / STARTS_FILE)[-1]["changed"] == {}


def test_the_steps_of_an_earlier_version_are_a_start_without_a_step(tmp_path):
    add_start(tmp_path, start(7), MANIFEST, ())
    earlier, later = read_lines(tmp_path / STARTS_FILE)
    assert earlier == {"strategy": "ddp", "processes": 2, "recipe": {"lr": 0.1}, "source": "digits-1"}
    assert (later["step"], later["changed"]) == (7, {})


def test_nothing_is_appended_to_the_target_of_a_link(tmp_path):
    target = tmp_path / "target"
    target.write_text("mine\n")
    (tmp_path / STARTS_FILE).symlink_to(target)
    add_start(tmp_path, start(0), None, ())
    assert target.read_text() == "mine\n"
    (tmp_path / STARTS_FILE).unlink()
    os.mkfifo(tmp_path / STARTS_FILE)
    with pytest.raises(OSError, match="not a regular file"):
        add_start(tmp_path, start(0), None, ())


@pytest.mark.parametrize(
    ("begins", "last_step", "steps"),
    [
        ([0], 30, [(0, 30)]),
        ([0, 10, 20], 30, [(0, 10), (10, 20), (20, 30)]),
        # The last start resumed from an older checkpoint.
        ([0, 10, 10, 5], 30, [(0, 5), (10, 10), (10, 10), (5, 30)]),
        ([0, 0], 0, [(0, 0), (0, 0)]),
    ],
)
def test_a_step_belongs_to_the_last_start_that_trained_it(begins, last_step, steps):
    starts = starts_in_order([{"step": step} for step in begins], last_step)
    assert [(entry.begin_step, entry.last_kept_step) for entry in starts] == steps
    kept = [start for start in starts if start.last_kept_step > start.begin_step]
    assert kept_starts(starts) == (kept or starts[-1:])
    assert kept_starts([]) == []


def test_values_in_turn():
    assert join_with_then("aabb") == "a, then b"
    assert join_with_then("abcde") == "a, then b, then 2 others, then e"


def test_old_run_folders_have_no_starts(tmp_path):
    stored = Path(__file__).parents[1] / "checkpoint/stored/format_1"
    record = RunRecord(stored)
    assert (record.starts, record.kept_starts, record.recipe_changes) == ([], [], [])
    assert not any(STARTS_FILE in problem for problem in record.problems)
    assert json.dumps(record.strategies_and_devices)
