"""Tests of comparisons, and of the pages of real, killed, broken and hostile runs."""

import itertools
import json
import operator
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from PIL import Image

import logbook
from onecurve.system.text import printable, printable_lines
from tests.conftest import CNN, Job, copy_project, lines, metrics, python, result, rows_of, run, wait_until
from tests.logbook.pages import (
    HOSTILE,
    MARKDOWN,
    change,
    check,
    is_golden,
    rows,
    write_lines,
    write_run,
    write_starts,
)
from tools.logbook import comparison, history, markdown
from tools.logbook.comparison import Comparison
from tools.logbook.page import index_page, index_values, run_page
from tools.logbook.run_record import RunRecord, hash_compared_files

FLAGS = ["--data", "digits", "--epochs", "3", "--log_every", "2", "--telemetry_s", "0.2"]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """Copy the project without its runs and log books."""
    return copy_project(tmp_path_factory.mktemp("logbook") / "project")


@pytest.fixture(scope="module")
def finished_run(project, cache) -> tuple[Path, str]:
    """Train a run with one process and all metrics, and return its folder and output."""
    output = run([*python(), *CNN, *FLAGS, *cache, "--output_dir", "runs/one"], cwd=project)
    run([*python(), "validate.py", project / "runs/one", *cache])
    return project / "runs/one", output


def page_of(book, *words: object) -> str:
    """Return the text of the page written by a command."""
    status, output, errors = book(*words)
    assert (status, errors) == (0, "")
    file = Path(output.splitlines()[-2])
    check(file)
    return file.read_text()


# --- Pages of real runs


def test_the_last_line_of_each_command_leads_from_a_training_to_its_page(project, finished_run):
    """Run the last line that each command prints, as a new user would."""
    _, output = finished_run
    last = output.splitlines()[-1]
    assert last.endswith("logbook.py add runs/one")
    shown = " ".join(re.sub("[\u2502\u2503]", "", output).split())
    assert "use this: best accuracy on the val split" in shown
    added = run(shlex.split(last), cwd=project)
    file = project / "runs/logbook/train_cnn_a/single/one.md"  # The page is inside runs/, which Git ignores
    assert str(file.relative_to(project)) in added
    assert "train_cnn_a reaches accuracy" in run(shlex.split(added.splitlines()[-1]), cwd=project)
    assert "[train_cnn_a/single/one]" in (project / "runs/logbook/README.md").read_text()
    assert not (project / "logbook").exists(), "the project's own pages are written by --folder only"


def test_a_page_matches_the_files_of_its_run(finished_run, book, tmp_path):
    folder, _ = finished_run
    text, facts = page_of(book, "add", folder), result(folder)
    record = json.loads((folder / "recipe.json").read_text())
    report = json.loads(next(folder.glob("validation/*/report.json")).read_text())
    final = f"{facts['final_accuracy']:.4f}"
    assert re.search(rf"^\*\*train_cnn_a reaches accuracy {final} .* digits in 3 of 3 epochs, ", text, re.M)
    assert f"best on the {facts['val_name']} split, step" in text
    assert "**This is a rehearsal on CPUs. The times do not predict training times on GPUs.**" in text
    assert shlex.join(record["command"]) in text
    result_text, report_text, setup_text = re.split("### validate.py|## Memory", text)
    table = rows(result_text)
    assert table["accuracy"] == [f"{facts['best_accuracy']:.4f}", final]
    assert table["training time"] == [f"{facts['train_s']:,.1f} s"]
    table = rows(report_text)
    assert table["top-1"] == [f"{report['top1']:.4f}"]
    assert [table[name][2] for name in report["classes"]] == [f"{x:.4f}" for x in report["per_class"]["f1"]]
    table = rows(setup_text)
    assert table["batch"] == ["128 = 128 images x 1 process x 1 accumulation"]
    assert f"torch {record['versions']['torch']}" in table["versions"][0]
    differing = rows(text[text.index("| flag changed") :].partition("<details>")[0])
    assert differing["widths"] == ["4,8,32"]
    assert not {"warmup", "streams"} & differing.keys()
    pictures = {path.name.partition("_val_")[0] for path in tmp_path.glob("book/*/*/*/*.png")}
    assert pictures == {"confusion_training.png", "curves.png", "telemetry.png", "confusion", "worst"}
    assert "Missing or broken" not in text
    assert "GPU" not in text.replace("times on GPUs", "")


