"""--profile: torch's trace and table of three steps."""

import gzip
import json

import pytest

from common.telemetry.profiler import FOLDER, TABLE, TRACE
from tests.conftest import CNN, STRATEGIES, VIT, Job, full, metrics, python, run
from tests.support.compare import assert_same_tensors, without_times

DIGITS = ["--data", "digits", "--batch_size", "96", "--per_device_batch_size", "48"]
DIGITS += ["--mixed_precision", "no", "--max_steps", "12", "--trackers", "none", "--telemetry_s", "0"]
DIGITS += ["--log_every", "1"]
PROFILE = ["--profile", "8"]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory, cache):
    folder = tmp_path_factory.mktemp("profiled") / "run"
    output = run([*python(), *CNN, *DIGITS, *PROFILE, *cache, "--output_dir", folder])
    assert f"profile of steps 8 to 10: {folder}/profile/trace.json.gz" in output
    return folder


def check(folder) -> list[str]:
    """Checks that three steps are in the trace. Returns the names of its events."""
    trace = json.loads(gzip.decompress((folder / FOLDER / TRACE).read_bytes()))["traceEvents"]
    steps = {e["name"] for e in trace if e["name"].startswith("ProfilerStep#")}
    assert steps == {"ProfilerStep#7", "ProfilerStep#8", "ProfilerStep#9"}  # counted from 0
    return [e["name"] for e in trace]


def test_a_profile_changes_no_number(profiled, cache, tmp_path):
    run([*python(), *CNN, *DIGITS, *cache, "--output_dir", tmp_path / "run"])
    assert without_times(metrics(profiled)) == without_times(metrics(tmp_path / "run"))
    assert_same_tensors(profiled, tmp_path / "run")
    assert "c10d::allreduce_" not in check(profiled)
    table = (profiled / FOLDER / TABLE).read_text()
    (row,) = [line.split() for line in table.splitlines() if "aten::convolution_backward " in line]
    assert row[-1] == "12"  # calls: two layers, two accumulations, three steps


@pytest.mark.parametrize(
    ("script", "strategy"),
    [(CNN, "ddp"), *(full(VIT, s) for s in STRATEGIES if s != "single")],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_one_process_of_two_is_profiled(script, strategy, cache, tmp_path):
    flags = [] if script is CNN else ["--clip_norm", "1"]
    run([*STRATEGIES[strategy], *script, *DIGITS, *flags, *PROFILE, *cache, "--output_dir", tmp_path / "run"])
    assert any(name.startswith(("c10d::", "gloo:")) for name in check(tmp_path / "run"))


def test_a_step_that_does_not_come_is_refused_or_said(profiled, cache, tmp_path):
    words = [*python(), *CNN, *DIGITS, *cache, "--output_dir"]
    status, output = Job([*words, tmp_path / "run", "--profile", "11"]).wait()
    assert status == 1
    assert "--profile 11: 3 steps from step 11 on, and the run ends at step 12: choose at most 10" in output
    output = run([*words, profiled, *PROFILE, "--max_steps", "14"])
    assert "no new profile: the run resumes after step 8" in output
