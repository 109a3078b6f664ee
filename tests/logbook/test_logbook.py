"""The log book: pages of real runs, of killed ones, of broken folders; comparisons; experiments."""

import json
import os
import re
import shlex
import shutil
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from markdown_it import MarkdownIt
from matplotlib.figure import Figure
from PIL import Image

import logbook
from common.run import plots
from common.system.cli import run_command
from tests.conftest import CNN, ROOT, Job, copy_project, metrics, python, result, run, torchrun
from tools.logbook.comparison import Comparison
from tools.logbook.page import page
from tools.logbook.record import RunRecord

FLAGS = ["--data", "digits", "--epochs", "3", "--log_every", "2", "--telemetry_s", "0.2"]
MARKDOWN = MarkdownIt("commonmark").enable("table")


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A copy of the project, with a log book of its own."""
    return copy_project(tmp_path_factory.mktemp("logbook") / "project")


@pytest.fixture(scope="module")
def one(project, cache) -> tuple[Path, str]:
    """A run on one process with all its metrics, and what it printed."""
    words = [*python(), *CNN, *FLAGS, *cache, "--output_dir", "runs/one"]
    output = run(words, cwd=project)
    run([*python(), "validate.py", project / "runs/one", *cache])
    return project / "runs/one", output


@pytest.fixture(scope="module")
def two(project, cache) -> Path:
    run([*torchrun(2), *CNN, *FLAGS, *cache, "--output_dir", "runs/two"], cwd=project, warm=False)
    return project / "runs/two"


@pytest.fixture(scope="module")
def killed(project, cache) -> Path:
    """A run that got SIGKILL after its first evaluation."""
    folder = project / "runs/killed"
    words = [*CNN, "--data", "digits", "--epochs", "1000", "--telemetry_s", "0.2", *cache]
    job = Job([*python(), *words, "--output_dir", "runs/killed"], cwd=project, warm=True)
    deadline = time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists() or "val/loss" not in (folder / "metrics.jsonl").read_text():
        assert time.monotonic() < deadline
        assert job.process.poll() is None, job.wait()
        time.sleep(0.2)
    job.kill()
    job.wait()
    return folder


@pytest.fixture
def book(tmp_path, monkeypatch, capsys):
    """Calls logbook.py with a log book in tmp_path. Returns exit status, output and errors."""

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["logbook.py", *map(str, words), "--folder", str(tmp_path / "book")])
        status = run_command(logbook.main)
        return status, *capsys.readouterr()

    return call


def page_of(run_folder: Path, book, tmp_path: Path) -> str:
    """The text of the page that `add` has written."""
    status, output, errors = book("add", run_folder)
    assert (status, errors) == (0, "")
    page = Path(output.splitlines()[-2])
    assert page.is_relative_to(tmp_path / "book")
    check(page)
    return page.read_text()


def check(page: Path) -> None:
    """Checks a page: whole tables, no HTML but ours, and pictures that open."""
    text = page.read_text()
    for token in MARKDOWN.parse(text):
        if token.type == "html_block":
            assert token.content.startswith(("<!-- logbook {", "<details><summary>", "</details>")), token
        for part in token.children or ():
            assert part.type != "html_inline", part.content
            if part.type == "image":
                with Image.open(page.parent / part.attrs["src"]) as image:
                    assert image.size[0] > 300
    bars = [len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0 for line in text.splitlines()]
    assert all(a == b for a, b in pairwise(bars) if a and b)


def rows(text: str) -> dict[str, list[str]]:
    """The rows of all tables as they are shown: first cell -> the others."""
    found, cells = {}, []
    for token in MARKDOWN.parse(text):
        if token.type == "tr_open":
            cells = []
        elif token.type == "inline":
            cells.append("".join(part.content for part in token.children))
        elif token.type == "tr_close":
            found[cells[0]] = cells[1:]
    return found


# --- Pages


def test_the_last_line_of_each_command_leads_from_a_training_to_its_page(project, one):
    """Follows a new user: each command is the last line that the previous one printed."""
    _, output = one
    last = output.splitlines()[-1]
    assert last.endswith("logbook.py add runs/one")
    assert "use this: best accuracy on the val split" in " ".join(
        re.sub("[\u2502\u2503]", "", output).split()
    )
    added = run(shlex.split(last), cwd=project)
    page = project / "runs/logbook/train_cnn_a/single/128_3_1_1.md"  # git ignores runs/
    assert str(page.relative_to(project)) in added
    shown = run(shlex.split(added.splitlines()[-1]), cwd=project)
    assert "train_cnn_a reaches accuracy" in shown
    assert "[train_cnn_a/single/128_3_1_1]" in (project / "runs/logbook/README.md").read_text()
    assert not (project / "logbook").exists(), "the project's own pages are written by --folder only"


def test_what_a_page_says(two, book, tmp_path):
    text, found = page_of(two, book, tmp_path), result(two)
    about = json.loads((two / "recipe.json").read_text())
    final = f"{found['final_accuracy']:.4f}"
    assert re.search(
        rf"^\*\*train_cnn_a reaches accuracy {final} .* digits in 3 of 3 epochs, .*\.\*\*$", text, re.M
    )
    assert f"best on the {found['val_name']} split, step" in text
    assert "DDP on 2 x CPU" in text
    assert "**Rehearsal on CPU: says nothing about GPUs.**" in text
    assert shlex.join(about["command"]) in text
    assert about["command"][:3] == ["torchrun", "--nproc_per_node=2", "--standalone"]
    assert about["git_commit"] is None or about["git_commit"].rstrip("+") in text
    table = rows(text)
    assert table["accuracy"] == [f"{found['best_accuracy']:.4f}", final]
    assert table["training time"] == [f"{found['train_s']:,.1f} s"]
    assert table["batch"] == ["128 = 64 images x 2 processes x 1 accumulation"]
    differing = rows(text[text.index("| flag that differs") :].partition("<details>")[0])
    assert differing["widths"] == ["4,8,32"]
    assert not {"warmup", "streams"} & differing.keys()
    assert table["warmup"] == ["0.1"]
    assert f"torch {about['versions']['torch']}" in table["versions"][0]
    assert [table["0"][0], table["1"][0]] == [f"{one['peak']:.2f} GiB" for one in found["memory_gib"]]
    pictures = sorted(path.name for path in (tmp_path / "book/train_cnn_a/ddp/128_3_1_2").iterdir())
    assert pictures == ["confusion_training.png", "curves.png", "telemetry.png"]
    assert "Missing or broken" not in text
    assert "GPU" not in text.replace("says nothing about GPUs", "")


def test_a_page_shows_what_validate_has_found(one, book, tmp_path):
    folder, _ = one
    text = page_of(folder, book, tmp_path)
    report = json.loads(next(folder.glob("validation/*/report.json")).read_text())
    table = rows(text.partition("### validate.py")[2].partition("## Memory")[0])
    assert table["top-1"] == [f"{report['top1']:.4f}"]
    for i, name in enumerate(report["classes"]):
        assert table[name][2] == f"{report['per_class']['f1'][i]:.4f}"
    assert "worst" in text


def test_a_killed_run_has_a_page_that_says_so(killed, book, tmp_path):
    text = page_of(killed, book, tmp_path)
    step = max(line["step"] for line in metrics(killed))
    assert (
        int(re.search(r"Not finished: killed or still running\*\*. Last seen at step (\d+)", text)[1]) >= step
    )
    evaluated = [line["val/accuracy"] for line in metrics(killed) if "val/accuracy" in line]
    assert rows(text)["accuracy"] == [f"{max(evaluated):.4f}", f"{evaluated[-1]:.4f}"]
    assert "- result.json is missing" in text
    assert "killed or still running" in (tmp_path / "book/README.md").read_text()


def test_a_page_shows_the_telemetry_of_gpus(two, book, tmp_path):
    """The telemetry is written by hand: two GPUs, 100 W each for 36 s, one throttled. It is no rehearsal."""
    folder = tmp_path / "run"
    shutil.copytree(two, folder)
    about = json.loads((folder / "recipe.json").read_text()) | {"devices": ["NVIDIA T4", "NVIDIA T4"]}
    (folder / "recipe.json").write_text(json.dumps(about | {"hosts": ["h"]}))
    (folder / "result.json").unlink()
    for file in folder.glob("telemetry-*.jsonl"):
        file.unlink()
    host = {"host": "h", "interval_s": 1.0, "devices": ["NVIDIA T4"] * 2, "cpus": 8, "memory_gib": 64.0}
    rates = ("net_sent_mib_s", "net_received_mib_s", "disk_read_mib_s", "disk_written_mib_s")
    sample = {"cpu_pct": 25.0, "memory_gib": 8.0, **dict.fromkeys(rates, 0.0)}
    gpu = {"memory_gib": 9.0, "power_w": 100.0, "temperature_c": 60, "sm_clock_mhz": 1500, "energy_wh": None}
    lines = [host | {"t": 100.0}]
    for k in range(37):
        gpus = [
            gpu | {"index": 0, "utilisation_pct": 80.0, "throttle": []},
            gpu | {"index": 1, "utilisation_pct": 90.0, "throttle": ["sw_power_cap"]},
        ]
        lines.append({"t": 101.0 + k, "step": k, **sample, "gpus": gpus})
    (folder / "telemetry-h.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "nvidia-smi-h.txt").write_text("``` Driver <b>\n")
    text = page_of(folder, book, tmp_path)
    assert "Rehearsal" not in text
    assert "DDP on 2 x NVIDIA T4" in text
    table = rows(text)
    assert dict(zip(table["host"], table["h"], strict=True)) == {
        "CPU, mean": "25 %",
        "memory of the host, peak": "8.0 GiB",
        "GPUs, mean": "85 %",
        "memory of a GPU, peak": "9.0 GiB",
        "power of a GPU, mean": "100 W",
        "GPU temperature, peak": "60 C",
        "SM clock, mean": "1500 MHz",
        "throttled": "50 %",
        "energy of the GPUs": "2.0 Wh",
        "samples": "37",
    }
    assert "nvidia-smi -q on h</summary>\n\n````\n``` Driver <b>\n````\n" in text
    table = rows(compared(book, tmp_path, two, folder))
    assert table["device"][1] == "NVIDIA T4"
    assert table["utilisation, mean"][1] == "85 % of GPUs"


def keys(file: Path) -> list[str]:
    """The keys of a JSON file, or of the last line of a log."""
    text = file.read_text()
    return list(json.loads(text.splitlines()[-1] if file.suffix == ".jsonl" else text))


BREAKS = {
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_text(""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-40]),
    "binary": lambda file: file.write_bytes(b"\xff\xfe\x00{"),
    "a list": lambda file: file.write_text("[[1, 2], null]"),
    "nested": lambda file: file.write_text("[" * 100_000),
    "other types": lambda file: file.write_text(json.dumps({key: {"a": [None]} for key in keys(file)})),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "a link": lambda file: file.symlink_to(file.rename(file.with_name(f"{file.name}.moved"))),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
    "huge": lambda file: os.truncate(file, 2**40),  # sparse
}


@pytest.mark.parametrize("how", BREAKS)
def test_missing_or_broken_files_are_named(how, one, book, tmp_path):
    """Damages each file alone, then all files of one run."""
    names = ["recipe.json", "result.json", "metrics.jsonl", "confusion.json"]
    names += [str(f.relative_to(one[0])) for f in one[0].glob("telemetry-*.jsonl")]
    names += [str(f.relative_to(one[0])) for f in one[0].glob("validation/*/report.json")]
    assert len(names) == 6
    everything = tmp_path / "everything"
    shutil.copytree(one[0], everything)
    for k, name in enumerate(names):
        BREAKS[how](everything / name)
        folder = tmp_path / f"run{k}"
        shutil.copytree(one[0], folder)
        BREAKS[how](folder / name)
        (problem,) = RunRecord(folder).problems
        is_unnamed = how == "missing" and name.startswith("telemetry")
        assert problem.startswith("telemetry-<host>.jsonl" if is_unnamed else name), problem
    text = page_of(everything, book, tmp_path).partition("## Missing or broken")[2]
    # A run without a result need not have these.
    unknown = ("telemetry", "confusion") if how == "missing" else ()
    assert all(name in text for name in names if not name.startswith(unknown)), text


def test_a_page_holds_nothing_from_outside_of_its_run(one, book, tmp_path):
    """A run's folder from a stranger: links to the user's files, pipes, and text that is called a picture."""
    secret, folder = tmp_path / "home" / "id_rsa", tmp_path / "run"
    secret.parent.mkdir()
    secret.write_text("SECRET")
    shutil.copytree(one[0], folder)
    (validation,) = folder.glob("validation/*")
    for name in ("nvidia-smi-link.txt", "plots/link.png", "validation/text/worst.png"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(secret)
    (validation / "worst.png").write_text("SECRET")
    for name in ("nvidia-smi-pipe.txt", "plots/pipe.png", "verified.json", "telemetry-pipe.jsonl"):
        os.mkfifo(folder / name)
    shutil.copytree(validation, tmp_path / "home" / "theirs")
    (folder / "validation" / "linked").symlink_to(tmp_path / "home" / "theirs")
    text = page_of(folder, book, tmp_path)
    assert "nvidia-smi -q" not in text
    assert "### validate.py: linked" not in text
    assert "worst.png can't be read as a picture" in text
    assert book("html", folder)[0] == 0
    written = [file for file in (tmp_path / "book").rglob("*") if file.is_file()]
    assert len(written) > 4
    assert not [file for file in written if b"SECRET" in file.read_bytes()]
    assert not re.search(r"(link|pipe)\.png", (tmp_path / "book" / "logbook.html").read_text())


@pytest.mark.parametrize("url", ["https://wandb.ai/me/x", "javascript:alert(1)", "data:text/html,x", "//x"])
def test_only_an_address_of_the_web_is_a_link(url, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.json").write_text(json.dumps({"wandb_url": url}))
    text = page(RunRecord(folder), "run", [])
    assert rows(text)["W&B run"] == [url]
    assert ("](" in text) == url.startswith("https:")


def test_a_folder_that_is_no_run_is_named_and_nothing_is_written(one, book, tmp_path):
    (tmp_path / "empty").mkdir()
    for wrong in (tmp_path / "empty", tmp_path / "nowhere"):
        status, output, errors = book("add", one[0], wrong)
        assert (status, output) == (1, "")
        assert errors.startswith(f"error: {wrong} is no run's folder")
        assert errors.count("\n") == 1
    assert not (tmp_path / "book").exists()


def test_the_same_run_gives_the_same_bytes(one, two, book, tmp_path):
    def written() -> dict[str, bytes]:
        files = [path for path in (tmp_path / "book").rglob("*") if path.is_file()]
        return {str(path.relative_to(tmp_path)): path.read_bytes() for path in files}

    book("add", one[0], two)
    book("compare", one[0], two)
    first = written()
    assert len(first) == 13
    shutil.rmtree(tmp_path / "book")
    book("add", two)
    book("add", one[0])
    book("compare", one[0], two)
    assert written() == first
    book("index")
    assert written() == first


def test_another_run_of_the_same_name_gets_the_next_number(one, book, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(one[0], other)
    text = (other / "metrics.jsonl").read_text()
    (other / "metrics.jsonl").write_text(text.replace('"train/images_per_s": ', '"train/images_per_s": 1', 1))
    for folder in (one[0], other, one[0]):
        assert book("add", folder)[0] == 0
    pages = tmp_path / "book/train_cnn_a/single"
    assert sorted(path.name for path in pages.glob("*.md")) == ["128_3_1_1-2.md", "128_3_1_1.md"]
    moved = tmp_path / "moved"
    other.rename(moved)  # as from the cluster to a laptop
    page_of(moved, book, tmp_path)
    assert len(list(pages.glob("*.md"))) == 2
    assert f"`{moved}`" in (pages / "128_3_1_1-2.md").read_text()


def test_no_name_breaks_a_page(one, book, tmp_path):
    folder = tmp_path / "a run | with *spaces* & <b>"
    shutil.copytree(one[0], folder)
    names = [
        "a|b",
        "<script>alert(1)</script>",
        "`x`",
        "$y$ & z",
        "*s* _t_",
        "[u](v)",
        "a\\|b",
        "\n",
        "-->",
        "~~w~~",
    ]
    report = next(folder.glob("validation/*/report.json"))
    for file in (folder / "confusion.json", report):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"classes": names}))
    for file, changes in {
        "result.json": {
            "script": "../../<i>",
            "data": "a|b <img src=x>",
            "error": "<b>|`",
            "status": "failed",
        },
        "recipe.json": {"command": ["train.py", "a|b", "```", "$(reboot)", "x y"], "hosts": ["<u>"]},
    }.items():
        (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | changes))
    text = page_of(folder, book, tmp_path)
    table = rows(text)
    assert set(names) - {"\n"} < table.keys()
    assert table["hosts"] == ["<u>"]
    assert table["run"] == [str(folder)]
    (fence,) = [token for token in MARKDOWN.parse(text) if token.type == "fence"]
    assert shlex.split(fence.content) == ["train.py", "a|b", "```", "$(reboot)", "x y"]
    assert [path.name for path in (tmp_path / "book").iterdir() if path.is_dir()] == ["i"]
    book("compare", folder, one[0])
    check(next((tmp_path / "book/compare").glob("*.md")))
    check(tmp_path / "book/README.md")


def test_the_page_of_all_runs_says_what_their_files_say(one, two, killed, project, book, tmp_path):
    status, output, errors = book("html", project / "runs")
    assert (status, output, errors) == (0, f"{tmp_path}/book/logbook.html: open it in a browser\n", "")
    assert [file.name for file in (tmp_path / "book").iterdir()] == ["logbook.html"]
    text = (tmp_path / "book/logbook.html").read_text()
    found = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text)[1])
    shown = {run["name"]: run for run in found["runs"]}
    assert {"one", "two", "killed"} <= shown.keys()
    for name, folder in (("one", one[0]), ("two", two)):
        facts, values, lines = result(folder), shown[name]["values"], metrics(folder)
        for key in (
            "strategy",
            "steps",
            "best_accuracy",
            "final_accuracy",
            "final_loss",
            "wall_s",
            "images_per_s",
        ):
            same = facts[key] if isinstance(facts[key], str) else pytest.approx(facts[key], rel=1e-5)
            assert values[key] == same, key
        assert values["problems"] is None
        losses = [line for line in lines if "train/loss" in line]
        curve = shown[name]["curves"]["train/loss"]
        for key, source in {
            "step": "step",
            "epoch": "epoch",
            "time": "wall_s",
            "value": "train/loss",
        }.items():
            assert curve[key] == pytest.approx([line[source] for line in losses], rel=1e-5)
    assert re.findall("<figcaption>plots/(.*).png</figcaption>", text)[:2] == ["confusion", "predictions"]
    assert shown["killed"]["values"]["status"] == "killed or still running"
    assert re.search("<li>killed: .*; result.json is missing", text)
    status, _, errors = book("html", tmp_path / "book")
    assert (status, errors.count("\n")) == (1, 1)
    assert errors.startswith(f"error: {tmp_path}/book has no run: a run's folder has one of recipe.json")


# --- Comparisons


def compared(book, tmp_path, *words) -> str:
    status, output, errors = book("compare", *words)
    assert (status, errors) == (0, "")
    page = Path(output.splitlines()[-2])
    check(page)
    return page.read_text()


def test_a_comparison_says_what_the_results_say(one, two, book, tmp_path):
    book("add", two)
    text = compared(book, tmp_path, one[0], two, "--price_per_hour", "7.20")
    table, a, b = rows(text), result(one[0]), result(two)
    assert table["training time"] == [f"{a['train_s']:,.1f} s", f"{b['train_s']:,.1f} s"]
    assert table["speed-up in training time"] == ["1.00", f"{a['train_s'] / b['train_s']:.2f}"]
    assert table["efficiency"] == ["100%", f"{a['train_s'] / b['train_s'] / 2:.0%}"]
    assert table["speed-up in whole time"] == ["1.00", f"{a['wall_s'] / b['wall_s']:.2f}"]
    assert table["images/s"] == [f"{a['images_per_s']:,.0f}", f"{b['images_per_s']:,.0f}"]
    assert table["cost at 7.20 an hour and host"] == [f"{run['wall_s'] * 0.002:.2f}" for run in (a, b)]
    costs = [run["wall_s"] * 0.002 / (100 * run["final_accuracy"]) for run in (a, b)]
    assert table["cost of a point of accuracy"] == [f"{cost:.4f}" for cost in costs]
    best = [run["best_accuracy"] for run in (a, b)]
    assert f"time to accuracy {min(best):.4f}" in table
    different = rows(text.partition("## Also different")[2])
    assert "- [ddp x 2](../train_cnn_a/ddp/128_3_1_2.md): train_cnn_a reaches" in text
    assert different == {"": ["single x 1", "ddp x 2"], "per_device_batch_size": ["128", "64"]}


def test_other_differences_are_listed_and_unequal_work_has_no_speed_up(one, book, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(one[0], other)
    about = json.loads((other / "recipe.json").read_text())
    about["recipe"]["lr"] = 0.5
    about["versions"]["torch"] = "1.0"
    about |= {"git_commit": "abc", "devices": ["NVIDIA T4"]}
    (other / "recipe.json").write_text(json.dumps(about))
    changes = {"batch_size": 64, "mixed_precision": "fp16", "val_images": 7}
    changes |= {"half_precision": "weights", "gradient_reduction": "fp16"}
    changes |= {"compile": "default", "grad_checkpointing": True}
    (other / "result.json").write_text(json.dumps(result(other) | changes))
    text = compared(book, tmp_path, one[0], other, "--allow_different_data")
    different = rows(text.partition("## Also different")[2])
    assert {"lr", "version of torch", "commit", "device", "batch_size", *changes} == different.keys() - {""}
    assert different["lr"] == ["0.003", "0.5"]
    assert different["compile"] == ["no", "default"]
    assert rows(text)["speed-up in training time"] == ["1.00", "-"]
    assert different[""] == ["lr 0.003", "lr 0.5"]
    assert "No speed-up of lr 0.5: 64 images a step, the first 128." in text


DIFFERENT = {  # in recipe.json, its recipe and result.json; what the refusal says
    "data set": ({"source": "cifar10-0"}, {}, {"data": "cifar10"}, "data: digits-"),
    "older data set": ({"source": None}, {}, {"data": "/data/cifar10"}, "data: digits, cifar10"),
    "content": ({"source": "digits-of-another-content"}, {}, {}, "data: digits-"),
    "split": ({}, {}, {"val_name": "test"}, "split: val, test"),
    "size": ({}, {}, {"val_images": 7}, "images: 360, 7"),
    "part": ({}, {"max_val_images": 360}, {}, "chosen: all, a hash of their ids"),
    "older part": ({"val_chosen": None}, {"max_val_images": 360}, {}, "chosen: all, the first"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_runs_that_saw_different_images_are_not_compared(name, one, book, tmp_path):
    other = tmp_path / "other"
    about, recipe, facts, message = DIFFERENT[name]
    copy_with(one[0], other, about, recipe, facts)
    status, output, errors = book("compare", one[0], other)
    assert (status, output, errors.count("\n")) == (1, "", 1)
    assert errors.startswith(f"error: {other} and {one[0]} were evaluated on different images ({message}")
    assert "--allow_different_data" in errors
    assert not (tmp_path / "book").exists()
    compared(book, tmp_path, one[0], other, "--allow_different_data")


def test_the_same_images_by_another_name_are_compared(one, book, tmp_path):
    copy_with(one[0], tmp_path / "other", {}, {"data": "/mnt/data"}, {"data": "/mnt/data"})
    assert rows(compared(book, tmp_path, one[0], tmp_path / "other"))["data"] == ["digits", "/mnt/data"]


def test_columns_are_named_by_what_differs(one, two, tmp_path):
    def names(*changes: dict) -> list[str]:
        runs = []
        for k, recipe in enumerate(changes):
            folder = tmp_path / f"{len(list(tmp_path.iterdir()))}_{k}"
            copy_with(one[0], folder, {}, recipe, {})
            runs.append(RunRecord(folder))
        return Comparison(runs).names

    assert names({"lr": 0.003}, {"lr": 0.001}) == ["lr 0.003", "lr 0.001"]
    assert names({}, {"lr": 0.5, "seed": 1}) == ["lr 0.003, seed 0", "lr 0.5, seed 1"]
    assert names({}, {"widths": [8, 8, 8]}, {}) == ["widths 4,8,32", "widths 8,8,8", "widths 4,8,32 (2)"]
    assert names({}, {"resume": "/a/b"}) == ["resume auto", "resume b"]
    assert names({}, {}) == ["single x 1", "single x 1 (2)"]
    other_script = tmp_path / "vit"
    copy_with(one[0], other_script, {}, {"model": "vit"}, {"script": "train_vit"})
    assert Comparison([RunRecord(one[0]), RunRecord(other_script)]).names == ["train_cnn_a", "train_vit"]
    both = [RunRecord(one[0]), RunRecord(two)]
    assert Comparison(both).names == ["single x 1", "ddp x 2"]


def copy_with(run_folder: Path, copy: Path, about: dict, recipe: dict, facts: dict) -> None:
    """A run's folder with changes in recipe.json, its recipe and result.json."""
    shutil.copytree(run_folder, copy)
    found = json.loads((copy / "recipe.json").read_text()) | about
    (copy / "recipe.json").write_text(json.dumps(found | {"recipe": found["recipe"] | recipe}))
    (copy / "result.json").write_text(json.dumps(result(copy) | facts))


