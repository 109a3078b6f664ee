"""Write the log book, a set of Markdown pages with plots of runs, to runs/logbook/ or --folder.

    python logbook.py add runs/train_cnn_a/single_128_10_1_1
    python logbook.py compare runs/train_cnn_b/fsdp_128_15_1_4 runs/train_cnn_b/ddp_128_15_2_4
    python logbook.py index --folder logbook

add      writes the page <script>/<strategy>/<run>.md for each run. The page's name is the run folder's name
         without the strategy, for example 128_10_1_1-2. A number is appended if a different run already
         uses this name. Adding a run again replaces the run's page.
compare  writes a page in compare/ that compares the time, accuracy and settings of several runs. The command
         refuses runs that were evaluated on different images.
index    writes the index, README.md. The commands add and compare also update the index.

Each page lists missing and broken files. Identical run folders always produce identical pages.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onecurve.system.cli import add_help_flag, check_positive, command_parser, run_command
from onecurve.system.files import parse_json, write_text
from onecurve.system.paths import python_command, shortest
from onecurve.system.text import natural_sort_key, numbered
from tools.logbook import comparison as compare_page
from tools.logbook import figures
from tools.logbook import page as run_page
from tools.logbook.comparison import Comparison, read_search
from tools.logbook.page import index_values
from tools.logbook.run_record import RunRecord

FOLDER = Path("runs") / "logbook"
COMPARE = "compare"  # folder name for comparison pages

Command = Callable[[argparse.Namespace], list[Path]]  # function that writes pages and returns their paths


def main() -> int:
    flags = parse_flags(sys.argv[1:])
    written = flags.make(flags)
    pages = [shortest(page.absolute()) for page in (write_index(flags.folder), *written)]
    print("\n".join(pages))
    print(python_command("-m", "rich.markdown", pages[-1]))  # command that displays the page in the terminal
    return 0


def parse_flags(words: list[str]) -> argparse.Namespace:
    parser = command_parser(__doc__, "logbook.py {add,compare,index} [RUN ...] [flags]")
    commands = parser.add_subparsers(required=True, metavar="{add,compare,index}", prog="logbook.py")

    def command(name: str, make: Command, help: str) -> Callable[..., argparse.Action]:
        runs = "" if name == "index" else "RUN [RUN ...] "
        usage = f"logbook.py {name} {runs}[flags]"
        sub = commands.add_parser(
            name, help=help, description=help, usage=usage, allow_abbrev=False, add_help=False
        )
        add_help_flag(sub)
        sub.set_defaults(make=make)
        folder_help = "Folder for the log book. Default: %(default)s."
        sub.add_argument("--folder", type=Path, default=FOLDER, metavar="FOLDER", help=folder_help)
        return sub.add_argument

    command("index", lambda flags: [], "Write the index of all pages.")
    add = command("add", add_runs, "Write a page for each run.")
    compare = command("compare", compare_runs, "Write a page that compares runs.")
    for argument in (add, compare):
        argument("runs", nargs="+", type=Path, metavar="RUN", help="Run folder.")
    compare("--name", metavar="NAME", help="Name of the page. Default: a name made from the run names.")
    target_help = (
        "Accuracy for the row `time to accuracy`. Default: the highest accuracy that every run reached."
    )
    compare("--target_accuracy", type=float, metavar="ACCURACY", help=target_help)
    different = "Compare runs even if they were evaluated on different images."
    compare("--allow_different_data", action="store_true", help=different)
    searches = {"nargs": "+", "type": Path, "default": [], "metavar": "FILE"}
    compare("--batch_search", **searches, help="Result files of find_batch_size.py to show on the page.")
    flags = parser.parse_args(words)
    check_positive(parser, flags, "target_accuracy")
    return flags


def add_runs(flags: argparse.Namespace) -> list[Path]:
    runs = [RunRecord(folder) for folder in flags.runs]
    return [write_run(flags.folder, run) for run in runs]


def write_run(logbook: Path, run: RunRecord) -> Path:
    # The run's first start determines the page, so that a run keeps its page when its strategy changes.
    first = run.kept_starts[0].settings if run.kept_starts else run.result_values
    strategy = file_name(first.get("strategy", "unknown"))
    script = file_name(run.result_values.get("script", "unknown"))
    stem = run.folder.resolve().name.removeprefix(f"{strategy}_")
    folder = logbook / script / strategy
    page = free_page(folder, file_name(stem), run.identity)
    plots = figures.draw_run(run, page.with_suffix(""))
    return write_page(page, index_values(run) | run.identity, run_page.run_page(run, page.stem, plots))


def compare_runs(flags: argparse.Namespace) -> list[Path]:
    runs = [RunRecord(folder) for folder in flags.runs]
    searches = tuple(read_search(file) for file in flags.batch_search)
    comparison = Comparison(runs, flags.target_accuracy, searches, flags.allow_different_data)
    folder, identity = flags.folder / COMPARE, {"runs": [run.identity for run in runs]}
    if flags.name:
        page = folder / f"{file_name(flags.name)}.md"
    else:
        names = "_".join(name.replace(" ", "") for name in comparison.names)
        script = runs[0].result_values.get("script", "unknown")
        page = free_page(folder, file_name(f"{script}_{names}"), identity)
    figures.draw_comparison(comparison, page.with_suffix(".png"))
    marks = {f"../{path.relative_to(flags.folder)}": read_mark(path) for path in run_pages(flags.folder)}
    links = [
        next((link for link, mark in marks.items() if is_same(mark, run.identity)), None) for run in runs
    ]
    text = compare_page.comparison_page(comparison, f"{page.stem}.png", links)
    return [write_page(page, {"title": compare_page.page_title(comparison)} | identity, text)]


# --- Pages and their first lines


def free_page(folder: Path, stem: str, identity: dict[str, Any]) -> Path:
    """Return the path of the page that describes the runs, or a free path if no page describes them."""
    pages = (folder / f"{name}.md" for name in numbered(stem))
    return next(page for page in pages if not page.exists() or is_same(read_mark(page), identity))


def is_same(mark: dict[str, Any], identity: dict[str, Any]) -> bool:
    """Return True if a page's mark describes the same runs. Compare folders only for runs without metrics."""
    if "runs" in identity:
        marked_runs, runs = mark.get("runs", []), identity["runs"]
        return len(marked_runs) == len(runs) and all(map(is_same, marked_runs, runs))
    lines = mark.get("first_line"), identity["first_line"]
    return lines[0] == lines[1] if all(lines) else mark.get("run") == identity["run"]


