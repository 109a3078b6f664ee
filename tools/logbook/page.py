"""Log book page of a run, and the index of all pages, as Markdown."""

import shlex
from collections.abc import Collection, Iterator
from operator import methodcaller
from typing import Any

from onecurve.flags.fields import declared_values
from onecurve.flags.recipe import METRICS
from onecurve.run.schemas import RecipeFile, ReplayRecord, Report, Result, value_types
from onecurve.system.files import files_inside
from onecurve.system.paths import public_path
from onecurve.system.text import some_of
from tools.logbook import history
from tools.logbook.markdown import code_span, formatted, render, values_of
from tools.logbook.run_record import (
    VERIFICATION_MEANING,
    RunRecord,
    fill_missing,
    flag_text,
    hash_compared_files,
    host_count,
)
from tools.logbook.spent import main_processes, paused_s, seconds_by_activity

MAX_SHOWN_CLASSES = 20  # maximum number of rows in the class table
MAX_UNFOLDED_STARTS = 20  # maximum number of starts in a table that is not folded
MAX_DUMP_CHARACTERS = 60_000  # maximum length of an nvidia-smi dump. GitHub shows at most 512 kB per page
CLASS_METRICS = ("precision", "recall", "f1", "specificity", "support")
KEYS_SET_BY_STARTS = ("strategy", "batch_size", "epochs", "processes", "device")
# Keys of result.json that the index shows
INDEX_KEYS = ["script", *KEYS_SET_BY_STARTS, "hosts", "status"]
INDEX_KEYS += ["best_accuracy", "final_accuracy", "test_accuracy", "val_name", "test_name", "wall_s"]


def run_page(run: RunRecord, page_stem: str, plot_files: list[str]) -> str:
    """Return a run's page as Markdown.

    Args:
        run: Run to show.
        page_stem: File name of the page without suffix, and name of the plot folder.
        plot_files: File names in the plot folder.
    """
    from onecurve.run.end_tables import early_end_in_words  # this import loads torch

    result_values = fill_missing(run.result_values, value_types(Result))
    recipe_file = fill_missing(run.recipe_file, value_types(RecipeFile))
    recipe_rows = {flag: [code_span(flag), history.recipe_value(run, flag)] for flag in run.recipe}
    defaults = recipe_file["defaults"] or {}
    flags_with_default = [flag for flag in recipe_rows if flag in defaults]
    changed_flags = [flag for flag in flags_with_default if not history.is_default(run, flag, defaults[flag])]
    evaluations = _headline_evaluations(run)
    memory_rows = [{"process": rank} | peaks for rank, peaks in enumerate(result_values["memory_gib"] or [])]
    return render(
        "run.md.j2",
        run=run,
        stem=page_stem,
        pictures=plot_files,
        result_values=result_values,
        recipe_file=recipe_file,
        early_end=early_end_in_words(run.result_values),
        evaluations=evaluations,
        measured=_metric_rows(evaluations.values()),
        reports={
            report_name: _report_values(report)
            for report_name, report in run.validation_reports.items()
            if report
        },
        stamps=_verifications_with_changes(run),
        meaning=VERIFICATION_MEANING,
        parts=seconds_by_activity(run),
        paused_s=paused_s(run),
        restarts=len(main_processes(run)) - 1,
        memory=memory_rows,
        dumps=_nvidia_smi_dumps(run),
        history=history,
        most_starts=MAX_UNFOLDED_STARTS,
        batch_size=run.setting_over_starts(methodcaller("get", "batch_size")),
        epochs=run.setting_over_starts(methodcaller("get", "epochs")),
        recipe=list(recipe_rows.values()),
        changed=[recipe_rows[flag] for flag in changed_flags],
        public_path=public_path,
        quote=shlex.quote,
    )


def index_values(run: RunRecord) -> dict[str, Any]:
    """Return the values that the index shows for a run. logbook.py stores these values in the run's page."""
    page_values = {"model": run.model, "data": run.data_name, "is_rehearsal": run.is_rehearsal}
    page_values |= {key: run.setting_over_starts(methodcaller("get", key)) for key in KEYS_SET_BY_STARTS}
    default_by_flag = run.recipe_file.get("defaults") or {}
    # The column `flags` omits flags that have their own column and flags that contain file locations.
    excluded_flags = {*page_values, *declared_values("locates")}
    index_flags = [flag for flag in default_by_flag if flag not in excluded_flags and flag in run.recipe]
    changed_flags = [flag for flag in index_flags if not history.is_default(run, flag, default_by_flag[flag])]
    flag_texts = [f"{flag} {public_path(flag_text(run.recipe[flag]))}" for flag in changed_flags]
    page_values |= {"flags": ", ".join(flag_texts), "hosts": run.setting_over_starts(host_count)}
    return {key: run.result_values.get(key) for key in INDEX_KEYS} | page_values