def test_the_same_run_twice_differs_in_nothing(one, book, tmp_path):
    text = compared(book, tmp_path, one[0], one[0])
    assert "Nothing: recipe, data, versions, commit, devices and precision are the same." in text


def test_runs_of_one_strategy_may_be_sharded_in_other_ways(one, two, book, tmp_path):
    folders = [tmp_path / name for name in ("a", "b")]
    for folder, reshards in zip(folders, (True, False), strict=True):
        shutil.copytree(two, folder)
        about = json.loads((folder / "recipe.json").read_text())
        assert about["sharding"] == {}
        about["sharding"] = {"reshard_after_forward": reshards, "replicas": 1}
        (folder / "recipe.json").write_text(json.dumps(about))
    text = compared(book, tmp_path, one[0], *folders)
    different = rows(text.partition("## Also different")[2])
    assert different["ddp: reshard_after_forward"] == ["-", "True", "False"]
    assert "ddp: replicas" not in different


def test_results_of_a_batch_search(one, two, book, tmp_path):
    trials = [
        {
            "per_device_batch_size": 8,
            "outcome": "ran",
            "memory_gib": 0.5,
            "images_per_s": 90.0,
            "seconds": 3.0,
        },
        {
            "per_device_batch_size": 24,
            "outcome": "out of memory",
            "memory_gib": None,
            "images_per_s": None,
            "seconds": 2.0,
        },
    ]
    found = {"script": "train_cnn_a", "strategy": "ddp", "processes": 2, "device": "CPU", "quantum": 8}
    found |= {"limit_gib": 1.5, "answer": 16, "knee": 8, "trials": trials}
    found |= {"mixed_precision": result(two)["mixed_precision"], "recipe": {"widths": [4, 8, 32]}}
    found |= {"sharding": {}, "compile": "no", "grad_checkpointing": False}
    file = tmp_path / "search.json"
    file.write_text(json.dumps(found))
    table = rows(compared(book, tmp_path, one[0], two, "--batch_search", file))
    assert table["largest batch found, images a process"] == ["-", "16"]
    assert table["train_cnn_a, ddp x 2 on CPU"] == ["16", "32", "8", "1.50 GiB a process", "2", "5 s"]
    assert table["24"] == ["out of memory", "-", "-", "2 s"]
    file.write_text(json.dumps(found | {"recipe": {"widths": [4, 8, 64]}}))
    text = compared(book, tmp_path, one[0], two, "--batch_search", file)
    assert "largest batch found" not in text, "it is another model's"
    for other in ({"sharding": {"replicas": 2}}, {"compile": "default"}, {"grad_checkpointing": True}):
        file.write_text(json.dumps(found | other))
        assert "largest batch found" not in compared(book, tmp_path, one[0], two, "--batch_search", file)
    file.write_text("{}")
    status, _, errors = book("compare", one[0], two, "--batch_search", file)
    assert (status, errors) == (1, f"error: {file} is no result of find_batch_size.py\n")


