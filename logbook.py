"""Writes the log book: Markdown pages of runs, with plots, in runs/logbook/ or --folder.

    python logbook.py add runs/train_cnn_a/single_128_10_1_1
    python logbook.py compare runs/train_cnn_b/fsdp_128_15_1_4 runs/train_cnn_b/ddp_128_15_2_4
    python logbook.py index --folder logbook

add      writes <script>/<strategy>/<run>.md for each run, named after its folder without the strategy, as
         128_10_1_1-2. A run of that name elsewhere gets the next number; the same run replaces its own page
compare  writes a page in compare/ with time, accuracy and all other differences of the runs. It refuses runs
         that were evaluated on different images
index    writes README.md, which add and compare also update

A page names missing and broken files. The same run folders give the same bytes.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onecurve.system.cli import CommandParser, check_positive, run_command
from onecurve.system.files import parse_json, write_text
from onecurve.system.paths import python_command, shortest
from onecurve.system.text import natural, numbered
from tools.logbook import comparison
from tools.logbook import figures as pictures
from tools.logbook import page as run_page
from tools.logbook.comparison import Comparison, read_search
from tools.logbook.page import index_values
from tools.logbook.run_record import RunRecord

FOLDER = Path("runs") / "logbook"
COMPARE = "compare"  # the folder of the comparisons

Command = Callable[[argparse.Namespace], list[Path]]  # writes pages


def main() -> int:
    flags = parse_flags(sys.argv[1:])
    made = flags.make(flags)
    pages = [shortest(page.absolute()) for page in (write_index(flags.folder), *made)]
    print("\n".join(pages))
    print(python_command("-m", "rich.markdown", pages[-1]))  # shows the page on the terminal
    return 0


def parse_flags(words: list[str]) -> argparse.Namespace:
    parser = CommandParser(prog="logbook.py", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="{add,compare,index}")

    def command(name: str, make: Command, help: str) -> Callable[..., argparse.Action]:
        sub = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
        sub.set_defaults(make=make)
        sub.add_argument("--folder", type=Path, default=FOLDER, help="for the pages (default: %(default)s)")
        return sub.add_argument

    command("index", lambda flags: [], "write the table of all pages")
    add = command("add", add_runs, "write a page for each run")
    compare = command("compare", compare_runs, "write a page that compares runs")
    for argument in (add, compare):
        argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run")
    compare("--name", help="name of the page; unset: made from the runs")
    compare("--target_accuracy", type=float, help="unset: the highest that all runs have reached")
    different = "compare runs that were evaluated on different images"
    compare("--allow_different_data", action="store_true", help=different)
    searches = {"nargs": "+", "type": Path, "default": [], "metavar": "FILE"}
    compare("--batch_search", **searches, help="results of find_batch_size.py")
    flags = parser.parse_args(words)
    check_positive(parser, flags, "target_accuracy")
    return flags


def add_runs(flags: argparse.Namespace) -> list[Path]:
    runs = [RunRecord(folder) for folder in flags.runs]
    return [write_run(flags.folder, run) for run in runs]


def write_run(logbook: Path, run: RunRecord) -> Path:
    first = run.kept[0].about if run.kept else run.facts  # a run keeps its page when it changes its strategy
    strategy = file_name(first.get("strategy", "unknown"))
    script = file_name(run.facts.get("script", "unknown"))
    stem = run.folder.resolve().name.removeprefix(f"{strategy}_")
    folder = logbook / script / strategy
    page = free_page(folder, file_name(stem), run.identity)
    drawn = pictures.draw_run(run, page.with_suffix(""))
    return write_page(page, index_values(run) | run.identity, run_page.run_page(run, page.stem, drawn))


def compare_runs(flags: argparse.Namespace) -> list[Path]:
    runs = [RunRecord(folder) for folder in flags.runs]
    searches = tuple(read_search(file) for file in flags.batch_search)
    what = Comparison(runs, flags.target_accuracy, searches, flags.allow_different_data)
    folder, identity = flags.folder / COMPARE, {"runs": [run.identity for run in runs]}
    if flags.name:
        page = folder / f"{file_name(flags.name)}.md"
    else:
        names = "_".join(name.replace(" ", "") for name in what.names)
        page = free_page(folder, file_name(f"{runs[0].facts.get('script', 'unknown')}_{names}"), identity)
    pictures.draw_comparison(what, page.with_suffix(".png"))
    marks = {f"../{other.relative_to(flags.folder)}": read_mark(other) for other in run_pages(flags.folder)}
    links = [
        next((link for link, mark in marks.items() if is_same(mark, run.identity)), None) for run in runs
    ]
    text = comparison.comparison_page(what, f"{page.stem}.png", links)
    return [write_page(page, {"title": comparison.title(what)} | identity, text)]


# --- Pages and their first lines


def free_page(folder: Path, stem: str, identity: dict[str, Any]) -> Path:
    """The page of these runs, or the next free one."""
    pages = (folder / f"{name}.md" for name in numbered(stem))
    return next(page for page in pages if not page.exists() or is_same(read_mark(page), identity))


def is_same(mark: dict[str, Any], identity: dict[str, Any]) -> bool:
    """True if a page is of these runs. Folders are compared only for a run without metrics."""
    if "runs" in identity:
        theirs, ours = mark.get("runs", []), identity["runs"]
        return len(theirs) == len(ours) and all(map(is_same, theirs, ours))
    lines = mark.get("first_line"), identity["first_line"]
    return lines[0] == lines[1] if all(lines) else mark.get("run") == identity["run"]


def write_page(page: Path, mark: dict[str, Any], text: str) -> Path:
    """Writes the page. mark: for the index and is_same; it is escaped, so no name can end its comment."""
    escaped = json.dumps(mark, sort_keys=True).replace("<", "\\u003c").replace(">", "\\u003e")
    page.parent.mkdir(parents=True, exist_ok=True)
    write_text(page, f"<!-- logbook {escaped} -->\n\n{text}")
    return page


def read_mark(page: Path) -> dict[str, Any]:
    """The mark of a page; empty for one written by hand."""
    found = re.match(r"<!-- logbook (\{.*\}) -->\n", page.read_text())
    try:
        return parse_json(found[1], page) if found else {}
    except ValueError:
        raise ValueError(f"{page}: its first line can't be read: remove it and add its run anew") from None


def run_pages(logbook: Path) -> list[Path]:
    """logbook/<script>/<strategy>/*.md"""
    return sorted(logbook.glob("*/*/*.md"), key=natural)


def write_index(logbook: Path) -> Path:
    """Writes README.md from the first lines of all pages. The run folders are not needed."""
    pages = [*run_pages(logbook), *sorted(logbook.glob(f"{COMPARE}/*.md"), key=natural)]
    marks = {page.relative_to(logbook).as_posix(): read_mark(page) for page in pages}
    runs = {page: mark for page, mark in marks.items() if "run" in mark}
    comparisons = {page: mark["title"] for page, mark in marks.items() if "runs" in mark}
    logbook.mkdir(parents=True, exist_ok=True)
    write_text(logbook / "README.md", run_page.index(runs, comparisons))
    return logbook / "README.md"


def file_name(text: str) -> str:
    """The text as a file name: without slashes and characters that shells or links interpret."""
    return re.sub(r"[^\w-]+", "_", text).strip("_")[:100] or "unknown"


if __name__ == "__main__":
    sys.exit(run_command(main))