def index_page(values_by_page: dict[str, dict[str, Any]], title_by_page: dict[str, str]) -> str:
    """Return the index page as Markdown.

    Args:
        values_by_page: Result of index_values() for each run page, by the page's path.
        title_by_page: Title of each comparison page, by the page's path.
    """
    # Pages from earlier versions do not contain the key `flags`.
    runs = {page: dict.fromkeys([*INDEX_KEYS, "flags"]) | values for page, values in values_by_page.items()}
    return render("index.md.j2", runs=runs, comparisons=title_by_page)


def _headline_evaluations(run: RunRecord) -> dict[str, dict[str, Any]]:
    """Map a description of each headline evaluation (test split, best step, last step) to its metrics."""
    result_values = run.result_values
    best_values, final_values, test_values = (
        {f"val/{metric}": result_values.get(f"{prefix}_{metric}") for metric in METRICS}
        for prefix in ("best", "final", "test")
    )
    best_values["step"] = result_values.get("best_step")
    # Logged evaluations contain more metrics than result.json, such as `val/raw_accuracy`.
    best_values |= next((line for line in run.evaluations if line["step"] == best_values["step"]), {})
    final_values |= run.evaluations[-1] if run.evaluations else {}
    best_step, final_step = (
        formatted(line.get("step"), "step {:,}") or "-" for line in (best_values, final_values)
    )
    best_title = f"best on the {run.describe_evaluated_images()}, {best_step}"
    evaluations = {best_title: best_values, f"final, {final_step}": final_values}
    if "test_name" in result_values:
        test_images = run.describe_evaluated_images("test")
        return {f"on the {test_images}, with the weights of {best_step}": test_values} | evaluations
    return evaluations


def _metric_rows(evaluations: Collection[dict[str, Any]]) -> list[tuple[str, str, list[float | None]]]:
    """Return (title, format string, value in each evaluation) for each metric.

    Fractions such as the accuracy come first, then the accuracy without EMA, then other metrics such as the
    loss.
    """
    title_by_name = {name: metric.title for name, metric in METRICS.items() if metric.is_share}
    title_by_name |= {"raw_accuracy": "accuracy without EMA"}
    title_by_name |= {name: metric.title for name, metric in METRICS.items() if not metric.is_share}
    return [(title, "{:.4f}", values_of(evaluations, f"val/{name}")) for name, title in title_by_name.items()]


def _report_values(report: dict[str, Any]) -> dict[str, Any]:
    """Return a validate.py report with a row for each class, or only for the classes with the lowest F1.

    Missing values are None. A report without a value per class for each metric has no rows.
    """
    class_names, class_scores = report.get("classes", []), report.get("per_class", {})
    report_values = fill_missing(report, value_types(Report)) | {"rows": [], "shown": "All classes"}
    if any(len(class_scores.get(metric) or ()) != len(class_names) for metric in CLASS_METRICS):
        return report_values
    shown_labels = list(range(len(class_names)))
    if len(class_names) > MAX_SHOWN_CLASSES:
        labels_with_images = [label for label in shown_labels if class_scores["support"][label]]
        lowest_f1_first = sorted(labels_with_images, key=lambda label: class_scores["f1"][label])
        shown_labels = lowest_f1_first[:MAX_SHOWN_CLASSES]
        report_values["shown"] = f"The {len(shown_labels)} of {len(class_names)} classes with the lowest F1"
    for label in shown_labels:
        scores = {metric: class_scores[metric][label] for metric in CLASS_METRICS}
        # `support` is a number of images, and all other metrics are fractions.
        score_texts = (f"{score:{',' if metric == 'support' else '.4f'}}" for metric, score in scores.items())
        report_values["rows"].append([class_names[label], *score_texts])
    return report_values


def _verifications_with_changes(run: RunRecord) -> list[dict[str, Any]]:
    """Return verify.py's outcomes. An outcome is void if `changed` lists files that changed later."""
    hash_by_file = hash_compared_files(run.folder) if run.verifications else {}
    filled_verifications = []
    for verification in run.verifications:
        # Runs from earlier versions have no starts.jsonl, so their stamps do not contain this file's hash.
        verified_hashes = verification.get("files", {})
        changed_files = [file for file in hash_by_file if hash_by_file[file] != verified_hashes.get(file, "")]
        filled_verifications.append(
            fill_missing(verification, value_types(ReplayRecord)) | {"changed": some_of(changed_files)}
        )
    return filled_verifications


def _nvidia_smi_dumps(run: RunRecord) -> Iterator[tuple[str, str, bool]]:
    """Yield each host's name, the beginning of its `nvidia-smi -q` output, and True if the output was cut."""
    for dump_path in files_inside(run.folder, "nvidia-smi-*.txt"):
        with open(dump_path, errors="replace") as dump_file:
            dump = dump_file.read(MAX_DUMP_CHARACTERS + 1)  # one more character, to detect a longer file
        host_name = dump_path.stem.removeprefix("nvidia-smi-")
        is_dump_cut = len(dump) > MAX_DUMP_CHARACTERS
        yield host_name, dump[:MAX_DUMP_CHARACTERS], is_dump_cut