def test_a_comparison_of_one_is_refused(one, book):
    assert book("compare", one[0])[::2] == (1, "error: a comparison needs two runs or more\n")


@pytest.mark.parametrize("flag", ["--price_per_hour=nan", "--target_accuracy=inf"])
def test_numbers_that_are_none_are_refused(flag):
    job = Job([sys.executable, "logbook.py", "compare", "a", "b", flag], cwd=ROOT)
    status, output = job.wait()
    assert status == 2
    assert f"{flag.replace('=', ' ')}: must be more than 0 and finite" in output


# --- Figures


@pytest.mark.parametrize("classes", [2, 10, 40, 1000])
def test_confusion_matrices_of_any_size(classes, tmp_path):
    names = [f"${i} _class_ of a name that is longer than others" for i in range(classes)]
    matrix = [[i == j for j in range(classes)] for i in range(classes)]
    plots.confusion_matrix(tmp_path / "c.png", matrix, names, "a $title")
    assert (tmp_path / "c.png").stat().st_size < 120_000


@pytest.mark.filterwarnings("error:constrained_layout:UserWarning")
@pytest.mark.parametrize("count", [1, 16, 24])
def test_captions_are_whole_below_their_images(count, tmp_path, monkeypatch):
    """ImageNet's long names are shown whole, overlap nothing, and leave the images their size."""
    drawn, savefig = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (drawn.append(self), savefig(self, *a, **k)))
    name = "American Staffordshire terrier, Staffordshire terrier, American pit bull terrier"
    captions = [f"{name}\nnot {name if i % 3 else 'ox'}\n0.123" for i in range(count)]
    images = np.full((count, 32, 32, 3), [0, 160, 80], np.uint8)
    title = "train_vit on imagenet256, test split: the surest mistakes of a long $title"
    plots.image_sheet(tmp_path / "s.png", images, captions, title)
    sheet = np.asarray(Image.open(tmp_path / "s.png").convert("RGB"))
    assert (sheet == [0, 160, 80]).all(2).sum() > 15_000 * count
    (figure,) = drawn
    texts = [text for axes in figure.axes for text in axes.texts]
    assert [text.get_text().split() for text in texts] == [caption.split() for caption in captions]
    boxes = [text.get_window_extent() for text in (*texts, *figure.texts)]
    boxes += [axes.get_window_extent() for axes in figure.axes]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
    assert all(figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1 for box in boxes)


