"""--plan: checked before anything starts, kept in the run folder, no part of the recipe; times by part."""

import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from common.report import bill
from common.report.page import page
from common.report.record import RunRecord
from common.run.planned import plan_of, planned_strategy
from common.system.doing import _Now
from common.system.processes import own_age_s
from tests.conftest import CNN, Job, accelerate, python, result, run, torchrun
from tests.report.test_logbook import rows

FLAGS = [*CNN, "--data", "digits", "--batch_size", "64", "--epochs", "2", "--log_every", "10"]
# Two copies of the model, each in two parts
HYBRID = ["--num_machines", "1", "--main_process_port", "0", "--num_processes", "4"]
HYBRID += ["--parallelism_config_dp_shard_size", "2"]
LINE = {"strategy": "single", "images": 64, "memory": {"parameters": 2**20, "context": 2**29}}
LINE |= {"images_per_s": 6400.0, "step_s": 0.01, "hours": 0.44 / 3600, "price": None}


def write_plan(file: Path, strategies: tuple[str, ...] = ("single", "ddp"), **changes: Any) -> Path:
    """A file as plan.py --output writes it."""
    plan = {"about": "1 x 1 Tesla T4", "script": "train_cnn_a", "flags": [], "batch_size": 64, "epochs": 2}
    plan |= {"mixed_precision": "fp16", "hosts": 1, "gpus": 1, "gpu": "Tesla T4", "price_per_hour": None}
    plan |= {"lines": [LINE | {"strategy": strategy} for strategy in strategies]}
    file.write_text(json.dumps(plan | changes))
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory, cache) -> Path:
    """A run of three processes one after another: with a plan, with another one, without."""
    place = tmp_path_factory.mktemp("planned")
    words = [*python(), *FLAGS, *cache, "--telemetry_s", "0.1", "--output_dir", place / "run", "--max_steps"]
    run([*words, "10", "--plan", write_plan(place / "plan.json")])
    other = write_plan(place / "other.json", about="another one", price_per_hour=36.0)
    output = run([*words, "30", "--plan", other])
    assert "continuing at step 10" in output, "a plan is no part of the recipe"
    other.unlink()
    assert "continuing at step 30" in run([*words, "44"])
    return place / "run"


def test_a_resumed_run_keeps_the_newest_plan(folder):
    kept = json.loads((folder / "plan.json").read_text())
    assert (kept["about"], kept["line"]["strategy"], "lines" in kept) == ("another one", "single", False)
    assert result(folder)["steps"] == 44
    assert json.loads((folder / "recipe.json").read_text())["recipe"]["plan"] is None


def test_the_parts_of_a_run_add_up_to_its_time(folder):
    """Over three processes; the time between two of them does not count."""
    found = result(folder)
    parts = found["spent_s"]
    assert parts.keys() == {"starting", "training", "reading data", "evaluation", "saving", "ending"}
    assert min(parts.values()) > 0
    assert sum(parts.values()) == pytest.approx(found["wall_s"], abs=0.1)
    assert parts["training"] < found["train_s"] < found["wall_s"] - parts["starting"]
    processes = bill.starts(RunRecord(folder))
    assert processes[0].before_s == 0
    assert 0 < processes[1].before_s <= processes[0].ended_s + 0.2
    assert processes[2].ended_s == pytest.approx(found["wall_s"], abs=1)


def test_the_page_compares_the_run_with_its_plan(folder):
    record, found = RunRecord(folder), result(folder)
    text = page(record, "x", [])
    table = rows(text.partition("## Plan and bill")[2].partition("\n## ")[0])
    hours = bill.used_s(record) / 3600
    assert found["wall_s"] / 3600 <= hours < (found["wall_s"] + 10) / 3600
    assert table["hours"][:2] == [bill.amount(0.44 / 3600), bill.amount(hours)]
    assert table["price"][:2] == [bill.amount(0.44 / 100), bill.amount(36 * hours)]
    assert table["images/s"][:2] == ["6,400", bill.amount(found["images_per_s"])]
    memory = max(process["peak"] for process in found["memory_gib"])
    assert table["memory of a process"][:2] == ["0.000977 GiB", f"{bill.amount(memory)} GiB"]
    assert "the run a process's resident memory at its peak" in text
    assert table["device"] == ["Tesla T4", found["device"]]
    shares = [float(cells[1].rstrip("%")) for cells in table.values() if cells[1].endswith("%")]
    assert sum(shares) == pytest.approx(200, abs=0.5), "the parts, and the whole"


