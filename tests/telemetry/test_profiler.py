"""Tests of --profile, which writes torch's trace and table for three steps."""

import gzip
import json

import pytest
import torch

from onecurve.telemetry.profiler import PROFILE_FOLDER, TABLE_FILE, TRACE_FILE, begin_profile
from tests.conftest import CNN, STRATEGIES, VIT, metrics, python, run
from tests.support.compare import assert_same_tensors, without_times
from tests.telemetry.conftest import DIGITS

PROFILE = ["--profile", "8", "--telemetry_s", "0"]


def check(folder) -> list[str]:
    """Check that the trace contains three steps, and return the names of the trace's events."""
    trace = json.loads(gzip.decompress((folder / PROFILE_FOLDER / TRACE_FILE).read_bytes()))["traceEvents"]
    steps = {e["name"] for e in trace if e["name"].startswith("ProfilerStep#")}
    assert steps == {"ProfilerStep#7", "ProfilerStep#8", "ProfilerStep#9"}  # The profiler counts steps from 0
    return [e["name"] for e in trace]


def test_a_profile_changes_no_number(folder, cache, tmp_path):
    profiled = tmp_path / "run"
    output = run([*python(), *DIGITS, *PROFILE, *cache, "--output_dir", profiled])
    assert f"the profile of steps 8 to 10 is in {profiled}/profile/trace.json.gz. Open" in output
    assert without_times(metrics(profiled)) == without_times(metrics(folder))
    assert_same_tensors(profiled, folder)
    assert "c10d::allreduce_" not in check(profiled)
    table = (profiled / PROFILE_FOLDER / TABLE_FILE).read_text()
    (row,) = [line.split() for line in table.splitlines() if "aten::convolution_backward " in line]
    assert row[-1] == "12"  # The table counts 12 calls: two layers, two accumulations, three steps


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "strategy"),
    [(CNN, "ddp"), *((VIT, s) for s in STRATEGIES if s != "single")],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_one_process_of_two_is_profiled(script, strategy, cache, tmp_path):
    flags = [*DIGITS[len(CNN) :], *PROFILE, *([] if script is CNN else ["--clip_norm", "1"])]
    run([*STRATEGIES[strategy], *script, *flags, *cache, "--output_dir", tmp_path / "run"])
    assert any(name.startswith(("c10d::", "gloo:")) for name in check(tmp_path / "run"))


def test_a_profile_of_steps_that_do_not_run_is_refused_or_reported(tmp_path, capsys):
    refusal = (
        "--profile 11 needs 3 steps from step 11, but the run ends at step 12. Specify --profile 10 or less"
    )
    with pytest.raises(ValueError, match=refusal):
        begin_profile(torch.device("cpu"), 11, 0, 12, None)
    assert begin_profile(torch.device("cpu"), 8, 12, 14, tmp_path) is None
    assert "no new profile is recorded, because the run resumes after step 8" in capsys.readouterr().out
