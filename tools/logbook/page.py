"""A run's page in the log book, and the index of all pages, as Markdown."""

import shlex
from collections.abc import Collection, Iterator
from operator import methodcaller
from typing import Any

from onecurve.flags.fields import declared
from onecurve.flags.recipe import METRICS
from onecurve.run.schemas import RecipeFile, Report, Result, Stamp, kinds
from onecurve.system.files import own_files
from onecurve.system.paths import public_path
from onecurve.system.text import some_of
from tools.logbook import history
from tools.logbook.markdown import code_span, each, formatted, render
from tools.logbook.run_record import MEANING, RunRecord, as_flag, complete, host_count, stamped_files
from tools.logbook.spent import main_processes, parts_s, paused_s

SHOWN_CLASSES = 20  # rows of the table of classes
MOST_STARTS = 20  # above, the table of starts is folded
SHOWN_CHARACTERS = 60_000  # of an nvidia-smi dump: GitHub shows pages up to 512 kB
PER_CLASS = ("precision", "recall", "f1", "specificity", "support")
SET_BY_STARTS = ("strategy", "batch_size", "epochs", "processes", "device")
INDEXED = ["script", *SET_BY_STARTS, "hosts", "status"]
INDEXED += ["best_accuracy", "final_accuracy", "test_accuracy", "val_name", "test_name", "wall_s"]


def run_page(run: RunRecord, stem: str, pictures: list[str]) -> str:
    """The page. stem: of its file, and of the folder with its pictures."""
    from onecurve.run.end_tables import early_end  # imports torch

    facts, about = complete(run.facts, kinds(Result)), complete(run.about, kinds(RecipeFile))
    recipe = {name: [code_span(name), history.recipe_value(run, name)] for name in run.recipe}
    defaults = about["defaults"] or {}
    return render(
        "run.md.j2",
        run=run,
        stem=stem,
        pictures=pictures,
        facts=facts,
        about=about,
        early_end=early_end(run.facts),
        evaluations=(evaluations := _evaluations(run)),
        measured=_measured(evaluations.values()),
        reports={name: _report(report) for name, report in run.reports.items() if report},
        stamps=_stamps(run),
        meaning=MEANING,
        parts=parts_s(run),
        paused_s=paused_s(run),
        restarts=len(main_processes(run)) - 1,
        memory=[{"process": rank} | found for rank, found in enumerate(facts["memory_gib"] or [])],
        dumps=_dumps(run),
        history=history,
        most_starts=MOST_STARTS,
        batch_size=run.over_starts(methodcaller("get", "batch_size")),
        epochs=run.over_starts(methodcaller("get", "epochs")),
        recipe=list(recipe.values()),
        changed=[recipe[n] for n in recipe if n in defaults and not history.is_default(run, n, defaults[n])],
        public_path=public_path,
        quote=shlex.quote,
    )


def index_values(run: RunRecord) -> dict[str, Any]:
    """The values of a run that the index shows."""
    found = {"model": run.model, "data": run.data, "is_rehearsal": run.is_rehearsal}
    found |= {name: run.over_starts(methodcaller("get", name)) for name in SET_BY_STARTS}
    defaults = run.about.get("defaults") or {}
    in_columns = {*found, *declared("locates")}
    changed = [name for name in defaults if name not in in_columns and name in run.recipe]
    changed = [name for name in changed if not history.is_default(run, name, defaults[name])]
    found["flags"] = ", ".join(f"{name} {public_path(as_flag(run.recipe[name]))}" for name in changed)
    return {name: run.facts.get(name) for name in INDEXED} | found | {"hosts": run.over_starts(host_count)}


def index(runs: dict[str, dict[str, Any]], comparisons: dict[str, str]) -> str:
    """The page of all pages. runs: the index_values of each page; comparisons: the title of each page."""
    # Pages of earlier versions have no flags.
    values = {page: dict.fromkeys([*INDEXED, "flags"]) | found for page, found in runs.items()}
    return render("index.md.j2", runs=values, comparisons=comparisons)


def _evaluations(run: RunRecord) -> dict[str, dict[str, Any]]:
    """The best and the final evaluation, and that on the test split: {where it was made: its values}."""
    facts, last = run.facts, run.evaluations[-1] if run.evaluations else {}
    kinds = ("best", "final", "test")
    best, final, test = ({f"val/{name}": facts.get(f"{kind}_{name}") for name in METRICS} for kind in kinds)
    best["step"] = facts.get("best_step")
    best |= next((line for line in run.evaluations if line["step"] == best["step"]), {})
    final |= last
    step, last_step = (formatted(one.get("step"), "step {:,}") or "-" for one in (best, final))
    found = {f"best on the {run.evaluated_images()}, {step}": best, f"final, {last_step}": final}
    if "test_name" in facts:
        found = {f"on the {run.evaluated_images('test')}, weights of {step}": test} | found
    return found


def _measured(evaluations: Collection[dict[str, Any]]) -> list[tuple[str, str, list[float | None]]]:
    """A row for each metric, as markdown.known() takes them."""
    titles = {name: metric.title for name, metric in METRICS.items() if metric.is_share}
    titles |= {"raw_accuracy": "accuracy without EMA"}
    titles |= {name: metric.title for name, metric in METRICS.items() if not metric.is_share}
    return [(title, "{:.4f}", each(evaluations, f"val/{name}")) for name, title in titles.items()]


def _report(report: dict[str, Any]) -> dict[str, Any]:
    """A report of validate.py, with a row for each class; of many classes those with the lowest F1."""
    classes, columns = report.get("classes", []), report.get("per_class", {})
    found = complete(report, kinds(Report)) | {"rows": [], "shown": "Every class"}
    if any(len(columns.get(name) or ()) != len(classes) for name in PER_CLASS):
        return found
    order = list(range(len(classes)))
    if len(classes) > SHOWN_CLASSES:
        with_images = [i for i in order if columns["support"][i]]
        order = sorted(with_images, key=lambda i: columns["f1"][i])[:SHOWN_CLASSES]
        found["shown"] = f"The {len(order)} classes of {len(classes)} with the lowest F1"
    for i in order:
        shares = (f"{columns[name][i]:{',' if name == 'support' else '.4f'}}" for name in PER_CLASS)
        found["rows"].append([classes[i], *shares])
    return found


def _stamps(run: RunRecord) -> list[dict[str, Any]]:
    """The outcomes of verify.py. `changed` names the files that have changed since, which makes one void."""
    files, found = stamped_files(run.folder) if run.stamps else {}, []
    for stamp in run.stamps:
        # Earlier versions hashed no starts.jsonl, which their runs lack.
        changed = [name for name in files if files[name] != stamp.get("files", {}).get(name, "")]
        found.append(complete(stamp, kinds(Stamp)) | {"changed": some_of(changed)})
    return found


def _dumps(run: RunRecord) -> Iterator[tuple[str, str, bool]]:
    """The host, the text of nvidia-smi -q, and whether only its beginning is shown."""
    for file in own_files(run.folder, "nvidia-smi-*.txt"):
        with open(file, errors="replace") as opened:
            dump = opened.read(SHOWN_CHARACTERS + 1)
        yield file.stem.removeprefix("nvidia-smi-"), dump[:SHOWN_CHARACTERS], len(dump) > SHOWN_CHARACTERS
