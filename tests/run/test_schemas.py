"""Tests that a run's files contain the keys and types in onecurve/run/schemas.py, on which readers rely."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onecurve.flags.recipe import METRICS, score
from onecurve.run.schemas import MetricsLine, RecipeFile, Report, Result, StartLine, Verified, value_types
from onecurve.system.files import split_by_type
from tests.conftest import run
from tools.logbook.run_record import RunRecord

WORDS = ["train_cnn_a.py", "--data", "digits", "--widths", "4,8,32", "--epochs", "2", "--batch_size", "96"]
WORDS += ["--trackers", "none", "--best_by", "macro_f1", "--holdout", "0.1", "--telemetry_s", "0.2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, cache):
    folder = tmp_path_factory.mktemp("schemas") / "run"
    run([*WORDS, *cache, "--output_dir", folder])
    return folder


def contents(folder: Path) -> Iterator[tuple[Any, dict]]:
    """Yield each schema with a file's content, or with each line of a JSON Lines file."""
    for schema, name in {RecipeFile: "recipe.json", Result: "result.json"}.items():
        yield schema, json.loads((folder / name).read_text())
    for schema, name in {StartLine: "starts.jsonl", MetricsLine: "metrics.jsonl"}.items():
        for line in (folder / name).read_text().splitlines():
            yield schema, json.loads(line)


def test_a_run_follows_the_schemas(folder):
    schemas = set()
    for schema, content in contents(folder):
        schemas.add(schema)
        left_out = {"argv", "defaults"} if schema is StartLine else set()
        assert schema.__required_keys__ - left_out <= content.keys()
        assert split_by_type(content, value_types(schema))[1] == []
        unknown = content.keys() - value_types(schema).keys()
        metrics = {name for name in unknown if name.startswith(("train/", "val/", "test/"))}
        assert unknown == (metrics if schema is MetricsLine else set())
    assert schemas == {RecipeFile, Result, StartLine, MetricsLine}


def test_the_log_book_keeps_every_value_of_a_result(folder):
    content = json.loads((folder / "result.json").read_text())
    record = RunRecord(folder)
    assert record.problems == []
    kept = {name: value for name, value in content.items() if value is not None}
    assert {"best_macro_f1", "final_macro_f1", "test_macro_f1"} <= kept.keys()
    assert {name: record.result_values[name] for name in kept} == kept


def test_a_result_has_the_metrics_of_every_evaluation():
    named = {f"{which}_{name}" for which in ("best", "final", "test") for name in METRICS}
    assert named <= value_types(Result).keys()


def test_kinds_of_a_schema():
    stamp = value_types(Verified)["stamps"][0]
    assert (stamp["commit"], stamp["differences"], stamp["findings"]) == (str, {"*": float}, [str])
    assert value_types(Report)["confusion"] == [[int]]
    assert value_types(MetricsLine)["why"] is str


def test_a_better_evaluation_has_a_higher_score():
    metrics = {"loss": 2.0, "accuracy": 0.5, "macro_f1": 0.4}
    assert [score(metrics, by) for by in ("accuracy", "macro_f1", "loss")] == [0.5, 0.4, -2.0]
    assert score({"loss": 2.0}, "accuracy") == -2.0
