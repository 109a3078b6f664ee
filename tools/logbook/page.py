"""Log book page of a run, and the index of all pages, as Markdown."""

import shlex
from collections.abc import Collection, Iterator
from operator import methodcaller
from typing import Any

from onecurve.flags.fields import declared_values
from onecurve.flags.recipe import METRICS
from onecurve.run.schemas import RecipeFile, ReplayRecord, Report, Result, value_types
from onecurve.system.files import own_files
from onecurve.system.paths import public_path
from onecurve.system.text import some_of
from tools.logbook import history
from tools.logbook.markdown import code_span, each, formatted, render
from tools.logbook.run_record import (
    MEANING,
    RunRecord,
    fill_missing,
    flag_text,
    hash_compared_files,
    host_count,
)
from tools.logbook.spent import main_processes, parts_s, paused_s

SHOWN = 20  # maximum number of rows in the class table
MOST_STARTS = 20  # maximum number of starts in a table that is not folded
SHOWN_CHARACTERS = 60_000  # maximum length of an nvidia-smi dump. GitHub shows at most 512 kB per page
PER_CLASS = ("precision", "recall", "f1", "specificity", "support")
SET_BY_STARTS = ("strategy", "batch_size", "epochs", "processes", "device")
INDEX_KEYS = ["script", *SET_BY_STARTS, "hosts", "status"]
INDEX_KEYS += ["best_accuracy", "final_accuracy", "test_accuracy", "val_name", "test_name", "wall_s"]


def run_page(run: RunRecord, stem: str, pictures: list[str]) -> str:
    """Return a run's page.

    `stem` is the page's file name without suffix, and the name of the plot folder.
    """
    from onecurve.run.end_tables import early_end_in_words  # this import loads torch

    facts = fill_missing(run.facts, value_types(Result))
    settings = fill_missing(run.settings, value_types(RecipeFile))
    recipe = {name: [code_span(name), history.recipe_value(run, name)] for name in run.recipe}
    defaults = settings["defaults"] or {}
    flags_with_default = [name for name in recipe if name in defaults]
    changed_flags = [name for name in flags_with_default if not history.is_default(run, name, defaults[name])]
    return render(
        "run.md.j2",
        run=run,
        stem=stem,
        pictures=pictures,
        facts=facts,
        settings=settings,
        early_end=early_end_in_words(run.facts),
        evaluations=(evaluations := _headline_evaluations(run)),
        measured=_metric_rows(evaluations.values()),
        reports={name: _report_rows(report) for name, report in run.reports.items() if report},
        stamps=_stamps_with_changes(run),
        meaning=MEANING,
        parts=parts_s(run),
        paused_s=paused_s(run),
        restarts=len(main_processes(run)) - 1,
        memory=[{"process": rank} | peaks for rank, peaks in enumerate(facts["memory_gib"] or [])],
        dumps=_nvidia_smi_dumps(run),
        history=history,
        most_starts=MOST_STARTS,
        batch_size=run.over_starts(methodcaller("get", "batch_size")),
        epochs=run.over_starts(methodcaller("get", "epochs")),
        recipe=list(recipe.values()),
        changed=[recipe[name] for name in changed_flags],
        public_path=public_path,
        quote=shlex.quote,
    )


def index_values(run: RunRecord) -> dict[str, Any]:
    """Return the values that the index shows for a run."""
    values = {"model": run.model, "data": run.data, "is_rehearsal": run.is_rehearsal}
    values |= {name: run.over_starts(methodcaller("get", name)) for name in SET_BY_STARTS}
    defaults = run.settings.get("defaults") or {}
    in_columns = {*values, *declared_values("locates")}
    changed = [name for name in defaults if name not in in_columns and name in run.recipe]
    changed = [name for name in changed if not history.is_default(run, name, defaults[name])]
    values["flags"] = ", ".join(f"{name} {public_path(flag_text(run.recipe[name]))}" for name in changed)
    return (
        {name: run.facts.get(name) for name in INDEX_KEYS} | values | {"hosts": run.over_starts(host_count)}
    )


