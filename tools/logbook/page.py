"""A run's page in the log book, and the index of all pages, as Markdown."""

import shlex
from collections.abc import Iterator
from typing import Any

from markupsafe import Markup

from common.system.files import Kind, own_files
from common.system.paths import public_path
from common.system.text import plural, some_of
from tools.logbook import price, words
from tools.logbook.markdown import code, formatted, link, render
from tools.logbook.record import ABOUT, REPORT, RESULT, STAMP, RunRecord, stamped_files
from tools.logbook.words import as_flag, evaluated_images

SHOWN_CLASSES = 20  # rows of the table of classes
SHOWN_CHARACTERS = 60_000  # of an nvidia-smi dump: GitHub shows pages up to 512 kB


def page(run: RunRecord, stem: str, pictures: list[str], terms: price.Terms = price.NONE) -> str:
    """The page. stem: of its file, and of the folder with its pictures."""
    from common.run.finish import early_end  # imports torch

    facts, about = complete(run.facts, RESULT), complete(run.about, ABOUT)
    recipe = {name: [code(name), code(public_path(as_flag(value)))] for name, value in run.recipe.items()}
    defaults = about["defaults"] or {}
    counts = [
        f"{facts[f'{which}_images']:,} {run.unit} of the {facts[f'{which}_name'] or 'held-out'} split"
        for which in ("test", "val")
        if facts[f"{which}_images"] is not None
    ]
    return render(
        "run.md.j2",
        run=run,
        stem=stem,
        pictures=pictures,
        terms=terms,
        an_hour=price.price_per_hour(run, terms),
        facts=facts,
        about=about,
        early_end=early_end(run.facts),
        evaluations=_evaluations(run),
        counts=counts,
        flops=_flops(facts),
        reports={name: _report(report) for name, report in run.reports.items() if report},
        stamps=_stamps(run),
        memory=[{"process": rank} | found for rank, found in enumerate(facts["memory_gib"] or [])],
        dumps=_dumps(run),
        command=shlex.join(map(public_path, about["command"] or [])),
        batch=_batch(run, facts),
        versions=[f"{name} {value}" for name, value in (about["versions"] or {}).items()],
        sharding=[f"{name} {as_flag(value)}" for name, value in (about["sharding"] or {}).items()],
        recipe=list(recipe.values()),
        changed=[recipe[n] for n, value in run.recipe.items() if n in defaults and value != defaults[n]],
        folder=public_path(run.folder.resolve()),
        s3=run.recipe["s3"].rstrip("/") if isinstance(run.recipe.get("s3"), str) else "",
        has_tensorboard=(run.folder / "tensorboard").is_dir(),
        wandb=_wandb(about),
        public_path=public_path,
        quote=shlex.quote,
        price=price,
        words=words,
    )


def index(runs: dict[str, dict[str, Any]], comparisons: dict[str, str]) -> str:
    """The page of all pages. runs: the index_values of each page; comparisons: the title of each page."""
    values = {page: dict.fromkeys(words.INDEXED) | found for page, found in runs.items()}
    return render("index.md.j2", runs=values, comparisons=comparisons)


def complete(found: dict[str, Any], kinds: dict[str, Kind]) -> dict[str, Any]:
    """The values with None for each that is missing."""
    return dict.fromkeys(kinds) | found


def _evaluations(run: RunRecord) -> dict[str, dict[str, Any]]:
    """The best and the final evaluation, and that on the test split: {where it was made: its values}."""
    facts, last = run.facts, run.evaluations[-1] if run.evaluations else {}
    best = {"step": facts.get("best_step"), "val/accuracy": facts.get("best_accuracy")}
    best |= next((line for line in run.evaluations if line["step"] == best["step"]), {})
    final = {"val/accuracy": facts.get("final_accuracy"), "val/loss": facts.get("final_loss")} | last
    step, last_step = (formatted(one.get("step"), "step {:,}") or "-" for one in (best, final))
    found = {
        f"best on the {evaluated_images(run)}, {step}": best,
        f"final, {last_step}": final,
    }
    if "test_name" in facts:
        test = {f"val/{measure}": facts.get(f"test_{measure}") for measure in ("accuracy", "loss")}
        found = {f"on the {evaluated_images(run, 'test')}, weights of {step}": test} | found
    return found


def _flops(facts: dict[str, Any]) -> str | None:
    """`2.62e+10 FLOP per image: MFU 41.0 % of 990 TFLOP/s`"""
    if facts["flops_per_image"] is None:
        return None
    shown = f"{facts['flops_per_image']:,.3g} FLOP per image"
    if facts["mfu_pct"] is None or facts["peak_flops"] is None:
        return shown
    return f"{shown}: MFU {facts['mfu_pct']:.1f} % of {facts['peak_flops'] / 1e12:,.3g} TFLOP/s"


def _report(report: dict[str, Any]) -> dict[str, Any]:
    """A report of validate.py, with a row for each class; of many classes those with the lowest F1."""
    classes, columns = report.get("classes", []), report.get("per_class", {})
    names = ("precision", "recall", "f1", "specificity", "support")
    found = complete(report, REPORT) | {"rows": [], "shown": "Every class"}
    if "checkpoint" in report:
        found["checkpoint"] = public_path(report["checkpoint"])
    if any(len(columns.get(name) or ()) != len(classes) for name in names):
        return found
    order = list(range(len(classes)))
    if len(classes) > SHOWN_CLASSES:
        order = sorted(order, key=lambda i: columns["f1"][i])[:SHOWN_CLASSES]
        found["shown"] = f"The {SHOWN_CLASSES} classes of {len(classes)} with the lowest F1"
    for i in order:
        shares = (f"{columns[name][i]:.4f}" for name in names[:-1])
        found["rows"].append([classes[i], *shares, f"{columns['support'][i]:,}"])
    return found


def _stamps(run: RunRecord) -> list[dict[str, Any]]:
    """The replays by verify.py. `changed` names the files that have changed since, which makes one void."""
    files = stamped_files(run.folder) if run.stamps else {}
    return [
        complete(stamp, STAMP)
        | {"changed": some_of([n for n in files if files[n] != stamp.get("files", {}).get(n)])}
        for stamp in run.stamps
    ]


def _dumps(run: RunRecord) -> Iterator[tuple[str, str, bool]]:
    """The host, the text of nvidia-smi -q, and whether only its beginning is shown."""
    for file in own_files(run.folder, "nvidia-smi-*.txt"):
        with open(file, errors="replace") as opened:
            dump = opened.read(SHOWN_CHARACTERS + 1)
        is_cut = len(dump) > SHOWN_CHARACTERS
        yield file.stem.removeprefix("nvidia-smi-"), dump[:SHOWN_CHARACTERS], is_cut


def _batch(run: RunRecord, facts: dict[str, Any]) -> str | None:
    """`128 = 64 images x 2 processes x 1 accumulation`"""
    parts = {
        "per_device_batch_size": run.unit.removesuffix("s"),
        "processes": "process",
        "accumulation_steps": "accumulation",
    }
    if None in [facts[name] for name in ("batch_size", *parts)]:
        return facts["batch_size"] and f"{facts['batch_size']} {run.unit}"
    return f"{facts['batch_size']} = {' x '.join(plural(facts[name], word) for name, word in parts.items())}"


def _wandb(about: dict[str, Any]) -> Markup | None:
    url = about["wandb_url"] or about["wandb_id"]
    is_web = url and url.startswith(("https://", "http://"))  # and no script
    return url and (link(url, url) if is_web else code(url))
