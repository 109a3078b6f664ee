"""A run's page in the log book: Markdown, and the pictures beside it."""

import shlex
import shutil
from collections.abc import Iterator
from glob import escape
from pathlib import Path
from typing import Any

from common.run.plots import Panel, confusion_matrix, panel, panels
from common.run.result_tables import early_end
from common.system.files import own_files
from common.system.paths import public_path
from common.system.text import plural, some_of
from tools.logbook import bill
from tools.logbook import markdown as md
from tools.logbook.record import RunRecord, read_picture, stamped_files
from tools.logbook.words import (
    REHEARSAL,
    claim,
    data,
    devices,
    evaluated_images,
    mixed_precision,
    model,
    number,
    where,
)

INDEX = ["page", "model", "data", "batch", "epochs", "hosts", "processes", "accuracy", "split"]
INDEX += ["best accuracy", "time", "status", "on"]
SHOWN_CLASSES = 20  # rows of the table of classes
SHOWN_CHARACTERS = 60_000  # of an nvidia-smi dump: GitHub shows pages up to 512 kB


# --- Pictures


def draw(run: RunRecord, folder: Path) -> list[str]:
    """Draws all pictures into the folder, which is replaced. Returns the names of the files."""
    drawn = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(drawn, ignore_errors=True)
    drawn.mkdir(parents=True)
    title = f"{model(run)} on {data(run)}, {where(run)}"
    for name, rows in {"curves": _curves(run), "telemetry": _telemetry(run)}.items():
        if rows:
            panels(drawn / f"{name}.png", rows, title)
    for name, found in {"training": run.confusion, **run.reports}.items():
        if "confusion" in found:
            split = f", {found['split']} split" if "split" in found else ""
            confusion_matrix(
                drawn / f"confusion_{name}.png", found["confusion"], found["classes"], title + split
            )
        for worst in own_files(run.folder, f"validation/{escape(name)}/worst.png"):
            try:
                read_picture(worst).save(drawn / f"worst_{name}.png")
            except ValueError as error:
                run.problems.append(f"{worst.relative_to(run.folder)} {error}")
    shutil.rmtree(folder, ignore_errors=True)
    drawn.rename(folder)
    return sorted(path.name for path in folder.iterdir())


def time_unit(seconds: float) -> tuple[str, float]:
    """A readable unit for a time of so many seconds, and the unit in seconds."""
    return ("s", 1) if seconds < 600 else ("min", 60) if seconds < 10_000 else ("h", 3600)


def _curves(run: RunRecord) -> list[list[Panel]]:
    """Loss and accuracy against steps and time; learning rate and speed against steps."""
    unit, unit_s = time_unit(max((line["wall_s"] for line in run.metrics), default=0))
    time = f"time, {unit}"
    lines = [line | {time: line["wall_s"] / unit_s} for line in run.metrics]
    loss, accuracy = ("train/loss", "val/loss"), ("val/accuracy", "val/raw_accuracy")
    rows = [
        [panel(lines, "step", "loss", loss), panel(lines, time, "loss", loss)],
        [panel(lines, "step", "accuracy", accuracy), panel(lines, time, "accuracy", accuracy)],
        [
            panel(lines, "step", "learning rate", ("train/lr",)),
            panel(lines, "step", f"{run.unit}/s", ("train/images_per_s",)),
        ],
    ]
    if over_time := _hosts_over_time(run, time, unit_s):
        rows.append([over_time, panel(lines, time, f"{run.unit}/s", ("train/images_per_s",))])
    has_classes = bool(rows[1][0].curves)
    for shown in rows[0]:
        shown.is_log = not has_classes  # a regression's loss falls over several orders of magnitude
    return [row for row in rows if row[0].curves]