def write_page(page: Path, mark: dict[str, Any], text: str) -> Path:
    """Write a page that begins with a mark, an HTML comment that write_index and is_same read.

    Escape the mark, so that no name can end the comment.
    """
    escaped = json.dumps(mark, sort_keys=True).replace("<", "\\u003c").replace(">", "\\u003e")
    page.parent.mkdir(parents=True, exist_ok=True)
    write_text(page, f"<!-- logbook {escaped} -->\n\n{text}")
    return page


def read_mark(page: Path) -> dict[str, Any]:
    """Return a page's mark, or an empty dict for a page written by hand."""
    comment = re.match(r"<!-- logbook (\{.*\}) -->\n", page.read_text())
    try:
        return parse_json(comment[1], page) if comment else {}
    except ValueError:
        raise ValueError(
            f"the first line of {page} is damaged. Remove the page and add its run again."
        ) from None


def run_pages(logbook: Path) -> list[Path]:
    """Return the paths of all run pages, logbook/<script>/<strategy>/*.md."""
    return sorted(logbook.glob("*/*/*.md"), key=natural_sort_key)


def write_index(logbook: Path) -> Path:
    """Write README.md from the marks of all pages, without reading the run folders."""
    pages = [*run_pages(logbook), *sorted(logbook.glob(f"{COMPARE}/*.md"), key=natural_sort_key)]
    marks = {page.relative_to(logbook).as_posix(): read_mark(page) for page in pages}
    runs = {page: mark for page, mark in marks.items() if "run" in mark}
    comparisons = {page: mark["title"] for page, mark in marks.items() if "runs" in mark}
    logbook.mkdir(parents=True, exist_ok=True)
    write_text(logbook / "README.md", run_page.index_page(runs, comparisons))
    return logbook / "README.md"


def file_name(text: str) -> str:
    """Convert text to a file name without slashes and without characters that shells or links interpret."""
    return re.sub(r"[^\w-]+", "_", text).strip("_")[:100] or "unknown"


if __name__ == "__main__":
    sys.exit(run_command(main))
