"""Tests of the time that a run spent: its breakdown, the work lost at restarts, and the page's section."""

from typing import Any

import pytest

from tests.conftest import CNN, python, result, run
from tests.logbook.pages import check, is_golden, rows, write_lines, write_run
from tools.logbook.figures import _telemetry_panels
from tools.logbook.page import run_page
from tools.logbook.run_record import RunRecord, _sample_lines
from tools.logbook.spent import lost_s, main_processes, paused_s, seconds_by_activity

SPENT = {"training": 105.0, "reading data": 5.0, "evaluation": 15.0, "saving": 4.0, "starting": 10.0}
SPENT |= {"ending": 1.0, "imports": 4.0, "process group": 0.5, "CUDA": 1.5, "opening the data": 1.0}
SPENT |= {"building the model": 0.5, "warm-up of the graphs": 0.2, "capture of the graphs": 0.3}
SPENT |= {"first evaluation": 1.5, "plots": 0.5}


def section(run: RunRecord) -> str:
    """Return the page's section on spent time, which must not contain another heading."""
    return run_page(run, "x", []).partition("## Where the time went\n")[2].partition("\n## ")[0]


def test_the_section_matches_the_stored_section(tmp_path):
    run_record = RunRecord(write_run(tmp_path / "run", wall_s=150.0, spent_s=SPENT))
    assert is_golden("spent.md", section(run_record), tmp_path)
    assert sum(seconds_by_activity(run_record).values()) == run_record.result_values["wall_s"]
    assert section(RunRecord(write_run(tmp_path / "other"))) == "", "a process records this when it ends"


def header(host: str, t: float, age_s: float | None = None, before_s: float = 0.0) -> dict[str, Any]:
    return {"host": host, "t": t} | ({} if age_s is None else {"age_s": age_s, "before_s": before_s})


def test_telemetry_measures_the_loss_at_restarts(tmp_path):
    """Simulate a run with three consecutive processes.

    The first process ends 30 s after its last checkpoint. The second process ends 10 s after its last
    checkpoint, on another host, which previously was a worker. The second and third processes begin 60 s and
    5 s after the previous process ends.
    """
    first = [header("h1", 1010, 10), {"t": 1011, "step": 1}, {"t": 1100, "step": 90}]
    first += [header("h1", 1245, 10, 120.0), {"t": 1250, "step": 250}]
    second = [header("h2", 1010), {"t": 1099, "step": 89, "cpu_pct": 1.0}]
    second += [header("h2", 1180, 20, 70.0), {"t": 1220, "step": 100, "cpu_pct": 2.0}]
    run = RunRecord(write_run(tmp_path / "run", wall_s=150.0, spent_s=SPENT))
    for lines in (first, second):
        write_lines(run.folder / f"telemetry-{lines[0]['host']}.jsonl", lines)
    run = RunRecord(run.folder)
    assert [(start.wall_s_before, start.wall_s_at_end) for start in main_processes(run)] == [
        (0, 100),
        (70, 130),
        (120, 135),
    ]
    assert (lost_s(run), paused_s(run)) == (30 + 10, 60 + 15)
    # Pauses between processes are excluded.
    assert _telemetry_panels(run)[0][0].curves == {"h2": ([99, 100 + 60], [1.0, 2.0])}
    text = section(run)
    table = rows(text)
    assert table["restarting: lost work after the last checkpoint"] == ["40.0 s", "0.011", "21.1%"]
    assert table["total"] == ["190.0 s", "0.053", "100.0%"]
    assert "The table excludes 75 s between processes, in 2 restarts." in text


def test_the_telemetry_of_weeks_is_sample_lines():
    """Check that thinning keeps every line at which a process begins or ends."""
    texts = ['{"host"', *map(str, range(20_000)), "end", '{"host"', "last"]
    thinned = _sample_lines(texts)
    assert len(thinned) < 5_010
    assert (thinned[0], thinned[-3:]) == ('{"host"', ["end", '{"host"', "last"])
    assert _sample_lines([]) == []


@pytest.mark.parametrize("spent", [{"training": None}, {"training": 1e300}, {"saving": 0.0}])
def test_odd_values_break_no_page(spent, tmp_path):
    (tmp_path / "page.md").write_text(section(RunRecord(write_run(tmp_path / "run", spent_s=spent))))
    check(tmp_path / "page.md")


def test_the_parts_of_a_run_add_up_to_its_time(tmp_path, cache):
    """Train with two consecutive processes, whose pause is not part of the run's time."""
    folder, flags = tmp_path / "run", ["--data", "digits", "--batch_size", "64", "--epochs", "2"]
    words = [*python(), *CNN, *flags, *cache, "--log_every", "10", "--telemetry_s", "0.1"]
    words += ["--output_dir", folder, "--max_steps"]
    run([*words, "20"])
    assert "continuing at step 20" in run([*words, "44"])
    facts = result(folder)
    parts = facts["spent_s"]
    start_parts = {"imports", "process group", "opening the data", "building the model", "starting"}
    other_parts = {"training", "reading data", "first evaluation", "evaluation", "saving", "ending", "plots"}
    assert parts.keys() == start_parts | other_parts
    assert min(parts.values()) > 0
    assert sum(parts.values()) == pytest.approx(facts["wall_s"], abs=0.1)
    assert max(parts["training"], facts["train_s"]) < facts["wall_s"] - parts["starting"]
    processes = main_processes(RunRecord(folder))
    assert processes[0].wall_s_before == 0
    assert 0 < processes[1].wall_s_before <= processes[0].wall_s_at_end + 0.2
    # Telemetry ends before the plots, whose time depends on the machine's load
    telemetry_s = facts["wall_s"] - parts["plots"] - parts["ending"]
    assert processes[1].wall_s_at_end == pytest.approx(telemetry_s, abs=0.5)