def index(runs: dict[str, dict[str, Any]], comparisons: dict[str, str]) -> str:
    """Return the index page.

    `runs` maps pages to their index_values, and `comparisons` maps pages to titles.
    """
    # Pages from earlier versions do not contain the key `flags`.
    rows = {page: dict.fromkeys([*INDEX_KEYS, "flags"]) | values for page, values in runs.items()}
    return render("index.md.j2", runs=rows, comparisons=comparisons)


def _headline_evaluations(run: RunRecord) -> dict[str, dict[str, Any]]:
    """Map a description of each headline evaluation (test split, best step, last step) to its metrics."""
    facts, last = run.facts, run.evaluations[-1] if run.evaluations else {}
    best, final, test = (
        {f"val/{name}": facts.get(f"{prefix}_{name}") for name in METRICS}
        for prefix in ("best", "final", "test")
    )
    best["step"] = facts.get("best_step")
    best |= next((line for line in run.evaluations if line["step"] == best["step"]), {})
    final |= last
    step, last_step = (formatted(values.get("step"), "step {:,}") or "-" for values in (best, final))
    evaluations = {f"best on the {run.evaluated_images()}, {step}": best, f"final, {last_step}": final}
    if "test_name" in facts:
        tested = {f"on the {run.evaluated_images('test')}, with the weights of {step}": test}
        return tested | evaluations
    return evaluations


def _metric_rows(evaluations: Collection[dict[str, Any]]) -> list[tuple[str, str, list[float | None]]]:
    """Return one row per metric in the format of markdown.known()."""
    titles = {name: metric.title for name, metric in METRICS.items() if metric.is_share}
    titles |= {"raw_accuracy": "accuracy without EMA"}
    titles |= {name: metric.title for name, metric in METRICS.items() if not metric.is_share}
    return [(title, "{:.4f}", each(evaluations, f"val/{name}")) for name, title in titles.items()]


def _report_rows(report: dict[str, Any]) -> dict[str, Any]:
    """Return a validate.py report with a row for each class, or only for the classes with the lowest F1."""
    classes, columns = report.get("classes", []), report.get("per_class", {})
    shown = fill_missing(report, value_types(Report)) | {"rows": [], "shown": "All classes"}
    if any(len(columns.get(name) or ()) != len(classes) for name in PER_CLASS):
        return shown
    shown_classes = list(range(len(classes)))
    if len(classes) > SHOWN:
        with_images = [label for label in shown_classes if columns["support"][label]]
        shown_classes = sorted(with_images, key=lambda label: columns["f1"][label])[:SHOWN]
        shown["shown"] = f"The {len(shown_classes)} of {len(classes)} classes with the lowest F1"
    for label in shown_classes:
        shares = (f"{columns[name][label]:{',' if name == 'support' else '.4f'}}" for name in PER_CLASS)
        shown["rows"].append([classes[label], *shares])
    return shown


def _stamps_with_changes(run: RunRecord) -> list[dict[str, Any]]:
    """Return verify.py's outcomes. An outcome is void if `changed` lists files that changed later."""
    files, outcomes = hash_compared_files(run.folder) if run.stamps else {}, []
    for stamp in run.stamps:
        # Runs from earlier versions have no starts.jsonl, so their stamps do not contain this file's hash.
        changed = [name for name in files if files[name] != stamp.get("files", {}).get(name, "")]
        outcomes.append(fill_missing(stamp, value_types(ReplayRecord)) | {"changed": some_of(changed)})
    return outcomes


def _nvidia_smi_dumps(run: RunRecord) -> Iterator[tuple[str, str, bool]]:
    """Yield each host's name, the beginning of its `nvidia-smi -q` output, and True if the output was cut."""
    for file in own_files(run.folder, "nvidia-smi-*.txt"):
        with open(file, errors="replace") as opened:
            dump = opened.read(SHOWN_CHARACTERS + 1)
        yield file.stem.removeprefix("nvidia-smi-"), dump[:SHOWN_CHARACTERS], len(dump) > SHOWN_CHARACTERS