# --- Experiments


SAVES = """#!/bin/bash
trap 'sleep 1; echo saved; exit 75' TERM
echo trains
sleep 60 >/dev/null 2>&1 &
wait
"""

SEARCHES = """#!/bin/bash
case $1 in
-c) exec {python} "$@" ;;
find_batch_size.py) for word; do [[ $word != --output=* ]] || echo '{{"answer": 28}}' >"${{word#*=}}"; done ;;
*) exit 3 ;;
esac
"""


def experiment(name: str, folder: Path, *flags: object, **variables: object) -> Job:
    env = {"FOLDER": folder, "PYTHON": sys.executable} | variables
    return Job([f"experiments/{name}.sh", *flags], env={key: str(value) for key, value in env.items()})


def test_an_experiment_shows_its_commands(tmp_path):
    job = experiment("vit", tmp_path, SIZE="full", S3_PREFIX="s3://b/p", DRY_RUN=1)
    status, output = job.wait()
    assert status == 0, output
    steps = [line.removeprefix("# ") for line in output.splitlines() if line.startswith("# ")]
    of_both = [
        f"{what}, {way}" for way in ("fsdp", "ddp") for what in ("largest batch", "training", "all metrics")
    ]
    assert steps == [*of_both, "pages", "comparison"]
    assert (
        "launch.py --config_file accelerate_configs/ddp_2x4gpu.yaml --hostfile hostfile train_vit.py"
        in output
    )
    assert f"--output_dir={tmp_path}/ddp --s3=s3://b/p/full/ddp" in output
    assert not list(tmp_path.iterdir())