def test_a_plan_of_several_processes_is_read_by_one_of_them(tmp_path, cache):
    """The plan comes through a pipe, out of which it can be read once."""
    content, pipe = write_plan(tmp_path / "plan.json").read_text(), tmp_path / "pipe"
    os.mkfifo(pipe)
    threading.Thread(target=pipe.write_text, args=(content,), daemon=True).start()
    words = [*torchrun(2), *FLAGS, *cache, "--max_steps", "2", "--trackers", "none", "--output_dir"]
    run([*words, tmp_path / "run", "--plan", pipe])
    kept = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert kept["line"]["strategy"] == "ddp"
    text = page(RunRecord(tmp_path / "run"), "x", [])
    table = rows(text.partition("Planned otherwise")[2].partition("###")[0])
    assert (table["devices"], table["images a forward"]) == (["1", "2"], ["64", "32"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "--plan {file} can't be read: No such file or directory; make one: python plan.py --output"),
        ("no JSON", "--plan {file}, line 1, is no JSON: Expecting value; make one"),
        ("[1]", "--plan {file} holds no JSON object; make one"),
        (
            {"hosts": "two", "lines": None},
            "--plan {file} is no plan (hosts, lines missing or wrong); make one",
        ),
        ({"lines": [{"strategy": 7}]}, "--plan {file} is no plan (lines missing or wrong); make one"),
        ({"script": "train_vit"}, "--plan {file} is of train_vit, and this is train_cnn_a; make one: python"),
        (
            {"lines": [LINE | {"strategy": "fsdp"}, {}]},
            "--plan {file} has no single, which runs here, but fsdp: make one for this number of hosts",
        ),
        ({"lines": []}, "--plan {file} has no single, which runs here, but nothing: make one"),
    ],
)
def test_a_plan_that_is_none_is_refused(content, said, tmp_path):
    file = tmp_path / "plan.json"
    if isinstance(content, dict):
        write_plan(file, **content)
    elif content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match="^" + re.escape(said.format(file=file))):
        plan_of(file, "train_cnn_a", "single")


def test_a_wrong_plan_ends_all_processes_before_anything_starts(tmp_path):
    file = write_plan(tmp_path / "plan.json", strategies=("single",))
    words = [*FLAGS, "--cache_dir", tmp_path / "cache", "--output_dir", tmp_path / "run", "--plan", file]
    status, output = Job([*torchrun(2), *words], warm=True).wait(90)
    assert status != 0
    assert output.count("error: ") == 1, output
    assert f"error: --plan {file} has no ddp, which runs here, but single" in output
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("strategy", "sharding", "name"),
    [
        ("single", {}, "single"),
        ("ddp", {}, "ddp"),
        ("fsdp", {"replicas": 1, "offload_params": False}, "fsdp"),
        ("fsdp", {"replicas": 2, "offload_params": False}, "hybrid"),
        ("fsdp", {"replicas": 1, "offload_params": True}, "fsdp with offload"),
        ("zero2", {"offload_optimizer": "none", "offload_param": "none"}, "zero2"),
        ("zero2", {"offload_optimizer": "cpu", "offload_param": "none"}, "zero2 with offload"),
        ("zero3", {"offload_optimizer": "none", "offload_param": "none"}, "zero3"),
        ("zero3", {"offload_optimizer": "cpu", "offload_param": "none"}, "offload"),
    ],
)
def test_the_names_of_running_strategies_in_a_plan(strategy, sharding, name):
    assert planned_strategy(strategy, sharding) == name


@pytest.mark.full
@pytest.mark.parametrize(
    ("launcher", "strategy"),
    [
        (accelerate("fsdp_2gpu"), "fsdp"),
        (accelerate("zero2_2gpu"), "zero2"),
        (accelerate("zero3_offload_4gpu", "--num_processes", "2"), "offload"),
        (accelerate("fsdp_2x4gpu", *HYBRID), "hybrid"),
    ],
)
def test_a_run_of_each_strategy_finds_its_line(launcher, strategy, tmp_path, cache):
    file = write_plan(tmp_path / "plan.json", strategies=("single", strategy, "zero3"))
    words = [*launcher, *FLAGS, *cache, "--max_steps", "2", "--trackers", "none", "--plan", file]
    run([*words, "--output_dir", tmp_path / "run"])
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["line"]["strategy"] == strategy


@pytest.mark.full
def test_a_plan_by_plan_py(tmp_path, cache):
    words = ["--gpu", "Tesla T4", "--price_per_hour", "2", "--output", tmp_path / "plan.json", *FLAGS]
    run([*python(), "plan.py", *words])
    written = json.loads((tmp_path / "plan.json").read_text())
    run([*python(), *FLAGS, *cache, "--plan", tmp_path / "plan.json", "--output_dir", tmp_path / "run"])
    record = RunRecord(tmp_path / "run")
    (line,) = [line for line in written["lines"] if line["strategy"] == "single"]
    assert record.plan == {name: value for name, value in written.items() if name != "lines"} | {"line": line}
    planned = bill.planned(record)
    assert planned["hours"] == pytest.approx(line["hours"], rel=0.05)  # as many images to train on
    assert planned["price"] == pytest.approx(line["price"], rel=0.05)
    assert planned["memory_gib"] < sum(line["memory"].values()) / 2**30 - 0.4
    assert f"Planned for {written['about']}: single, `train_cnn_a.py --widths 4,8,32" in page(record, "x", [])


def test_parts_divide_the_time_of_a_process():
    mine = _Now()
    assert mine.spent_s() == {"starting": pytest.approx(own_age_s(), abs=0.1)}
    for part in ("training", "evaluation", "training"):
        mine.enter(part)
    mine.phase = "waiting for the data"
    assert (mine.part, mine.spent_s().keys()) == ("training", {"starting", "training", "evaluation"})
    assert sum(mine.spent_s().values()) == pytest.approx(own_age_s(), abs=0.1)
