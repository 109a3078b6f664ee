"""Synthetic runs for the log book's tests, and helpers that read its pages."""

import json
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from markdown_it import MarkdownIt
from PIL import Image

MARKDOWN = MarkdownIt("commonmark").enable("table")
LOGBOOK_HTML = re.compile("(<!-- logbook {[^<>]*} --|<details><summary>[^<>]*</summary|</details)>\n?")
GOLDEN = Path(__file__).with_name("golden")
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'><!--&amp;"
CLASSES = ["cat", HOSTILE, "d\u202eog"]


def write_run(folder: Path, lines: int = 6, about: Any = None, recipe: Any = None, **facts: Any) -> Path:
    """Write a run folder with the files of a finished training run, except for these changes."""
    folder.mkdir(parents=True)
    flags = {"data": "digits", "epochs": 3, "batch_size": 128, "lr": 0.1, "seed": 0, "model": "vit_tiny"}
    flags |= {"layer_decay": None, **(recipe or {})}
    record = {"script": "train_vit", "strategy": "ddp", "recipe": flags, "sharding": {}, "hosts": ["h1"]}
    record |= {"devices": ["NVIDIA T4", "NVIDIA T4"], "versions": {"torch": "2.15.0"}, "source": "digits-1"}
    record |= {"val_chosen": "a hash of their ids", **(about or {})}
    outcome = {"script": "train_vit", "status": "finished", "strategy": "ddp", "processes": 2, "hosts": 1}
    outcome |= {"data": "digits", "batch_size": 128, "epochs": 3, "steps": lines, "wall_s": 2.0 * lines}
    outcome |= {"parameters": 5_000_000, "epoch_s": 1.25}
    outcome |= {"best_accuracy": 0.8, "final_accuracy": 0.7, "final_loss": 0.5, "images_per_s": 1000.0}
    (folder / "recipe.json").write_text(json.dumps(record))
    (folder / "result.json").write_text(json.dumps(outcome | facts))
    confusion = {"step": lines, "classes": CLASSES, "confusion": [[7, 2, 0], [0, 9, 0], [0, 5, 4]]}
    (folder / "confusion.json").write_text(json.dumps(confusion))
    write_lines(folder / "telemetry-h1.jsonl", [{"host": "h1", "t": 1.7e9}])
    metrics: list[dict[str, Any]] = []
    for k in range(1, lines + 1):
        values = {"train/loss": 2 / k, "val/loss": 3 / k, "val/accuracy": k / lines / 2}
        metrics.append({"step": k, "epoch": 3 * k / lines, "wall_s": 2.0 * k, **values})
    write_lines(folder / "metrics.jsonl", metrics)
    return folder


def write_starts(folder: Path, *changes: dict[str, Any]) -> Path:
    """Record starts of a run from write_run(), one minute apart, on two GPUs with micro-batches of 64.

    Args:
        folder: Run folder.
        changes: Values of each start that differ from the previous start. recipe.json stores the last start's
            values.
    """
    record = json.loads((folder / "recipe.json").read_text()) | {"per_device_batch_size": 64, "step": 0}
    record |= {"accumulation_steps": 1, "mixed_precision": "bf16", "git_commit": "abc"}
    starts = []
    for minute, changed in enumerate(changes):
        record = record | {"at": 1.7e9 + 60 * minute, "changed": {}} | changed
        recipe = {name: value for name, (_, value) in record["changed"].items()}
        record["recipe"] = record["recipe"] | recipe
        starts.append(record)
    write_lines(folder / "starts.jsonl", starts)
    change(folder / "recipe.json", **record)
    return folder


def write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def change(file: Path, **changes: Any) -> None:
    """Set these keys in a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def check(page: Path) -> None:
    """Check that a page has complete tables and no foreign HTML, and that its images open."""
    text = page.read_text()
    for token in MARKDOWN.parse(text):
        if token.type == "html_block":
            assert LOGBOOK_HTML.fullmatch(token.content), token
        for part in token.children or ():
            assert part.type != "html_inline", part.content
            if part.type == "image":
                with Image.open(page.parent / unquote(part.attrs["src"])) as image:
                    assert image.size[0] > 300
    bars = [len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0 for line in text.splitlines()]
    assert all(a == b for a, b in pairwise(bars) if a and b)


def rows(text: str) -> dict[str, list[str]]:
    """Return the rows of all tables as a viewer shows them. Each key is a row's first cell."""
    table_rows, cells = {}, []
    for token in MARKDOWN.parse(text):
        if token.type == "tr_open":
            cells = []
        elif token.type == "inline":
            cells.append("".join(part.content for part in token.children))
        elif token.type == "tr_close":
            table_rows[cells[0]] = cells[1:]
    return table_rows


def is_golden(name: str, text: str, runs: Path) -> bool:
    """Compare a page with the stored page called `name`, or store the page if WRITE_GOLDEN=1.

    Review the diff after storing a page.

    Args:
        name: Name of the stored page.
        text: Page to compare.
        runs: Folder that contains the runs, which differs between tests.
    """
    file, text = GOLDEN / name, text.replace(str(runs), "PLACE")
    if os.environ.get("WRITE_GOLDEN"):
        file.write_text(text)
    return file.read_text() == text