def _hosts_over_time(run: RunRecord, time: str, unit_s: float) -> Panel | None:
    """Hosts against time, where hosts joined or left; else None."""
    changes = run.changes
    if not changes:
        return None
    times, hosts = [0.0], [changes[0]["hosts_before"]]
    for change in changes:
        times += [change["wall_s"] / unit_s] * 2
        hosts += [hosts[-1], change["hosts"]]
    times.append(run.metrics[-1]["wall_s"] / unit_s)
    return Panel(time, "hosts", {"hosts": (times, [*hosts, hosts[-1]])}, from_zero=True)


def _telemetry(run: RunRecord) -> list[list[Panel]]:
    """Utilisation and memory over time: of the GPUs, with their power; without GPUs, of the hosts."""
    has_gpus = any(line.get("gpus") for lines in run.telemetry.values() for line in lines)
    labels = {"cpu_pct": "CPU utilisation, %", "memory_gib": "memory in use on the host, GiB"}
    if has_gpus:
        labels = {"utilisation_pct": "GPU utilisation, %", "memory_gib": "GPU memory in use, GiB"}
        labels |= {"power_w": "power, W"}
    samples = {host: list(_running(lines)) for host, lines in run.telemetry.items()}
    unit, unit_s = time_unit(max((s for found in samples.values() for s, _ in found), default=0))
    curves: dict[str, dict[str, tuple[list[float], list[float]]]] = {name: {} for name in labels}
    for host, found in samples.items():
        for seconds, line in found:
            for device in line.get("gpus", []) if has_gpus else [line]:
                curve = f"{host}, GPU {device.get('index')}" if has_gpus else host
                for name in labels:
                    if device.get(name) is not None:
                        times, values = curves[name].setdefault(curve, ([], []))
                        times.append(seconds / unit_s)
                        values.append(device[name])
    shown = [
        Panel(f"time, {unit}", label, {**curves[name]}, from_zero=True)
        for name, label in labels.items()
        if curves[name]
    ]
    return [shown] if shown else []


