"""Tests of benchmarks/gpu_suite.py on a CPU: --dry_run, verdicts, time limits, and other projects' flags."""

import json
import signal
import sys
import time

import psutil
import pytest

from benchmarks import gpu_suite, peers
from benchmarks.gpu import speed
from benchmarks.gpu.rows import Result, Setting, Skip, command, on_gpu, run_rows
from onecurve.flags.recipe import parse
from onecurve.models.script import load_script, recipe_class
from onecurve.system.processes import is_alive
from tests.conftest import ROOT, Job, full, wait_until

SUITE = [sys.executable, "-m", "benchmarks.gpu_suite", "--dry_run"]


@pytest.mark.needs("g++")
@pytest.mark.parametrize("sections", ["ceilings", *map(full, sorted({*gpu_suite.SECTIONS} - {"ceilings"}))])
def test_a_dry_run(sections, tmp_path):
    status, output = Job([*SUITE, "--out", tmp_path, "--only", sections]).wait(900)
    assert status == 0, output
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {row["section"] for row in rows} == set(sections.split(","))
    assert {row["verdict"] for row in rows} <= {"", "ok", "skipped"}, rows
    assert all(row["note"] for row in rows if row["verdict"] == "skipped")
    first = (tmp_path / "table.md").read_text().split("\n\n")[0]  # The tables of kernels follow this table
    assert len(first.splitlines()) == len(rows) + 2


# --- Rows and sections


def setting_of(tmp_path, left_s: float = 60, **named) -> Setting:
    return Setting(tmp_path, "digits", 0, named.pop("dry_run", True), time.time() + left_s, **named)


def fails(setting: Setting) -> Result:
    ended = command(setting, ["-c", "print('first of many lines'); raise SystemExit(3)"])
    raise RuntimeError(f"no such kernel, {ended.status}")


def skips(setting: Setting) -> Result:
    raise Skip("needs two GPUs")


def test_a_row_that_fails_keeps_its_output_and_ends_no_other(tmp_path):
    log = tmp_path / "failures.log"
    rows = {"one": fails, "two": skips, "three": lambda setting: Result(3, "ms"), "four": on_gpu(fails)}
    results = list(run_rows(rows, setting_of(tmp_path, failures=log)))
    assert [(row["row"], row["verdict"], row["value"], row["note"]) for row in results] == [
        ("one", "FAIL", "", "RuntimeError: no such kernel, 3"),
        ("two", "skipped", "", "needs two GPUs"),
        ("three", "", 3, ""),
        ("four", "skipped", "", "a dry run does not include this row"),
    ]
    text = log.read_text()
    assert "first of many lines" in text
    assert "exit status 3" in text
    assert "three" not in text


def test_a_measurement_that_misses_its_estimate_by_half_is_marked(tmp_path):
    rows = {str(v): lambda s, v=v: Result(v, "images/s", expected=100) for v in (40, 60, 140, 160)}
    verdicts = [row["verdict"] for row in run_rows(rows, setting_of(tmp_path, dry_run=False))]
    assert verdicts == ["off by half", "", "", "off by half"]


def test_rows_beyond_the_time_of_a_section_are_skipped(tmp_path):
    def long(setting: Setting) -> Result:
        time.sleep(1.2)
        raise RuntimeError("did not end in time")

    results = run_rows({"one": long, "two": long}, setting_of(tmp_path, left_s=1))
    assert [(row["verdict"], row["note"]) for row in results] == [
        ("skipped", "the section's time ended during this row"),
        ("skipped", "the row did not fit into the section's time"),
    ]


def test_a_command_that_hangs_leaves_no_process(tmp_path):
    sleep = "import subprocess; subprocess.run(['setsid', 'sleep', '61.2'])"
    assert command(setting_of(tmp_path, command_s=1), ["-c", sleep]).status is None
    wait_until(lambda: ["sleep", "61.2"] not in [p.info["cmdline"] for p in psutil.process_iter(["cmdline"])])