def test_a_killed_run_has_a_page_that_says_so(project, cache, book, tmp_path):
    """Send SIGKILL to a run after the first evaluation, and check that its page reports the kill."""
    killed = project / "runs/killed"
    words = [*CNN, "--data", "digits", "--epochs", "1000", "--telemetry_s", "0.2", *cache]
    job = Job([*python(), *words, "--output_dir", "runs/killed"], cwd=project)
    log = killed / "metrics.jsonl"
    wait_until(lambda: log.exists() and "val/loss" in log.read_text(), job, 120)
    job.kill()
    job.wait()
    text = page_of(book, "add", killed)
    last = re.search(r"Not finished: killed or still running\*\*. Last recorded step: (\d+)", text)[1]
    assert int(last) >= max(line["step"] for line in metrics(killed))
    evaluated = [line["val/accuracy"] for line in metrics(killed) if "val/accuracy" in line]
    assert rows(text)["accuracy"] == [f"{max(evaluated):.4f}", f"{evaluated[-1]:.4f}"]
    assert "- result.json is missing" in text
    assert "killed or still running" in (tmp_path / "book/README.md").read_text()


# --- Stored pages of synthetic runs


def gpu_run(folder: Path) -> Path:
    """Write a run whose page uses every feature: two throttling GPUs at 100 W each and a joining host."""
    write_run(
        folder,
        lines=30,
        about={
            "command": ["torchrun", "--nproc_per_node=2", "train_vit.py", "--data", "a b|c"],
            "defaults": {"lr": 0.2, "widths": [4, 8]},
            "git_commit": "abc+",
            "hosts": ["h1", "h2"],
            "resumed_from": "s3://b/other",
            "sharding": {"replicas": 1, "reshard_after_forward": True},
            "version": "1.0.0",
            "wandb_url": "https://wandb.ai/me/x_y",
        },
        recipe={"s3": "s3://b/p", "widths": [4, 8], "max_val_images": 5000},
        **{"hosts": 2, "steps": 30, "best_step": 28, "train_s": 50.0, "per_device_batch_size": 64},
        **{"accumulation_steps": 1, "mixed_precision": "fp16", "half_precision": "autocast"},
        **{"gradient_reduction": "fp32", "compile": "default", "grad_checkpointing": True, "uploaded": False},
        **{"val_name": "val", "val_images": 5000, "test_name": "test", "test_images": 10000},
        **{"test_accuracy": 0.75, "test_loss": 1.5, "deterministic": False, "energy_wh": 12.5},
        **{"flops_per_image": 2.62e10, "mfu_pct": 41.0, "peak_flops": 9.895e14},
        **{"memory_gib": [{"peak": 3.3, "reserved": 4.0, "device": 5.0}, {"peak": 3.1}]},
        **{"checkpoint": "checkpoints/step_00000030", "best_checkpoint": "checkpoints/step_00000028"},
    )
    lines = metrics(folder)
    for line in lines:
        line["val/raw_accuracy"] = line["val/accuracy"] / 2
    change_of_hosts = {"hosts_before": 2, "hosts": 3, "processes_before": 2, "processes": 3}
    event_lines = [
        {"step": 10, "epoch": 1.0, "wall_s": 20.0} | change_of_hosts,
        {"step": 14, "epoch": 1.4, "wall_s": 29.0, "interrupted_at": 1000.0, "why": "SIGTERM | a"},
        {"step": 15, "epoch": 1.5, "wall_s": 30.0, "resumed_at": 1060.0},
        {"step": 20, "epoch": 2.0, "wall_s": 40.0, "interrupted_at": 2000.0, "why": "SIGUSR1"},
    ]
    write_lines(folder / "metrics.jsonl", lines + event_lines)
    (folder / "telemetry-h1.jsonl").unlink()
    host = {"host": "h", "interval_s": 1.0, "devices": ["NVIDIA T4"] * 2, "cpus": 8, "memory_gib": 64.0}
    rates = ("net_sent_mib_s", "net_received_mib_s", "disk_read_mib_s", "disk_written_mib_s")
    sample = {"cpu_pct": 25.0, "memory_gib": 8.0, **dict.fromkeys(rates, 0.0)}
    gpu = {"memory_gib": 9.0, "power_w": 100.0, "temperature_c": 60, "sm_clock_mhz": 1500, "energy_wh": None}
    gpus = [gpu | {"index": 0, "utilisation_pct": 80.0, "throttle": []}]
    gpus += [gpu | {"index": 1, "utilisation_pct": 90.0, "throttle": ["sw_power_cap"]}]
    samples = [{"t": 101.0 + k, "step": k, **sample, "gpus": gpus} for k in range(37)]
    write_lines(folder / "telemetry-h.jsonl", [host | {"t": 100.0}, *samples])
    (folder / "nvidia-smi-h.txt").write_text("``` Driver <b>\n")
    (folder / "tensorboard").mkdir()
    (folder / "checkpoints").mkdir()
    classes = [f"class {i}" for i in range(22)]
    shares = {name: [i / 22 for i in range(22)] for name in ("precision", "recall", "f1", "specificity")}
    report = {"checkpoint": "/x/step_1", "top1": 0.5, "top5": 0.9, "loss": 1.25, "images": 10000}
    report |= {"classes": classes, "confusion": [[i == j for j in range(22)] for i in range(22)]}
    report["confusion"] = [[int(x) for x in row] for row in report["confusion"]]
    report |= {"per_class": shares | {"support": list(range(22))}, "images_per_s": 3000.0, "split": "test"}
    report["classes_left_out"] = 1
    (folder / "validation" / "test_28").mkdir(parents=True)
    (folder / "validation/test_28/report.json").write_text(json.dumps(report))
    stamp = {"date": "2026-01-01", "commit": "abc", "device": "CPU", "config": "single", "steps": 10}
    stamp |= {"of_steps": 30, "intervals": ["steps 1-10"], "findings": ["a *b* differs", "c"]}
    stamp |= {"not_verified": ["x", "y"], "files": hash_compared_files(folder), "kind": "evaluated again"}
    true = stamp | {"findings": [], "differences": {"loss": 1e-7, "weights": 0.0}}
    changed = true | {"files": stamp["files"] | {"metrics.jsonl": "0"}, "kind": "bit for bit"}
    older = {name: value for name, value in true.items() if name != "kind"} | {"bound": 2e-6}
    stamps = [stamp, true, true | {"kind": "bit for bit"}, changed, older]
    (folder / "verified.json").write_text(json.dumps({"stamps": stamps}))
    return folder