def test_an_experiment_ends_with_the_name_of_what_failed(tmp_path):
    status, output = experiment("speedup", tmp_path / "runs", DATA=tmp_path / "nowhere").wait()
    assert status == 1
    assert output.endswith(
        "error: training, single_gpu failed with exit status 1: started again it goes on there\n"
    )
    assert "ddp_2gpu" not in output


def test_an_unknown_size_is_refused(tmp_path):
    status, output = experiment("speedup", tmp_path / "runs", SIZE="half").wait()
    assert (status, output) == (2, "error: SIZE=half: rehearsal or full\n")


def test_an_experiment_passes_sigterm_on_and_waits(tmp_path):
    python = tmp_path / "python"
    python.write_text(SAVES)
    python.chmod(0o755)
    job = experiment("speedup", tmp_path / "runs", PYTHON=python)
    while job.process.stdout.readline() != "trains\n":
        assert job.process.poll() is None
    job.process.terminate()
    status, output = job.wait(30)
    assert status == 1
    assert output.startswith("saved\nerror: training, single_gpu failed with exit status 75")


def test_the_share_of_a_process_is_the_largest_that_fits_and_divides(tmp_path):
    """A stand-in for Python answers 28; the training that follows gets 16, the next divisor of 32."""
    python = tmp_path / "python"
    python.write_text(SEARCHES.format(python=sys.executable))
    python.chmod(0o755)
    for said in ("# largest batch, fsdp\n", "# largest batch, fsdp: done already\n"):
        status, output = experiment("vit", tmp_path / "runs", PYTHON=python).wait()
        assert status == 1
        assert said in output
        assert "--per_device_batch_size=16 " in output