def test_a_package_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (row,) = run_rows({"zero2, one process": lambda setting: Result()}, setting_of(tmp_path))
    assert (row["verdict"], row["note"]) == ("skipped", "deepspeed is not installed")


def test_sections_that_do_not_fit_are_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    words = ["--out", str(tmp_path), "--only", "ceilings,recipes,inputs", "--budget_s", "5"]
    suite = gpu_suite.Suite(gpu_suite.parse(words), tmp_path)
    suite.run()
    assert [row["verdict"] for row in suite.rows] == ["skipped"] * 3
    assert "did not fit" in (tmp_path / "table.md").read_text()


@pytest.mark.full
def test_ctrl_c_leaves_the_table_and_no_process(tmp_path):
    job, table = Job([*SUITE, "--out", tmp_path, "--only", "ceilings,scripts"]), tmp_path / "table.md"
    wait_until(lambda: table.exists() and "matrix product, fp16" in table.read_text(), timeout_s=120)
    children = psutil.Process(job.process.pid).children(recursive=True)
    job.process.send_signal(signal.SIGINT)
    status, output = job.wait(60)
    assert status == 130, output
    assert "interrupted" in table.read_text()
    # Killed processes take a moment to disappear.
    wait_until(lambda: not any(map(is_alive, children)), timeout_s=10)


def test_without_a_gpu_the_suite_suggests_a_dry_run():
    status, output = Job([*SUITE[:-1], "--out", ROOT / "nowhere"]).wait(60)
    assert status == 1
    assert "error: torch can't use a GPU on this machine. Pass --dry_run" in output
    assert not (ROOT / "nowhere").exists()


# --- Peer projects
# timm's train.py is run manually, as the docstring of benchmarks/peers.py explains.


def test_the_flags_and_images_of_timms_train_py(tmp_path):
    words = ["--data", "digits", "--batch_size", "32", "--cache_dir", str(tmp_path / "cache")]
    flags = peers.timm_flags(words, tmp_path / "images")
    assert {"--model=vit_base_patch32_224", "--batch-size=32", "--mixup=0.8", "--num-classes=10"} <= {*flags}
    assert len([*tmp_path.glob("images/train/*/*.png")]) == 1437
    assert {path.name for path in tmp_path.glob("images/*/*/")} == {f"{label:04d}" for label in range(10)}


def test_timms_speed_excludes_its_start(tmp_path):
    """Check timm's speed in a log in timm's format.

    Updates of 512 images take 10 s each until the 16th update, then 0.1 s each.
    """
    lines = [(update, 10 + 0.1 * max(0, update - 16)) for update in (0, 16, 32, 48)]
    log = tmp_path / "log.py"
    log.write_text(
        "".join(
            f"print('Train: 0 [{n:>4d}/97 ( 18%)]  Loss: 2.31 (2.31)  Time: 0.1s, 5120.00/s  "
            f"({s / (n + 1):.3f}s, {512 * (n + 1) / s:>7.2f}/s)  LR: 1.000e-03  Data: 0.01 (0.01)')\n"
            for n, s in lines
        )
    )
    with psutil.Popen(["sleep", "60"]) as bystander:
        assert peers.timms([str(log)], 32) == pytest.approx(5120, rel=1e-3)
        bystander.terminate()
    assert bystander.returncode == -signal.SIGTERM  # Ending timm's process must not end this process
    with pytest.raises(ValueError, match="ended within 16 updates"):
        peers.timms(["-c", "print('Train: 0 [   0/97 (  1%)]  Time: 1s, 5/s  (1.000s,  512.00/s)')"], 32)


@pytest.mark.parametrize("case", speed.CASES.values(), ids=speed.CASES)
def test_the_flags_of_a_full_run(case, tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "photographs", lambda setting, sizes: tmp_path / "x".join(map(str, sizes[0])))
    script, *flags = map(str, speed.script_words(setting_of(tmp_path, dry_run=False), case))
    recipe = parse(recipe_class(load_script(ROOT / script)), flags)
    assert recipe.data == (str(tmp_path / "224x224") if case.photographs else "digits")
    assert recipe.batch_size in case.flags
