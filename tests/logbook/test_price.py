"""Plan and cost: what a run's page says of its hours, cost and memory, and of where the time went."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from common.system.phase import _Now
from common.system.processes import own_age_s
from tests.conftest import CNN, python, result, rows_of, run
from tests.logbook.pages import BARS, HOSTILE, check, is_golden, rows, write_lines, write_run
from tools.logbook.markdown import amount
from tools.logbook.page import page
from tools.logbook.price import Terms, lost_s, parts_s, paused_s, plan_of, planned_strategy, starts, used_s
from tools.logbook.record import RunRecord

# 300 steps of 128 images: at 384 images/s they take 100 s
PLAN = {"about": "2 x 1 NVIDIA T4", "script": "train_vit", "flags": ["--lr", "0.1"], "batch_size": 128}
PLAN |= {"epochs": 3, "mixed_precision": "fp16", "hosts": 2, "gpus": 1, "gpu": "NVIDIA T4"}
LINE = {"strategy": "ddp", "limit": "network", "images": 64, "images_per_s": 384.0, "step_s": 1 / 3}
LINE |= {"hours": 100 / 3600, "price": 2.0}
LINE |= {"memory": {"parameters": 2**30, "optimizer": 2**31, "context": 2**29}}
# 150 s of two processes on two hosts
SPENT = {"training": 105.0, "reading data": 5.0, "evaluation": 15.0, "saving": 4.0, "starting": 20.0}
FACTS = {"hosts": 2, "processes": 2, "steps": 300, "wall_s": 150.0, "train_s": 112.0, "images_per_s": 342.9}
FACTS |= {"per_device_batch_size": 64, "mixed_precision": "fp16"}
FACTS |= {"memory_gib": [{"peak": 3.3}, {"peak": 3.1}]}
FACTS |= {"spent_s": SPENT | {"ending": 1.0}}


def record(
    folder: Path, plan: Any = None, line: Any = None, price=None, about: Any = None, samples=(), **facts: Any
) -> tuple[RunRecord, Terms]:
    """A run of 300 steps with these changes, and its terms; without a plan where it is None."""
    write_run(folder, lines=300, about=about, **FACTS | facts)
    for lines in samples:
        write_lines(folder / f"telemetry-{lines[0]['host']}.jsonl", lines)
    run, file = RunRecord(folder), folder.with_name("plan.json")
    file.write_text(json.dumps(PLAN | (plan or {}) | {"lines": [LINE | (line or {})]}))
    return run, Terms({} if plan is None else plan_of(file, run), price)


def section(run: RunRecord, terms: Terms) -> str:
    """The section, which begins no other one."""
    text = page(run, "x", [], terms)
    return text.partition("## Plan and cost\n")[2].partition("\n## ")[0]


HOSTS = [
    {"host": "h1", "gpus": 1, "utilisation_pct": 80.0, "throttled_pct": 0.0},
    {"host": "h2", "gpus": 1, "utilisation_pct": 60.0, "throttled_pct": 12.0},
]


def test_plan_and_cost_are_the_stored_ones(tmp_path):
    """72 per hour is for both hosts; hours are of the whole run; the context's memory is not torch's."""
    one, terms = record(tmp_path / "run", plan={"price_per_hour": 72.0}, telemetry=HOSTS)
    assert is_golden("plan_and_cost.md", section(one, terms), tmp_path)
    assert sum(parts_s(one).values()) == one.facts["wall_s"]


def test_a_price_alone_gives_a_cost_without_a_plan(tmp_path):
    text = section(*record(tmp_path / "run", price=36.0))
    table = rows(text)
    assert (table["cost"], table["hours"]) == (["1.50"], ["0.0417"])
    assert table["evaluation"] == ["15.0 s", "10.0%", "0.150"]
    assert "lan" not in text
    assert "Plan and cost" not in page(RunRecord(tmp_path / "run"), "x", [])


@pytest.mark.parametrize(("plan", "price", "facts", "prices"), rows_of("prices of a cluster"))
def test_a_price_is_that_of_its_own_cluster(plan, price, facts, prices, tmp_path):
    """The plan's price per hour counts for a run on as many hosts and devices, and the other way."""
    run = record(tmp_path / "run", plan=plan, price=price, **facts)
    assert rows(section(*run))["cost"][:2] == prices