@pytest.mark.full
def test_the_product_of_another_command_is_made_again(tmp_path):
    product = tmp_path / "runs" / "single_gpu" / "result.json"
    product.parent.mkdir(parents=True)
    product.write_text('{"status": "finished"}')
    (tmp_path / "runs" / "steps").mkdir()
    (tmp_path / "runs" / "steps" / "training__single_gpu").write_text("of other data\n")
    for _ in range(2):
        status, output = experiment("speedup", tmp_path / "runs", DATA=tmp_path / "nowhere").wait()
        assert (status, "done already" in output) == (1, False), output
        assert product.exists(), "a result is not lost"


@pytest.mark.full
def test_an_experiment_goes_on_where_it_failed(tmp_path):
    """A page in the way fails the last steps. A second start repeats no training."""
    start = partial(experiment, "speedup", tmp_path / "runs", DATA="digits", LOGBOOK=tmp_path / "book")
    (tmp_path / "book").write_text("in the way")
    status, output = start().wait(600)
    assert status == 1
    assert "error: pages failed" in output
    (tmp_path / "book").unlink()
    status, output = start().wait()
    assert status == 0, output
    assert output.count("done already") == 3
    assert "images/s left" not in output
    page = tmp_path / "book/compare/experiment_speedup_rehearsal.md"
    check(page)
    assert rows(page.read_text())["processes"] == ["1", "2", "4"]