def _running(lines: list[dict[str, Any]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """The samples with the seconds since the first start, without the pauses before later ones."""
    seconds, before = 0.0, None
    for line in lines:
        if "host" not in line:
            seconds += 0 if before is None else line["t"] - before
            yield seconds, line
        before = line["t"]


# --- The page


def page(run: RunRecord, stem: str, pictures: list[str], terms: bill.Terms = bill.NONE) -> str:
    """The Markdown of the page. stem: of its file, and of the folder with its pictures."""
    facts = run.facts
    size = f"{facts.get('batch_size', '?')} {run.unit} a step, {plural(facts.get('epochs', '?'), 'epoch')}"
    names = {picture: picture.removesuffix(".png").replace("_", ", ") for picture in pictures}
    shown = {picture: md.picture(name, f"{stem}/{picture}") for picture, name in names.items()}
    parts = [
        f"# {md.text(facts.get('script', run.folder.name))}, {md.text(where(run))}: {md.text(size)}",
        f"**{md.text(claim(run))}.**",
        REHEARSAL if run.is_rehearsal else "",
        _status(run),
        shown.get("curves.png", ""),
        "## Result",
        _measures(run),
        _costs(run),
        shown.get("confusion_training.png", ""),
        *(_validation(name, report, shown) for name, report in run.reports.items() if report),
        _verified(run),
        bill.section(run, terms),
        "## Memory and utilisation",
        _memory(run),
        _hosts(run),
        _changes(run),
        _interruptions(run, bill.price_per_hour(run, terms)),
        shown.get("telemetry.png", ""),
        *_nvidia_smi(run),
        "## What was run",
        _command(run),
        _setup(run),
        _recipe(run),
        "## Where it is",
        _places(run),
        _problems(run),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def index_row(mark: dict[str, Any], page: str) -> list[str]:
    """The cells under INDEX. mark: of `index_values`; page: the path in the index's link."""
    return [
        md.link(page.removesuffix(".md"), page),
        md.text(mark.get("model")),
        md.text(mark.get("data")),
        number(mark.get("batch_size"), "{:,}"),
        number(mark.get("epochs"), "{:,}"),
        number(mark.get("hosts"), "{:,}"),
        number(mark.get("processes"), "{:,}"),
        *_index_accuracies(mark),
        number(mark.get("wall_s"), "{:,.0f} s"),
        md.text(mark.get("status")),
        md.text("CPU, rehearsal" if mark.get("is_rehearsal") else mark.get("device") or "-"),
    ]


def _index_accuracies(mark: dict[str, Any]) -> list[str]:
    """The headline, its split, and the best accuracy during the training."""
    final, best = (number(mark.get(f"{which}_accuracy"), "{:.4f}") for which in ("final", "best"))
    val_name = md.text(mark.get("val_name") or "-")
    if mark.get("test_accuracy") is None:
        return [final, val_name, best]
    return [number(mark["test_accuracy"], "{:.4f}"), md.text(mark.get("test_name")), f"{best} ({val_name})"]


def _status(run: RunRecord) -> str:
    facts = run.facts
    if facts["status"] == "finished":
        early = early_end(facts)
        return f"The run {md.text(early)}." if early else ""
    step = number(facts.get("steps"), "step {:,}")
    error = f": {md.text(facts['error'])}" if "error" in facts else ""
    return f"**Not finished: {md.text(facts['status'])}**{error}. Last seen at {step}."


def _measures(run: RunRecord) -> str:
    """A table of the best and the final evaluation, and of that on the test split."""
    facts, last = run.facts, run.evaluations[-1] if run.evaluations else {}
    best = {"step": facts.get("best_step"), "val/accuracy": facts.get("best_accuracy")}
    best |= next((line for line in run.evaluations if line["step"] == best["step"]), {})
    final = {"val/accuracy": facts.get("final_accuracy"), "val/loss": facts.get("final_loss")} | last
    images, step = evaluated_images(run), number(best.get("step"), "step {:,}")
    columns = {
        f"best on the {images}, {step}": best,
        f"final, {number(final.get('step'), 'step {:,}')}": final,
    }
    if "test_name" in facts:
        test = {f"val/{measure}": facts.get(f"test_{measure}") for measure in ("accuracy", "loss")}
        columns = {f"on the {evaluated_images(run, 'test')}, weights of {step}": test} | columns
    labels = {"val/accuracy": "accuracy", "val/raw_accuracy": "accuracy without EMA", "val/loss": "loss"}
    found = {label: [line.get(name) for line in columns.values()] for name, label in labels.items()}
    rows = [
        [label, *(number(value, "{:.4f}") for value in values)]
        for label, values in found.items()
        if any(value is not None for value in values)
    ]
    if not rows:
        return "No evaluation."
    counts = [
        f"{facts[f'{which}_images']:,} {run.unit} of the {facts.get(f'{which}_name', 'held-out')} split"
        for which in ("test", "val")
        if f"{which}_images" in facts
    ]
    counted = f"{' and '.join(counts)}, each counted once." if counts else ""
    return f"{md.table(['', *columns], rows)}\n\n{counted}".rstrip()


def _costs(run: RunRecord) -> str:
    facts = run.facts
    names = {
        "training time": number(facts.get("train_s"), "{:,.1f} s"),
        "whole time, imports, evaluations and saves included": number(facts.get("wall_s"), "{:,.1f} s"),
        "speed of the training": number(facts.get("images_per_s"), f"{{:,.0f}} {run.unit}/s"),
        "model FLOPs": _flops(facts),
        "energy of the GPUs": number(facts.get("energy_wh"), "{:,.1f} Wh"),
        "optimizer steps": number(facts.get("steps"), "{:,}"),
    }
    return md.table(["", ""], [row for row in names.items() if row[1] != "-"])


def _flops(facts: dict[str, Any]) -> str:
    """`26.2 GFLOP an image, 41.0 % of 989.5 TFLOP/s (MFU)`"""
    shown = number(facts.get("flops_per_image"), "{:,.3g} FLOP an image")
    if "mfu_pct" not in facts or "peak_flops" not in facts:
        return shown
    return f"{shown}: MFU {facts['mfu_pct']:.1f} % of {facts['peak_flops'] / 1e12:,.3g} TFLOP/s"


def _changes(run: RunRecord) -> str:
    """A table of the changes of hosts in an elastic run."""
    if not run.changes:
        return ""
    rows = [
        (
            number(change["step"], "{:,}"),
            number(change["wall_s"], "{:,.0f} s"),
            f"{change['hosts_before']} -> {change['hosts']}",
            f"{change['processes_before']} -> {change['processes']}",
        )
        for change in run.changes
    ]
    head = md.table(["from step", "after", "hosts", "processes"], rows)
    return f"Hosts joined and left; the training is the same up to rounding:\n\n{head}"


def _interruptions(run: RunRecord, price: float | None) -> str:
    """A table of the stops by a signal or a notice, from the signal to the first step after it."""
    if not run.interruptions:
        return ""
    rows = []
    for step, why, seconds in run.interruptions:
        cost = None if price is None or seconds is None else price * seconds / 3600
        rows.append(
            (number(step, "{:,}"), md.text(why), number(seconds, "{:,.0f} s"), number(cost, "{:,.2f}"))
        )
    lost_s = sum(seconds or 0 for *_, seconds in run.interruptions)
    whole = f"{plural(len(rows), 'interruption')}, {lost_s:,.0f} s without training"
    whole += "" if price is None else f", {price * lost_s / 3600:,.2f} at {price:g} an hour"
    return f"{whole}:\n\n{md.table(['after step', 'why', 'to the next step', 'price'], rows)}"


def _validation(name: str, report: dict[str, Any], shown: dict[str, str]) -> str:
    numbers = {
        "images": number(report.get("images"), "{:,}"),
        "top-1": number(report.get("top1"), "{:.4f}"),
        "top-5": number(report.get("top5"), "{:.4f}"),
        "loss": number(report.get("loss"), "{:.4f}"),
        "expected calibration error": number(report.get("expected_calibration_error"), "{:.4f}"),
        "speed": number(report.get("images_per_s"), "{:,.0f} images/s"),
    }
    parts = [
        f"### validate.py: {md.text(name)}",
        f"Checkpoint {md.code(public_path(report['checkpoint']))}." if "checkpoint" in report else "",
        md.table(["", ""], numbers.items()),
        _classes(report),
        shown.get(f"confusion_{name}.png", ""),
        shown.get(f"worst_{name}.png", ""),
    ]
    return "\n\n".join(part for part in parts if part)


def _classes(report: dict[str, Any]) -> str:
    """A table of the classes; of many classes those with the lowest F1."""
    classes, columns = report.get("classes", []), report.get("per_class", {})
    names = ("precision", "recall", "f1", "specificity", "support")
    if not classes or any(len(columns.get(name) or ()) != len(classes) for name in names):
        return ""
    order = list(range(len(classes)))
    summary = "Every class"
    if len(classes) > SHOWN_CLASSES:
        order = sorted(order, key=lambda i: columns["f1"][i])[:SHOWN_CLASSES]
        summary = f"The {SHOWN_CLASSES} classes of {len(classes)} with the lowest F1"
    rows = [
        [
            md.text(classes[i]),
            *(f"{columns[name][i]:.4f}" for name in names[:-1]),
            f"{columns['support'][i]:,}",
        ]
        for i in order
    ]
    return md.folded(summary, md.table(["class", *names], rows))


def _verified(run: RunRecord) -> str:
    """A table of the replays by verify.py, what they found, and what they can't show.

    A stamp is void when a file that it was given for has changed. A checkpoint may be removed.
    """
    if not run.stamps:
        return ""
    files, rows, notes = stamped_files(run.folder), [], []
    for stamp in run.stamps:
        date, findings = md.text(stamp.get("date", "-")), stamp.get("findings", [])
        changed = [name for name in files if files[name] != stamp.get("files", {}).get(name)]
        differs = f"**{plural(len(findings), 'difference')}**" if findings else "none"
        rows.append(
            (
                date,
                md.text(f"{stamp.get('config', '-')} on {stamp.get('device', '-')}"),
                f"{stamp.get('steps', 0):,} of {stamp.get('of_steps', 0):,}",
                md.text(", ".join(stamp.get("intervals", []))),
                md.text(", ".join(stamp.get("checkpoints", [])) or "-"),
                number(stamp.get("loss_difference"), "{:.1e}"),
                number(stamp.get("bound"), "{:.1e}"),
                "**void**" if changed else differs,
                md.text(stamp.get("commit") or "-"),
            )
        )
        notes += [f"- {date}: void, as {md.text(some_of(changed))} changed after it"] if changed else []
        notes += [f"- {date}: {md.text(finding)}" for finding in findings]
        notes += [f"- {date}: not verified: {md.text('; '.join(stamp.get('not_verified', [])))}"]
    head = ["date", "replayed by", "steps", "intervals", "checkpoints", "largest difference of the loss"]
    table = md.table([*head, "bound", "what differs", "commit"], rows)
    return "\n\n".join(["### verify.py: replayed steps", table, "\n".join(notes)])


def _memory(run: RunRecord) -> str:
    """A table of the memory of each process."""
    processes = run.facts.get("memory_gib", [])
    if not processes:
        return ""
    labels = {
        "peak": "resident, peak" if run.is_rehearsal else "allocated by torch, peak",
        "data": "writable",
        "reserved": "reserved by torch, peak",
        "device": "on the device",
    }
    names = [name for name in labels if any(name in process for process in processes)]
    rows = [
        [str(rank), *(number(process.get(name), "{:.2f} GiB") for name in names)]
        for rank, process in enumerate(processes)
    ]
    return md.table(["process", *(labels[name] for name in names)], rows)


def _hosts(run: RunRecord) -> str:
    """A table of each host's telemetry."""
    columns = {
        "cpu_pct": ("CPU, mean", "{:.0f} %"),
        "memory_gib": ("memory of the host, peak", "{:.1f} GiB"),
        "utilisation_pct": ("GPUs, mean", "{:.0f} %"),
        "gpu_memory_gib": ("memory of a GPU, peak", "{:.1f} GiB"),
        "power_w": ("power of a GPU, mean", "{:.0f} W"),
        "temperature_c": ("GPU temperature, peak", "{:.0f} C"),
        "sm_clock_mhz": ("SM clock, mean", "{:.0f} MHz"),
        "throttled_pct": ("throttled", "{:.0f} %"),
        "energy_wh": ("energy of the GPUs", "{:.1f} Wh"),
        "samples": ("samples", "{:,}"),
    }
    hosts = run.host_summaries()
    names = [name for name in columns if any(host.get(name) is not None for host in hosts)]
    rows = [
        [md.text(host.get("host", "unknown")), *(number(host.get(name), columns[name][1]) for name in names)]
        for host in hosts
    ]
    return md.table(["host", *(columns[name][0] for name in names)], rows) if rows else "No telemetry."


def _nvidia_smi(run: RunRecord) -> Iterator[str]:
    for file in own_files(run.folder, "nvidia-smi-*.txt"):
        with open(file, errors="replace") as text:
            dump = text.read(SHOWN_CHARACTERS + 1)
        cut = f", its first {SHOWN_CHARACTERS:,} characters" if len(dump) > SHOWN_CHARACTERS else ""
        yield md.folded(
            f"nvidia-smi -q on {file.stem.removeprefix('nvidia-smi-')}{cut}",
            md.block(dump[:SHOWN_CHARACTERS]),
        )


def _command(run: RunRecord) -> str:
    """The command as typed on the first host. Other hosts may have been started by hand."""
    words = [public_path(word) for word in run.about.get("command", [])]
    return md.block(shlex.join(words), "sh") if words else ""


def _setup(run: RunRecord) -> str:
    about, facts, sharding = run.about, run.facts, run.about.get("sharding", {})
    versions = ", ".join(f"{name} {value}" for name, value in about.get("versions", {}).items())
    batch = number(facts.get("batch_size"), f"{{}} {run.unit}")
    if {"batch_size", "per_device_batch_size", "processes", "accumulation_steps"} <= facts.keys():
        parts = {
            "per_device_batch_size": run.unit.removesuffix("s"),
            "processes": "process",
            "accumulation_steps": "accumulation",
        }
        factors = [plural(facts[name], word) for name, word in parts.items()]
        batch = f"{facts['batch_size']} = {' x '.join(factors)}"
    commit = about.get("git_commit", "")
    changed = " and uncommitted changes" if commit.endswith("+") else ""
    rows = {
        "batch": batch,
        "mixed precision": mixed_precision(facts),
        "gradients reduced in": facts.get("gradient_reduction", "-"),
        "compiled": facts.get("compile", "-"),
        "activation checkpointing": as_flag(facts.get("grad_checkpointing", "-")),
        "deterministic": as_flag(facts.get("deterministic", "-")),
        "sharding": ", ".join(f"{name} {as_flag(value)}" for name, value in sharding.items()) or "none",
        "data": public_path(facts.get("data", "-")),
        "hosts": ", ".join(about.get("hosts", [])) or "-",
        "devices": devices(run),
        "version": about.get("version", "-"),
        "commit": (commit.rstrip("+") or "-") + changed,
        "versions": versions or "-",
        "began with": public_path(about.get("resumed_from", "fresh weights")),
    }
    return md.table(["", ""], ([what, md.text(value)] for what, value in rows.items()), numbers=False)


def _recipe(run: RunRecord) -> str:
    """A table of the flags that differ from the script's defaults; all flags, folded."""
    defaults = run.about.get("defaults", {})
    rows = {name: [md.code(name), md.code(public_path(as_flag(value)))] for name, value in run.recipe.items()}
    if not rows:
        return ""
    changed = [
        rows[name] for name, value in run.recipe.items() if name in defaults and value != defaults[name]
    ]
    everything = md.folded("The whole recipe", md.table(["flag", "value"], rows.values(), numbers=False))
    if not changed:
        return everything
    table = md.table(["flag that differs from the default", "value"], changed, numbers=False)
    return f"{table}\n\n{everything}"


def as_flag(value: Any) -> str:
    """The value as it is written after a flag."""
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    return "unset" if value is None else str(value)


def _places(run: RunRecord) -> str:
    facts, about = run.facts, run.about
    s3 = run.recipe.get("s3") if isinstance(run.recipe.get("s3"), str) else None
    folder = public_path(run.folder.resolve())
    rows = [["run", md.code(folder)]]
    for what, name in (("best checkpoint", "best_checkpoint"), ("newest checkpoint", "checkpoint")):
        if name in facts:
            rows.append([what, md.code(f"{folder}/{facts[name]}")])
            if s3:
                rows.append([f"{what} in S3", md.code(f"{s3.rstrip('/')}/{facts[name]}")])
    if s3 and facts.get("uploaded") is not True:
        rows.append(["upload", "not complete"])
    if (run.folder / "tensorboard").is_dir():
        rows.append(["TensorBoard", md.code(f"tensorboard --logdir {shlex.quote(folder + '/tensorboard')}")])
    if url := about.get("wandb_url", about.get("wandb_id")):
        is_web = url.startswith(("https://", "http://"))  # and no script
        rows.append(["W&B run", md.link(url, url) if is_web else md.code(url)])
    return md.table(["", ""], rows, numbers=False)


def _problems(run: RunRecord) -> str:
    if not run.problems:
        return ""
    lines = "\n".join(f"- {md.text(problem)}" for problem in run.problems)
    return f"## Missing or broken in the run's folder\n\n{lines}"
