"""benchmarks/gpu_suite.py as far as a CPU goes: --dry_run."""

import json
import signal
import sys
import threading
import time
import warnings
from types import SimpleNamespace

import psutil
import pytest
import torch

from benchmarks import gpu_suite
from benchmarks.gpu import probe, throughput
from benchmarks.gpu.rows import Result, Setting, Skip, command, run_rows
from common.recipe import parse
from common.script import load_script, recipe_class
from tests.conftest import ROOT, Job, full

SUITE = [sys.executable, "-m", "benchmarks.gpu_suite", "--dry_run"]


@pytest.mark.needs("g++")
@pytest.mark.parametrize(
    "sections", ["ceilings,snapshots", *map(full, sorted({*gpu_suite.SECTIONS} - {"ceilings", "snapshots"}))]
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


def test_waits_are_counted_and_placed(monkeypatch):
    """Simulated: the warnings are those that CUDA's mode gives."""
    modes = []
    monkeypatch.setattr("torch.cuda.set_sync_debug_mode", modes.append)
    watch = probe.Waits(steps=2)
    watch.begin()
    for _ in range(3):
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    warnings.warn("another", stacklevel=1)
    found = watch.end(images=64)
    assert modes == ["warn", "default"]
    assert found["waits"] == 1.5
    assert [(place.split(":")[0], n) for place, n in found["places"].items()] == [("test_gpu_suite.py", 3)]


def test_launches_and_busy_share(monkeypatch):
    """Simulated: events of a GPU, one an annotation that spans the others, and one of a CPU."""
    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU

    class Profiler:
        def __init__(self, activities):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def events(self):
            kinds = [(cuda, False, 100), (cuda, False, 300), (cuda, True, 400), (cpu, False, 900)]
            names = ("device_type", "is_user_annotation", "device_time")
            return [SimpleNamespace(**dict(zip(names, kind, strict=True))) for kind in kinds]

    monkeypatch.setattr("torch.profiler.profile", Profiler)
    watch = probe.Profile(steps=2)
    watch.begin()
    found = watch.end(images=64)
    assert found["launches"] == 1
    assert found["busy_share"] == pytest.approx(0.2 / found["step_ms"])


def test_checks_run_at_once(tmp_path):
    both = threading.Barrier(2, timeout=30)  # broken, unless two rows wait in it

    def meets(setting: Setting) -> Result:
        return Result(both.wait() >= 0)

    setting = Setting(tmp_path, "digits", 0, True, time.time() + 60)
    assert [row["value"] for row in run_rows({"one": meets, "two": meets}, setting, at_once=2)] == [True] * 2


def test_rows_one_after_another_run_in_the_main_thread(tmp_path):
    setting = Setting(tmp_path, "digits", 0, True, time.time() + 60)
    here = {"one": lambda setting: Result(threading.current_thread() is threading.main_thread())}
    assert [row["value"] for row in run_rows(here, setting)] == [True]


def test_rows_that_the_sections_time_cuts_are_skipped(tmp_path):
    setting = Setting(tmp_path, "digits", 0, True, time.time() + 0.2)

    def long(setting: Setting) -> Result:
        time.sleep(0.3)
        raise RuntimeError("did not end in time")

    found = [(row["verdict"], row["note"]) for row in run_rows({"one": long, "two": long}, setting)]
    assert found == [
        ("skipped", "the section's time ended during this row"),
        ("skipped", "did not fit into the section's time"),
    ]


def test_a_command_that_hangs_leaves_no_process(tmp_path):
    setting = Setting(tmp_path, "digits", 0, True, time.time() + 60, command_s=1)
    sleep = "import subprocess; subprocess.run(['setsid', 'sleep', '61.25'])"
    assert command(setting, ["-c", sleep]).status is None
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "61.25"]]


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