# Changes at each of a run's starts. Two starts begin at step 2 because the first start leaves no checkpoint.
# The last start changes the recipe.
ONE = {"devices": ["NVIDIA T4"], "strategy": "single", "per_device_batch_size": 128}
SEVERAL: list[dict[str, Any]] = [{"versions": {"torch": "2.11.0"}, "command": ["torchrun", "train_vit.py"]}]
SEVERAL += [{"step": 2, "devices": ["NVIDIA T4"] * 4, "hosts": ["h1", "h2"], "strategy": "fsdp"}]
SEVERAL += [{"step": 2, "devices": ["NVIDIA T4"] * 2, "hosts": ["h2"], "versions": {"torch": "2.15.0"}}]
SEVERAL += [ONE | {"step": 4, "changed": {"lr": [0.1, 0.01]}, "command": ["python", "train_vit.py"]}]


def test_a_page_lists_the_starts_of_its_run(book, tmp_path):
    """Check that the run's page, the index and a comparison list all starts of the run."""
    last = {"strategy": "single", "processes": 1, "train_s": 9.0}
    folder = write_starts(write_run(tmp_path / "run", **last), *SEVERAL)
    assert is_golden("starts.md", page_of(book, "add", folder), tmp_path)
    assert "| 2, then 1 |" in (tmp_path / "book/README.md").read_text()
    same = write_starts(write_run(tmp_path / "same", train_s=9.0), {}, {"step": 3})
    text = page_of(book, "compare", same, folder)
    assert (
        "- No speed-up for ddp x 2 then fsdp x 2 then single x 1, lr 0.1 then 0.01: the run changed its"
        in text
    )
    table = rows(text)
    assert table["processes"] == ["2", "2, then 1"]
    assert table["version of torch"] == ["2.15.0", "2.11.0, then 2.15.0"]
    assert table["lr"] == ["0.1", "0.1, then 0.01"]


