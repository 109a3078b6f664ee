"""Tests that untrusted names are shown escaped, and that malformed JSON files are refused in one line."""

import json
import os
from pathlib import Path

import pytest

from logbook import read_mark
from onecurve.checkpoint.format import (
    MANIFEST_FILE,
    STATE_FILE,
    Checkpoint,
    parse_checkpoint_manifest,
    parse_step_index,
)
from onecurve.data.cache import prepare_data
from onecurve.data.images import open_images
from onecurve.data.shards import parse_manifest
from onecurve.distributed.launch_config import _read_deepspeed_config
from onecurve.flags.fields import read_config
from onecurve.flags.recipe import ImageRecipe
from onecurve.run import plots
from onecurve.run.folder import count_restarts
from onecurve.run.identity import why_not_this_run
from onecurve.run.lease import _parsed_record
from onecurve.run.state import RunState
from onecurve.system.files import json_lines, read_json, read_lines, read_yaml
from onecurve.system.text import printable, printable_lines
from tests.conftest import CNN, python, result, run
from tests.support.data_sets import class_folders
from tools.doctor.facts import describe_host
from tools.logbook import markdown
from tools.logbook.comparison import read_search
from tools.logbook.figures import draw_run
from tools.logbook.page import run_page
from tools.logbook.run_record import RunRecord

LATIN_1, RED = os.fsdecode(b"caf\xe9"), "\x1b[31mred"
SHOWN = [r"\x1b[31mred", r"caf\xe9"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (LATIN_1, r"caf\xe9"),
        (RED, r"\x1b[31mred"),
        ("a\nb\t\x7f\x85\u2028", r"a\x0ab\x09\x7f\x85\u2028"),
        ("\u202egnp\u2069\ud800", r"\u202egnp\u2069\ud800"),
        ("caf\u00e9 \u732b \U0001f431 a\\b", "caf\u00e9 \u732b \U0001f431 a\\b"),
    ],
)
def test_printable_text_stays_unchanged(text, shown):
    assert printable(text) == shown == printable(shown)
    twice = printable_lines(f"{text}\n\t{text}").replace("\n", r"\x0a").replace("\t", r"\x09")
    assert twice == rf"{shown}\x0a\x09{shown}"


def renamed_classes(root: Path) -> Path:
    """Write class folders and a file whose names are not UTF-8 or contain terminal escapes."""
    class_folders(root, train=16, val=8)
    for split in ("train", "val"):
        for letter, name in (("a", LATIN_1), ("b", RED)):
            (root / split / letter).rename(root / split / name)
        first = min((root / split / LATIN_1).iterdir())
        first.rename(first.with_name(f"{LATIN_1}.png"))
    return root


def test_a_class_in_latin_1_is_trained_validated_and_shown(tmp_path):
    data, folder = renamed_classes(tmp_path / os.fsdecode(b"donn\xe9es")), tmp_path / "run"
    cache = ["--cache_dir", tmp_path / "cache", "--mixed_precision", "no"]
    flags = ["--data", data, "--batch_size", "8", "--epochs", "1", "--max_steps", "1", "--telemetry_s", "0"]
    output = run([*python(), *CNN, *flags, *cache, "--output_dir", folder])
    assert "Traceback" not in output
    assert result(folder)["status"] == "finished"
    assert list((folder / "tensorboard").rglob("events*"))
    assert sorted(os.listdir(folder / "plots")) == ["confusion.png", "curves.png", "predictions.png"]
    assert read_json(folder / "confusion.json")["classes"] == SHOWN
    [manifest] = folder.glob("checkpoints/*/manifest.json")
    assert read_json(manifest)["classes"] == SHOWN
    output = run([*python(), "validate.py", folder, *cache])
    assert "\x1b[31m" not in output
    assert r"caf\xe9" in output
    [report] = folder.glob("validation/*/report.json")
    assert read_json(report)["classes"] == SHOWN
    record = RunRecord(folder)
    text = run_page(record, "run", draw_run(record, tmp_path / "pictures"))
    assert r"caf\\xe9" in text  # Markdown escapes the backslash
    text.encode()