def test_an_unfinished_run_is_compared_with_a_part_of_the_plan(tmp_path):
    """150 of 300 steps: the plan's 50 s."""
    run, terms = record(tmp_path / "run", plan={"price_per_hour": 72.0}, steps=150, status="preempted")
    lines = (run.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run.folder / "metrics.jsonl").write_text("".join(lines[:150]))
    table = rows(section(RunRecord(run.folder), terms))
    assert table["hours, for 150 steps, 50.0% of the recipe"][:2] == ["0.0139", "0.0417"]
    assert table["cost"][:2] == ["1.00", "3.00"]


def header(host: str, t: float, age_s: float | None = None, before_s: float = 0.0) -> dict[str, Any]:
    return {"host": host, "t": t} | ({} if age_s is None else {"age_s": age_s, "before_s": before_s})


def test_what_restarts_have_lost_is_measured_by_the_telemetry(tmp_path):
    """Three processes. The first one ends 30 s after its last checkpoint, the second one 10 s, on another
    host, which was a worker before; 60 s and 5 s later the next ones begin."""
    first = [header("h1", 1010, 10), {"t": 1011, "step": 1}, {"t": 1100, "step": 90}]
    first += [header("h1", 1245, 10, 120.0), {"t": 1250, "step": 250}]
    second = [header("h2", 1010), {"t": 1099, "step": 89}]
    second += [header("h2", 1180, 20, 70.0), {"t": 1220, "step": 100}]
    run, terms = record(tmp_path / "run", price=36.0, samples=[first, second])
    assert [(start.before_s, start.ended_s) for start in starts(run)] == [(0, 100), (70, 130), (120, 135)]
    assert (lost_s(run), paused_s(run), used_s(run)) == (30 + 10, 60 + 15, 150 + 40)
    text = section(run, terms)
    table = rows(text)
    assert table["lost at restarts: work after the last checkpoint"] == ["40.0 s", "21.1%", "0.400"]
    assert table["total"] == ["190.0 s", "100.0%", "1.90"]
    assert table["cost"] == ["1.90"]
    assert "Not counted: 75 s between processes, at 2 restarts." in text
    (run.folder / "result.json").unlink()
    (run.folder / "metrics.jsonl").unlink()
    killed = RunRecord(run.folder)
    assert used_s(killed) == 135 + 40, "as long as the last process has samples"
    assert "Unknown: a process records this when it ends." in section(killed, terms)


@pytest.mark.parametrize(
    ("plan", "line", "facts"),
    [
        ({"about": HOSTILE, "flags": [BARS], "gpu": HOSTILE}, {"limit": BARS}, {}),
        ({}, {"hours": None, "price": None, "images_per_s": None, "memory": {}, "images": None}, {}),
        ({}, {"images_per_s": 5e-324, "memory": {"a": None}}, {"steps": 2**62, "images_per_s": 0}),
        ({"price_per_hour": 1e15}, None, {"spent_s": {"training": None, HOSTILE: 1.0}, "wall_s": 0.0}),
    ],
)
def test_odd_values_break_no_page(plan, line, facts, tmp_path):
    about = {"devices": [HOSTILE]}
    text = section(*record(tmp_path / "run", plan=plan, line=line, price=1e308, about=about, **facts))
    assert len(rows(text)["hours"]) == 3
    (tmp_path / "page.md").write_text(text)
    check(tmp_path / "page.md")


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, None), (0, "0"), (1234.5, "1,234"), (12.345, "12.3"), (0.0123456, "0.0123"), (1e-7, "1.00e-07")],
)
def test_amounts_have_three_digits(value, shown):
    assert amount(value) == shown


