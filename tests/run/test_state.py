"""Tests of reading and writing state.json, including malformed files and files from older versions."""

import json
import math
from types import SimpleNamespace

import pytest

from onecurve.checkpoint.format import Checkpoint
from onecurve.run.run import Run
from onecurve.run.state import REQUIRED_FIELDS, RunState
from onecurve.system.files import has_type, split_by_type

OPTIMIZER = {"scalars": {"head.weight": {"step": 3}}, "groups": [{}]}


def test_a_state_comes_back_through_its_file(tmp_path):
    state = RunState(4, True, {"accuracy": 0.5, "step": 4}, {"accuracy": 0.5, "images": 360}, 3, 1.5, 2.5)
    saved = state.copy_for_save(
        losses=[0.1, 0.2], accumulations=2, epoch=0.3, optimizer=OPTIMIZER, wandb_id="a"
    )
    (tmp_path / "state.json").write_text(json.dumps(saved.to_json()))
    loaded = RunState.read(Checkpoint(tmp_path, {"step": 4}))
    assert loaded == saved
    assert loaded.wall_s > state.wall_s
    assert loaded.wall_s - state.wall_s == pytest.approx(sum(loaded.spent_s.values()), abs=0.1)
    assert loaded.scalars() == {"optimizer": OPTIMIZER, "loss_scale": None}
    with pytest.raises(ValueError, match="is not a valid state of step 5: the file belongs to step 4"):
        RunState.read(Checkpoint(tmp_path, {"step": 5}))


def test_an_evaluation_that_is_not_finite_ends_the_run():
    meter, state = SimpleNamespace(restart_clock=lambda: 0.0), RunState()
    run = SimpleNamespace(session=SimpleNamespace(meter=meter, state=state))
    with pytest.raises(FloatingPointError, match="the evaluation loss is nan at step 4"):
        Run.log_evaluation(run, 4, {"loss": math.nan, "accuracy": 0.1})
    assert state == RunState()


WRONG = {name: [None] for name in REQUIRED_FIELDS} | {
    "step": ["1", 1.5, True, 2**70],
    "best": [1, {"loss": "x"}, {"loss": None}],
    "losses": [[], ["x"], [float("nan")]],
    "accumulations": [0, -1],
    "train_s": [float("inf")],
    "bad_images": [[0.5]],
    "optimizer": [{}, {"scalars": {"a": 1}, "groups": []}],
    "loss_scale": [{"scale": "x"}],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in WRONG for value in WRONG[name]])
def test_a_state_that_no_run_has_written_is_refused_with_the_field(name, value):
    state = RunState(losses=[0.5], optimizer=OPTIMIZER)
    content = state.to_json()
    assert RunState.from_json(content) == state
    with pytest.raises(ValueError, match=name):
        RunState.from_json(content | {name: value})


def test_fitting_keeps_what_has_the_expected_type():
    schema = {"a": int, "b": list[str], "c": {"*": float, "d": str}, "e": int | None}
    content = {"a": 1, "b": ["x"], "c": {"d": "x", "z": 2, "none": None}, "e": 3, "unknown": object()}
    expected = {name: value for name, value in content.items() if name != "unknown"}
    assert split_by_type(content, schema) == (expected, [])
    wrong = {"a": True, "b": ["x", 1], "c": {"d": 1}, "e": "3"}
    assert split_by_type(wrong, schema) == ({}, ["a", "b", "c", "e"])
    assert has_type([{"n": 1.5}], [{"n": float}])
    assert not has_type([{"n": "1"}], [{"n": float}])