def test_a_start_that_only_ended_the_run_is_not_its_setting(tmp_path):
    """Let the first start train all 6 steps, and let another start with one process complete result.json."""
    folder = write_run(tmp_path / "run", strategy="single", processes=1)
    record = RunRecord(write_starts(folder, {}, ONE | {"step": 6}))
    assert record.strategies_and_devices == "DDP on 2 x NVIDIA T4"
    assert record.strategies_and_processes == "ddp x 2"
    assert history.resume_verdict(record) == ""


ROUNDING = "the restarts changed the training only by rounding."
VERDICTS = {
    "one start": ([{}], ""),
    "steps of one start": ([{}, {"strategy": "fsdp"}], ""),
    "another strategy": ([{}, {"step": 3, "strategy": "fsdp"}], f"The recipe did not change, so {ROUNDING}"),
    "recipe": ([{}, {"step": 3, "changed": {"lr": [1, 2]}}], "The recipe changed. Step 3: lr was 1, now 2."),
    "micro-batch": (
        [{}, {"step": 3, **ONE}],
        "but the number of images per forward pass changed. BatchNorm, ",
    ),
    "commit": ([{}, {"step": 3, "git_commit": "abd"}], "The recipe did not change, but the commit changed. "),
    "earlier version": (
        [{"step": None}, {"step": 3}],
        "The run does not record whether all steps were trained",
    ),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_unchanged_is_stated_only_if_it_is_known(name, tmp_path):
    starts, sentence = VERDICTS[name]
    folder = write_starts(write_run(tmp_path / "run"), *starts)
    start_lines = [
        {key: v for key, v in line.items() if v is not None} for line in lines(folder / "starts.jsonl")
    ]
    write_lines(folder / "starts.jsonl", start_lines)
    verdict = history.resume_verdict(RunRecord(folder))
    assert sentence in verdict
    assert bool(sentence) == bool(verdict)
    assert ("only by rounding" in verdict) == (ROUNDING in sentence or name == "micro-batch")
    assert verdict in run_page(RunRecord(folder), "run", [])


def test_pages_of_synthetic_runs_match_the_stored_pages(book, tmp_path):
    """Check the page of a run on GPUs and its comparison with other work and with a batch-size search."""
    folder, other = gpu_run(tmp_path / "gpus"), tmp_path / "other"
    write_run(other, about={"versions": {"torch": "1.0"}}, recipe={"lr": 0.5}, batch_size=64)
    (other / "confusion.json").unlink()
    assert is_golden("run.md", page_of(book, "add", folder), tmp_path)
    trials = [
        {"per_device_batch_size": 8, "outcome": "ran", "memory_gib": 0.5, "images_per_s": 90.0, "seconds": 3},
        {"per_device_batch_size": 24, "outcome": "out of memory", "memory_gib": None, "seconds": 2.0},
    ]
    search = {"script": "train_vit", "strategy": "ddp", "processes": 2, "device": "CPU", "quantum": 8}
    search |= {"limit_gib": 1.5, "answer": 16, "knee": 8, "trials": trials, "recipe": {"model": "vit_tiny"}}
    (tmp_path / "search.json").write_text(json.dumps(search | {"sharding": {}}))
    flags = ["--allow_different_data", "--batch_search", tmp_path / "search.json"]
    assert is_golden("comparison.md", page_of(book, "compare", folder, other, *flags), tmp_path)
    assert is_golden("index.md", (tmp_path / "book/README.md").read_text(), tmp_path)


# --- Broken and hostile folders


BREAKS = {  # tests/logbook/test_names.py checks more malformed JSON files
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
    "huge": lambda file: os.truncate(file, 2**40),  # A sparse file of 1 TiB
}


def keys(file: Path) -> list[str]:
    """Return the keys of a JSON file, or the keys in the last line of a log."""
    text = file.read_text()
    return list(json.loads(text.splitlines()[-1] if file.suffix == ".jsonl" else text))


@pytest.mark.parametrize("damage", BREAKS)
def test_missing_or_broken_files_are_named(damage, tmp_path):
    """Damage each file of a run separately, and then all files of one run."""
    whole = gpu_run(tmp_path / "whole")
    names = ["recipe.json", "result.json", "metrics.jsonl", "confusion.json", "telemetry-h.jsonl"]
    names.append("validation/test_28/report.json")
    everything = shutil.copytree(whole, tmp_path / "everything")
    for k, name in enumerate(names):
        BREAKS[damage](everything / name)
        folder = shutil.copytree(whole, tmp_path / f"run{k}")
        BREAKS[damage](folder / name)
        (problem,) = RunRecord(folder).problems
        is_unnamed = damage == "missing" and name.startswith("telemetry")
        assert problem.startswith("telemetry-<host>.jsonl" if is_unnamed else name), problem
    text = run_page(RunRecord(everything), "x", []).partition("## Missing or broken files")[2]
    # A run without a result may lack these files.
    unknown = ("telemetry", "confusion") if damage == "missing" else ()
    assert all(name in text for name in names if not name.startswith(unknown)), text


def test_a_page_contains_nothing_from_outside_its_run(book, tmp_path):
    """Add an untrusted run folder with links to the user's files, pipes, and text files named like images."""
    secret, folder = tmp_path / "home" / "id_rsa", gpu_run(tmp_path / "run")
    secret.parent.mkdir()
    secret.write_text("SECRET")
    (folder / "nvidia-smi-h.txt").unlink()
    for name in ("nvidia-smi-link.txt", "plots/link.png", "validation/text/worst.png"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(secret)
    (folder / "validation/test_28/worst.png").write_text("SECRET")
    (folder / "verified.json").unlink()
    for name in ("nvidia-smi-pipe.txt", "plots/pipe.png", "verified.json", "telemetry-pipe.jsonl"):
        os.mkfifo(folder / name)
    other_report = shutil.copytree(folder / "validation/test_28", tmp_path / "home" / "theirs")
    (folder / "validation" / "linked").symlink_to(other_report)
    text = page_of(book, "add", folder)
    assert "nvidia-smi -q" not in text
    assert "### validate.py: linked" not in text
    assert "worst.png can't be read as an image" in text
    written = [file for file in (tmp_path / "book").rglob("*") if file.is_file()]
    assert len(written) > 4
    assert not [file for file in written if b"SECRET" in file.read_bytes()]


# Text with characters that could break a table, a link, HTML or a terminal, followed by arbitrary text. A
# folder's name can contain any bytes.
ODD = ["\n", "\r\n", "\t", "\x1b[31m", "\u202e", "\ud800", " ", "a", "|", "`", "```", "<b>", "<!--", "-->"]
ODD += ["&amp;", "\\", "_a_", "*a*", "**a", "[u](v)", "![", "~~a~~", "$x$", "# ", "../"]
TEXTS = st.permutations(ODD).map(lambda odd: ["".join(odd[k : k + 3]) for k in range(0, len(odd), 3)])
# Each list of texts contains every string in ODD.
TEXTS = st.builds(operator.add, TEXTS, st.lists(st.text(max_size=9), max_size=5))
NAME = st.permutations(ODD).map(lambda odd: "".join(odd[:8])) | st.binary(max_size=9).map(os.fsdecode)
NAME = NAME.map(lambda name: "x" + re.sub("[/\0\ud800-\udc7f\udd00-\udfff]", "", name))


def with_texts(value: Any, texts: Iterator[str]) -> Any:
    """Replace the strings in a JSON value, and add them to tables whose keys come from a user."""
    if isinstance(value, list):
        return [with_texts(inner, texts) for inner in value]
    if isinstance(value, dict):
        users = {"recipe", "defaults", "versions", "sharding", "spent_s"} & value.keys()
        value = {name: with_texts(inner, texts) for name, inner in value.items()}
        return value | {name: value[name] | {next(texts): 1.5, next(texts): next(texts)} for name in users}
    return next(texts) if isinstance(value, str) else value


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = gpu_run(tmp_path_factory.mktemp("whole") / "run")
    change(folder / "result.json", error="", spent_s={"training": 5.0})
    return write_starts(folder, *SEVERAL)


@settings(max_examples=20, phases=[Phase.generate])  # The phase `shrink` would take minutes
@given(NAME, NAME, TEXTS, st.sampled_from(["finished", "failed"]))
def test_any_text_of_a_run_can_appear_on_its_pages(whole, name, report, texts, status):
    """Insert random text wherever a run may contain text.

    The text must not break a table on a page, in a comparison or in the index.
    """
    with tempfile.TemporaryDirectory() as parent:
        folder, next_texts = shutil.copytree(whole, Path(parent) / name), itertools.cycle(texts)
        for file in [*folder.rglob("*.json"), *folder.rglob("*.jsonl")]:
            write_lines(file, [with_texts(line, next_texts) for line in lines(file)])
        change(folder / "result.json", status=status)
        (folder / "validation/test_28").rename(folder / "validation" / report)
        (folder / "nvidia-smi-h.txt").rename(folder / f"nvidia-smi-{name}.txt")
        run = RunRecord(folder)
        compared = Comparison([run, RunRecord(whole)], allow_different_data=True)
        pages = {
            "run": run_page(run, "x", []),
            "two": comparison.comparison_page(compared, "two.png", [None, "run.md"]),
        }
        pages["index"] = index_page(
            {"run.md": index_values(run)}, {"two.md": comparison.page_title(compared)}
        )
        Image.new("RGB", (301, 1)).save(Path(parent) / "two.png")
        for stem, text in pages.items():
            check(logbook.write_page(Path(parent) / f"{stem}.md", index_values(run) | run.identity, text))
        table = rows(pages["run"])
        assert {shown(c) for c in run.validation_reports[report]["classes"][:20]} <= table.keys()
        assert table["run"] == [shown(folder)]
        fence = [token.content for token in MARKDOWN.parse(pages["run"]) if token.type == "fence"][-1]
        commands = [start.settings["command"] for start in run.kept_starts]
        words = [word for command in commands for word in map(printable_lines, command)]
        command = [re.sub("\n{3,}", "\n\n", word) for word in words]
        # Pages never contain two consecutive blank lines.
        assert shlex.split(fence, comments=True) == command
        assert all(re.fullmatch(r"[\w-]+", logbook.file_name(text)) for text in texts)


def shown(text: object) -> str:
    return printable(" ".join(str(text).split()))


def test_a_page_without_escaping_is_detected(tmp_path, monkeypatch):
    """Check that the test of random text detects a mutant that inserts values without escaping them."""
    environment = markdown._environment()
    monkeypatch.setattr(environment, "finalize", lambda value: markdown.Markup(value))
    monkeypatch.setattr(environment, "cache", None)
    run = RunRecord(write_run(tmp_path / "run", recipe={"model": HOSTILE}))
    (tmp_path / "page.md").write_text(run_page(run, "x", []))
    with pytest.raises(AssertionError, match="<"):
        check(tmp_path / "page.md")


@pytest.mark.parametrize("url", ["https://wandb.ai/me/x", "javascript:alert(1)", "data:text/html,x", "//x"])
def test_only_a_web_address_becomes_a_link(url, tmp_path):
    (tmp_path / "recipe.json").write_text(json.dumps({"wandb_url": url}))
    text = run_page(RunRecord(tmp_path), "run", [])
    assert rows(text)["W&B run"] == [url]
    assert ("](" in text) == url.startswith("https:")


def test_a_folder_that_is_no_run_is_named_and_nothing_is_written(book, tmp_path):
    status, output, errors = book("add", write_run(tmp_path / "run"), tmp_path)
    assert (status, output, errors.count("\n")) == (1, "", 1)
    assert errors.startswith(f"error: {tmp_path} is not a run folder")
    assert not (tmp_path / "book").exists()


def test_each_run_has_a_separate_page_with_reproducible_bytes(book, tmp_path):
    def written() -> dict[str, bytes]:
        files = [path for path in (tmp_path / "book").rglob("*") if path.is_file()]
        return {str(path.relative_to(tmp_path)): path.read_bytes() for path in files}

    first_run, second_run = (write_run(tmp_path / name) for name in ("ddp_128_3_1_2", "ddp_128_3_1_2-2"))
    moved = tmp_path / "laptop" / second_run.name
    moved.parent.mkdir()
    write_lines(second_run / "metrics.jsonl", metrics(second_run)[1:])
    (first_run / "validation/val_6").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(first_run / "validation/val_6/worst.png")
    book("add", second_run, first_run)
    book("compare", first_run, second_run)
    first_files = written()
    assert f"`{second_run}`".encode() in first_files["book/train_vit/ddp/128_3_1_2-2.md"]
    pages = {name.removeprefix("book/") for name in first_files if name.endswith(".md")}
    runs = {"train_vit/ddp/128_3_1_2.md", "train_vit/ddp/128_3_1_2-2.md"}
    assert pages == {"README.md", "compare/train_vit_ddpx2_ddpx2_2.md", *runs}
    assert len(first_files) == 4 + 1 + 3 + 2
    book("add", first_run)
    book("index")
    assert written() == first_files
    second_run.rename(moved)  # Simulate a copy of the run from a cluster to a laptop
    assert f"`{moved}`" in page_of(book, "add", moved)
    assert written().keys() == first_files.keys()
    moved.rename(second_run)
    shutil.rmtree(tmp_path / "book")
    book("add", first_run)
    book("add", second_run)
    book("compare", first_run, second_run)
    assert written() == first_files


# --- Comparisons


DIFFERENT = rows_of("different images")


@pytest.mark.parametrize("name", DIFFERENT)
def test_runs_that_saw_different_images_are_not_compared(name, book, tmp_path):
    record_changes, recipe, facts, message = DIFFERENT[name]
    split_facts = {"val_name": "val", "val_images": 360}
    first_run = write_run(tmp_path / "one", **split_facts)
    second_run = write_run(tmp_path / "other", about=record_changes, recipe=recipe, **split_facts | facts)
    status, output, errors = book("compare", first_run, second_run)
    assert (status, output, errors.count("\n")) == (1, "", 1)
    assert errors.startswith(
        f"error: {second_run} and {first_run} were evaluated on different images ({message}"
    )
    assert "--allow_different_data" in errors
    assert not (tmp_path / "book").exists()
    Comparison([RunRecord(first_run), RunRecord(second_run)], allow_different_data=True)


def test_columns_are_named_by_what_differs(tmp_path):
    """Check that columns are named after the data's content, because a data set may have several names."""

    def names(*changes: dict, **facts) -> list[str]:
        parent = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        runs = [write_run(parent / str(k), recipe=recipe) for k, recipe in enumerate(changes)]
        change(runs[-1] / "result.json", **facts)
        return Comparison([RunRecord(run) for run in runs]).names

    assert names({}, {"lr": 0.001}) == ["lr 0.1", "lr 0.001"]
    assert names({}, {"data": "mnt"}, data="mnt") == ["data digits", "data mnt"]
    assert names({}, {"lr": 0.5, "seed": 1}) == ["lr 0.1, seed 0", "lr 0.5, seed 1"]
    widths = [{"widths": [4, 8]}, {"widths": [8, 8]}, {"widths": [4, 8]}]
    assert names(*widths) == ["widths 4,8", "widths 8,8", "widths 4,8 (2)"]
    assert names({"resume": "auto"}, {"resume": "/a/b"}) == ["resume auto", "resume b"]
    assert names({}, {}) == names({"half_residual": False}, {}) == ["ddp x 2", "ddp x 2 (2)"]
    assert names({}, {}, script="train_cnn_a") == ["train_vit", "train_cnn_a"]
    assert names({}, {}, strategy="single", processes=1) == ["ddp x 2", "single x 1"]


@pytest.mark.parametrize(
    ("speeds", "train_s", "doubts"),
    [
        ([1000] * 20, 8.0, []),
        ([1000, 930, 1080] * 7, 8.0, []),
        ([300, 1000] * 10, 8.0, ["The throughput of single x 1 varied by "]),
        (
            [300, 1000] * 10,
            23.6,
            ["The throughput of single x 1 varied by ", "The first run was slowed down"],
        ),
        ([1000] * 20, 23.6, ["The first run may have been slow"]),
        ([10, *[1000] * 20], 8.0, []),  # Speeds whose first log line includes the warm-up
        ([100, 1000] * 3, 8.0, []),  # Too few log lines to judge the speeds
    ],
)
def test_doubtful_times_get_a_remark(speeds, train_s, doubts, book, tmp_path):
    """Check remarks on a slower first run, which was trained with one process."""
    slow_run = write_run(tmp_path / "one", strategy="single", processes=1, train_s=train_s)
    fast_run = write_run(tmp_path / "two", train_s=5.0)
    lines = [{"step": k, "epoch": k, "wall_s": k, "train/images_per_s": v} for k, v in enumerate(speeds)]
    write_lines(slow_run / "metrics.jsonl", lines)
    text = page_of(book, "compare", slow_run, fast_run)
    remarks = re.findall(r"^- \*\*(.*)\*\*$", text, re.MULTILINE)
    assert len(remarks) == len(doubts)
    for remark, doubt in zip(remarks, doubts, strict=True):
        assert doubt in remark


def test_runs_of_one_strategy_may_be_sharded_in_other_ways(book, tmp_path):
    sharding = [{"reshard_after_forward": reshards, "replicas": 1} for reshards in (True, False)]
    runs = [write_run(tmp_path / f"{k}", about={"sharding": values}) for k, values in enumerate(sharding)]
    text = page_of(book, "compare", runs[0], runs[0])
    compared = "recipe, data, versions, commit, devices and precision"
    assert f"There are no other differences. The {compared} are the same." in text
    single = write_run(tmp_path / "single", about={"strategy": "single"}, strategy="single", processes=1)
    different = rows(page_of(book, "compare", single, *runs).partition("## Other differences")[2])
    assert different["ddp: reshard_after_forward"] == ["-", "True", "False"]
    assert "ddp: replicas" not in different


def test_the_largest_batch_belongs_to_the_same_model_and_strategy(book, tmp_path):
    """Check that a page ignores batch-size searches for other models and strategies.

    A stored page contains a search for the run's model.
    """
    runs, file = [write_run(tmp_path / "run")] * 2, tmp_path / "search.json"
    search = {"script": "train_vit", "strategy": "ddp", "processes": 2, "recipe": {}, "sharding": {}}
    for other in ({"recipe": {"model": "vit_small"}}, {"sharding": {"replicas": 2}}, {"compile": "default"}):
        file.write_text(json.dumps(search | {"trials": [], "answer": 16} | other))
        text = page_of(book, "compare", *runs, "--batch_search", file)
        assert "## Largest batch" in text
        assert "largest batch, images" not in text


def test_a_comparison_that_makes_no_sense_is_refused(book, tmp_path, capsys):
    folder, file = write_run(tmp_path / "run"), tmp_path / "search.json"
    assert book("compare", folder)[::2] == (
        1,
        "error: a comparison needs at least two runs. Pass more run folders.\n",
    )
    file.write_text("{}")
    errors = f"error: {file} is not a result of find_batch_size.py. "
    errors += "Missing or wrong keys: script, strategy, processes, recipe, trials\n"
    assert book("compare", folder, folder, "--batch_search", file)[::2] == (1, errors)
    with pytest.raises(SystemExit, match="2"):
        logbook.parse_flags(["compare", "a", "b", "--target_accuracy=inf"])
    assert "--target_accuracy inf: the value must be more than 0 and finite" in capsys.readouterr().err
