"""benchmarks/gpu_suite.py as far as a CPU goes: --dry_run."""

import json
import signal
import sys
import time

import psutil
import pytest

from benchmarks import gpu_suite
from benchmarks.gpu import throughput
from benchmarks.gpu.rows import Result, Setting, Skip, run_rows
from common.recipe import parse
from common.script import load_script, recipe_class
from tests.conftest import ROOT, Job, full

SUITE = [sys.executable, "-m", "benchmarks.gpu_suite", "--dry_run"]


@pytest.mark.parametrize(
    "sections", ["ceilings,waits", *map(full, sorted({*gpu_suite.SECTIONS} - {"ceilings", "waits"}))]
)
def test_a_dry_run(sections, tmp_path):
    status, output = Job([*SUITE, "--out", tmp_path, "--only", sections]).wait(900)
    assert status == 0, output
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {row["section"] for row in rows} == set(sections.split(","))
    assert {row["verdict"] for row in rows} <= {"", "ok", "skipped"}, rows
    assert all(row["note"] for row in rows if row["verdict"] == "skipped")
    assert len((tmp_path / "table.md").read_text().splitlines()) == len(rows) + 2


def test_a_row_that_fails_does_not_end_the_others(tmp_path):
    def fails(setting: Setting) -> Result:
        raise RuntimeError("no such kernel")

    def skips(setting: Setting) -> Result:
        raise Skip("needs two GPUs")

    setting = Setting(tmp_path, "digits", 0, True, time.time() + 60)
    rows = {"one": fails, "two": skips, "three": lambda setting: Result(3, "ms")}
    found = [(row["row"], row["verdict"], row["value"], row["note"]) for row in run_rows(rows, setting)]
    assert found == [
        ("one", "FAIL", "", "RuntimeError: no such kernel"),
        ("two", "skipped", "", "needs two GPUs"),
        ("three", "", 3, ""),
    ]


def test_a_package_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    setting = Setting(tmp_path, "digits", 0, True, time.time() + 60)
    (row,) = run_rows({"zero2, one process": lambda setting: Result()}, setting)
    assert (row["verdict"], row["note"]) == ("skipped", "deepspeed is not installed")


@pytest.mark.parametrize("case", throughput.CASES.values(), ids=throughput.CASES)
def test_the_flags_of_a_full_run(case, tmp_path):
    setting = Setting(tmp_path, "synthetic", 1, False, time.time() + 60)
    script, *flags = map(str, throughput.script_words(setting, case))
    recipe = parse(recipe_class(load_script(ROOT / script)), flags)
    assert recipe.data == "synthetic"
    assert recipe.batch_size in case.flags
    assert throughput.flops_per_image(setting, case) > 1e6


def test_what_no_longer_fits_says_so(tmp_path, monkeypatch, capsys):
    words = ["--out", str(tmp_path), "--only", "ceilings,inputs", "--budget_s", "5"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", ["gpu_suite", *words])
    assert gpu_suite.main() == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["note"] for row in rows] == ["did not fit into --budget_s"] * 2


def test_ctrl_c_leaves_the_table_and_no_process(tmp_path):
    job = Job([*SUITE, "--out", tmp_path, "--only", "ceilings,scripts"])
    deadline = time.monotonic() + 120
    while (
        not (tmp_path / "table.md").exists()
        or "matrix product, fp16" not in (tmp_path / "table.md").read_text()
    ):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    below = psutil.Process(job.process.pid).children(recursive=True)
    job.process.send_signal(signal.SIGINT)
    status, output = job.wait(60)
    assert status == 130, output
    assert "interrupted" in (tmp_path / "table.md").read_text()
    assert not [process for process in below if process.is_running()]


def test_without_a_gpu_it_says_what_to_do():
    status, output = Job([*SUITE[:-1], "--out", ROOT / "nowhere"]).wait(60)
    assert status == 1
    assert "error: there is no GPU that torch can use: --dry_run does" in output
    assert not (ROOT / "nowhere").exists()