# --- The plan's file


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "--plan {file} can't be read: No such file or directory; make one: python plan.py --output"),
        ("no JSON", "--plan {file}, line 1, is no JSON: Expecting value; make one"),
        ("[1]", "--plan {file} holds no JSON object; make one"),
        ({"hosts": "two", "lines": None}, "--plan {file} is no plan (hosts, lines missing or wrong); make"),
        ({"lines": [{"strategy": 7}]}, "--plan {file} is no plan (lines missing or wrong); make one"),
        ({"script": "train_cnn_a"}, "--plan {file} is for train_cnn_a, but {run} ran train_vit; make one: "),
        (
            {"lines": [LINE | {"strategy": "fsdp"}, {}]},
            "--plan {file} plans fsdp, not ddp, which {run} used: ",
        ),
        ({"lines": []}, "--plan {file} plans nothing, not ddp, which {run} used: make one"),
    ],
)
def test_a_plan_that_is_none_is_refused(content, said, tmp_path):
    file, (run, _) = tmp_path / "a.json", record(tmp_path / "run")
    if isinstance(content, dict):
        file.write_text(json.dumps(PLAN | {"lines": [LINE]} | content))
    elif content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match="^" + re.escape(said.format(file=file, run=run.folder))):
        plan_of(file, run)


@pytest.mark.parametrize(("strategy", "sharding", "name"), rows_of("strategies of a plan"))
def test_the_names_of_running_strategies_in_a_plan(strategy, sharding, name):
    assert planned_strategy(strategy, sharding) == name


# --- A run, its plan and the page


FLAGS = [*CNN, "--data", "digits", "--batch_size", "64", "--epochs", "2", "--log_every", "10"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, cache) -> Path:
    """A run of two processes, one after another."""
    place = tmp_path_factory.mktemp("planned")
    words = [*python(), *FLAGS, *cache, "--telemetry_s", "0.1", "--output_dir", place / "run", "--max_steps"]
    run([*words, "20"])
    assert "continuing at step 20" in run([*words, "44"])
    return place / "run"


def test_the_parts_of_a_run_add_up_to_its_time(folder):
    """Over both processes; the time between two of them does not count."""
    found = result(folder)
    parts = found["spent_s"]
    assert parts.keys() == {"starting", "training", "reading data", "evaluation", "saving", "ending"}
    assert min(parts.values()) > 0
    assert sum(parts.values()) == pytest.approx(found["wall_s"], abs=0.1)
    assert max(parts["training"], found["train_s"]) < found["wall_s"] - parts["starting"]
    processes = starts(RunRecord(folder))
    assert processes[0].before_s == 0
    assert 0 < processes[1].before_s <= processes[0].ended_s + 0.2
    assert processes[1].ended_s == pytest.approx(found["wall_s"], abs=1)


@pytest.mark.full
def test_the_page_compares_the_run_with_its_plan(folder, tmp_path):
    """By the commands of a user."""
    file = tmp_path / "plan.json"
    run([*python(), "plan.py", "--gpu", "Tesla T4", "--price_per_hour", 36, "--output", file, *FLAGS])
    (line,) = [line for line in json.loads(file.read_text())["lines"] if line["strategy"] == "single"]
    output = run([*python(), "logbook.py", "add", folder, "--plan", file, "--folder", tmp_path / "book"])
    text, found = Path(output.splitlines()[-2]).read_text(), result(folder)
    table = rows(text.partition("## Plan and cost")[2].partition("\n## ")[0])
    hours, planned = used_s(RunRecord(folder)) / 3600, 44 * 64 / line["images_per_s"] / 3600
    assert found["wall_s"] / 3600 <= hours < (found["wall_s"] + 10) / 3600
    assert table["hours"][:2] == [amount(planned), amount(hours)]
    assert table["cost"][:2] == [amount(36 * planned), amount(36 * hours)]
    assert table["images/s"][:2] == [amount(line["images_per_s"]), amount(found["images_per_s"])]
    memory = max(process["peak"] for process in found["memory_gib"])
    assert table["memory of a process"][1] == f"{amount(memory)} GiB"
    assert "the run's figure is the peak of resident memory" in text
    shares = [float(cells[1].rstrip("%")) for cells in table.values() if cells[1].endswith("%")]
    assert sum(shares) == pytest.approx(200, abs=0.5), "the parts, and the whole"


def test_parts_divide_the_time_of_a_process():
    mine = _Now()
    assert mine.spent_s() == {"starting": pytest.approx(own_age_s(), abs=0.1)}
    for part in ("training", "evaluation", "training"):
        mine.enter(part)
    mine.phase = "waiting for the data"
    assert (mine.part, mine.spent_s().keys()) == ("training", {"starting", "training", "evaluation"})
    assert sum(mine.spent_s().values()) == pytest.approx(own_age_s(), abs=0.1)