def test_escaped_names_are_shown_everywhere(tmp_path):
    """Check untrusted names in messages about a broken image, split names, doctor.py, plots and pages."""
    root = renamed_classes(tmp_path / "data")
    split = open_images(prepare_data(str(root), tmp_path / "cache"), ImageRecipe(workers=0))
    assert list(split.classes) == SHOWN
    assert describe_host(str(root))["data"]["problem"] is None
    broken = min((root / "train" / LATIN_1).iterdir())
    broken.write_bytes(b"none")
    with pytest.raises(ValueError, match=r"caf\\xe9"):
        prepare_data(str(root), tmp_path / "cache")
    (root / "train" / LATIN_1).rename(root / "train" / "other")
    with pytest.raises(ValueError, match=r"val contains classes that are not in train: caf\\xe9"):
        prepare_data(str(root), tmp_path / "cache")
    row = [plots.Panel(LATIN_1, RED, bars={LATIN_1: 1.0})]
    plots.draw_panels(tmp_path / "a.png", [row], f"{RED} $x$")
    plots.draw_confusion_matrix(tmp_path / "b.png", [[1, 0], [0, 1]], [LATIN_1, RED], LATIN_1)
    text = [markdown.text(RED), markdown.code_span(LATIN_1), markdown.code_block(f"a\n{RED}")]
    text += [markdown.folded("", LATIN_1), markdown.link(RED, LATIN_1)]
    assert "caf%E9" in text[-1]
    assert all(line.isprintable() for part in text for line in part.splitlines())


def deep_restart(file: Path) -> None:
    count_restarts(file.parent, 0)
    raise ValueError(file.name)  # An unreadable count is replaced


READERS = {  # Reader of each file. Readers that continue without the file report an error in this test.
    "any.json": read_json,
    STATE_FILE: lambda file: RunState.read(Checkpoint(file.parent, {"step": 1})),
    MANIFEST_FILE: lambda file: parse_checkpoint_manifest(file.read_bytes(), file.parent),
    "index.json": lambda file: parse_step_index(file.read_bytes(), file),
    "shards.json": lambda file: parse_manifest(file.read_bytes(), str(file)),
    "search.json": read_search,
    "config.json": lambda file: read_config(file, ()),
    "config.yaml": lambda file: read_config(file, ()),
    "accelerate.yaml": lambda file: read_yaml("--config_file", file),
    "deepspeed.json": lambda file: _read_deepspeed_config("--deepspeed_config", str(file)),
    "restarts.json": deep_restart,
}
CONTENTS = {
    "deep": b"[" * 100_000,
    "deep object": b'{"a":' * 100_000,
    "long number": b'{"a": ' + b"1" * 5000 + b"}",
    "not UTF-8": b'{"a": "caf\xe9"}',
    "a list": b"[]",
    "empty": b"",
    "text": b"root:secret:0",
}


@pytest.mark.parametrize("content", CONTENTS)
def test_malformed_json_is_one_line_that_names_its_file(content, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for name, read in READERS.items():
        file = tmp_path / "step_00000001" / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(CONTENTS[content])
        if name == "config.yaml" and content == "long number":
            continue  # Readers ignore the key `a` like any other unknown key
        with pytest.raises(ValueError, match=r".+") as error:
            read(file)
        assert file.name in str(error.value), name
        assert len(str(error.value).splitlines()) == 1, name
        assert "secret" not in str(error.value), name


@pytest.mark.parametrize("content", CONTENTS)
def test_a_run_with_malformed_json_has_a_page(content, tmp_path):
    """Check that a page names the malformed file. No new run resumes the run, and no start is blocked."""
    for name in ("recipe.json", "result.json", "confusion.json", "metrics.jsonl", "telemetry-a.jsonl"):
        (tmp_path / name).write_bytes(CONTENTS[content])
    record = RunRecord(tmp_path)
    record.host_summaries()
    assert any("recipe.json" in problem for problem in record.problems)
    with pytest.raises(ValueError, match=r"recipe\.json can't be read"):
        why_not_this_run(tmp_path, ImageRecipe(), None)
    assert read_lines(tmp_path / "metrics.jsonl") == list(json_lines(tmp_path / "telemetry-a.jsonl"))
    assert not _parsed_record(CONTENTS[content].decode(errors="surrogateescape")).get("pid")
    (tmp_path / "page.md").write_text("<!-- logbook {" + '"a":{' * 100_000 + "} -->\n")
    with pytest.raises(ValueError, match=r"page\.md"):
        read_mark(tmp_path / "page.md")
    json.dumps(record.problems)
