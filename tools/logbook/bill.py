"""What a run cost, beside what plan.py had planned, and where its time went. All of it is measured.

Prices are of all hosts together, as --price_per_hour of plan.py and of logbook.py add.
"""

import math
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from common.system.phase import ENDING, EVALUATION, READING, SAVING, STARTING, TRAINING

from common.system.files import Kind, fitting, read_json
from common.system.text import plural
from tools.logbook import markdown as md
from tools.logbook.record import RunRecord
from tools.logbook.words import memory_gib, utilisation_pct

PARTS = {
    TRAINING: "training steps",
    READING: "waiting for data, augmenting",
    EVALUATION: "evaluation",
    SAVING: "saving",
    STARTING: "starting: imports, data, model, first batch",
    ENDING: "ending: pictures, last checkpoint, upload",
}
LOST = "lost at restarts: all that came after the last checkpoint"
WHOLE = "whole"
WHOLE_PLAN = {"hours": "hours", "price": "in price"}
REST = "not recorded, by an earlier version"
LEAST = 1e-6  # smaller ones are shown with their exponent
FACTOR = 2  # differences from twice on, or down to half, are factors


PLAN_LINE: dict[str, Kind] = {
    **dict.fromkeys(("strategy", "limit"), str),
    "memory": {"*": float},  # bytes
    "images": int,
    **dict.fromkeys(("step_s", "images_per_s", "hours", "price"), float),
}
PLAN: dict[str, Kind] = {  # what plan.py writes
    **dict.fromkeys(("about", "script", "mixed_precision", "gpu"), str),
    "flags": list[str],
    **dict.fromkeys(("batch_size", "epochs", "hosts", "gpus"), int),
    "price_per_hour": float,
    "lines": [PLAN_LINE],
}
NEEDED = ("script", "batch_size", "hosts", "gpus", "lines")


@dataclass(frozen=True)
class Terms:
    """What a run's bill is made by: the flags of logbook.py add."""

    plan: dict[str, Any] = field(default_factory=dict)  # of plan_of(); empty without --plan
    price_per_hour: float | None = None  # of all hosts together


NONE = Terms()


# --- The plan's file


def plan_of(file: Path, run: RunRecord) -> dict[str, Any]:
    """What plan.py has written, with the `line` of the run's strategy in place of all `lines`.

    ValueError for a file that is no plan, or none of this script and strategy.
    """
    script = run.facts.get("script", "unknown")
    make = f"make one: python plan.py --output {file.name} ... {script}.py"
    try:
        plan, wrong = fitting(read_json(file), PLAN)
    except OSError as error:
        raise ValueError(f"--plan {file} can't be read: {error.strerror}; {make}") from None
    except ValueError as error:
        raise ValueError(f"--plan {error}; {make}") from None
    wrong += [name for name in NEEDED if name not in plan and name not in wrong]
    if wrong:
        raise ValueError(f"--plan {file} is no plan ({', '.join(wrong)} missing or wrong); {make}")
    if plan["script"] != script:
        raise ValueError(f"--plan {file} is of {plan['script']}, and {run.folder} of {script}; {make}")
    strategy = planned_strategy(run.facts.get("strategy", "unknown"), run.about.get("sharding", {}))
    lines = {line["strategy"]: line for line in plan.pop("lines") if line.get("strategy")}
    if strategy not in lines:
        raise ValueError(
            f"--plan {file} has no {strategy}, as {run.folder}, but {', '.join(lines) or 'nothing'}: make one"
            " for this number of hosts and devices"
        )
    return plan | {"line": lines[strategy]}


def planned_strategy(strategy: str, sharding: dict[str, Any]) -> str:
    """The name of a running strategy in a plan: `hybrid` is FSDP2 with replicas, `offload` ZeRO-3's.

    sharding: as recipe.json has it.
    """
    if sharding.get("replicas", 1) != 1:
        strategy = "hybrid"
    if sharding.get("offload_params"):
        return f"{strategy} with offload"
    if all(sharding.get(name, "none") == "none" for name in ("offload_optimizer", "offload_param")):
        return strategy
    return "offload" if strategy == "zero3" else f"{strategy} with offload"


# --- Time


@dataclass(frozen=True)
class Start:
    """A main process of the run, by its telemetry. before_s: the run's wall_s when it began."""

    began_at: float
    ended_at: float  # of its last sample
    before_s: float

    @property
    def ended_s(self) -> float:
        """The run's wall_s at its end."""
        return self.before_s + self.ended_at - self.began_at


def starts(run: RunRecord) -> list[Start]:
    """The main processes in their order; none without telemetry, or in runs of earlier versions."""
    found = []
    for lines in run.telemetry.values():
        headers = [i for i, line in enumerate(lines) if "host" in line]
        for first, following in pairwise([*headers, len(lines)]):
            header, last = lines[first], lines[following - 1]
            if {"before_s", "age_s"} <= header.keys():
                found.append(Start(header["t"] - header["age_s"], last["t"], header["before_s"]))
    return sorted(found, key=lambda start: start.began_at)


def lost_s(run: RunRecord) -> float:
    """Seconds of earlier processes after the checkpoint with which the next one began."""
    return sum(max(0.0, one.ended_s - following.before_s) for one, following in pairwise(starts(run)))


def paused_s(run: RunRecord) -> float:
    """Seconds between the end of a process and the start of the next one."""
    return sum(max(0.0, following.began_at - one.ended_at) for one, following in pairwise(starts(run)))


def used_s(run: RunRecord) -> float | None:
    """Seconds of all main processes, from their starts on, with what restarts have lost."""
    ends = [run.facts["wall_s"]] if "wall_s" in run.facts else [line["wall_s"] for line in run.metrics[-1:]]
    ends += [start.ended_s for start in starts(run)[-1:]]
    return max(ends) + lost_s(run) if ends else None


def parts_s(run: RunRecord) -> dict[str, float]:
    """What used_s() consists of, the largest first; empty where that is not recorded."""
    spent, whole_s = run.facts.get("spent_s"), used_s(run)
    if not spent or whole_s is None:
        return {}
    found = {PARTS.get(name, name): seconds for name, seconds in spent.items() if seconds is not None}
    found[LOST] = lost_s(run)
    rest_s = whole_s - sum(found.values())
    if rest_s > max(0.5, whole_s / 200):  # clocks differ by less
        found[REST] = rest_s
    return {name: s for name, s in sorted(found.items(), key=lambda part: -part[1]) if s > 0}


# --- Plan and bill


def planned(run: RunRecord, terms: Terms) -> dict[str, float | None]:
    """The plan's hours and price for the steps that the run has made, and its other numbers."""
    line = terms.plan.get("line", {})
    speed, memory = line.get("images_per_s"), line.get("memory")
    hours = None
    if speed and {"steps", "batch_size"} <= run.facts.keys():
        hours = run.facts["steps"] * run.facts["batch_size"] / speed / 3600
    price = terms.plan.get("price_per_hour", terms.price_per_hour if _is_same_cluster(run, terms) else None)
    tensors = [size for name, size in memory.items() if name != "context" and size] if memory else []
    return {
        "hours": hours,
        "price": None if hours is None or price is None else hours * price,
        "memory_gib": sum(tensors) / 2**30 if tensors else None,
        "images_per_s": speed,
        "step_s": line.get("step_s"),
    }


def actual(run: RunRecord, terms: Terms) -> dict[str, float | None]:
    """The same numbers of the run itself, its hours from its first process's start on."""
    whole_s, price, speed = used_s(run), price_per_hour(run, terms), run.facts.get("images_per_s")
    hours = None if whole_s is None else whole_s / 3600
    batch = run.facts.get("batch_size")
    return {
        "hours": hours,
        "price": None if hours is None or price is None else hours * price,
        "memory_gib": memory_gib(run),
        "images_per_s": speed,
        "step_s": batch / speed if batch and speed else None,
    }


def price_per_hour(run: RunRecord, terms: Terms) -> float | None:
    """The price of all hosts: the given one, else the plan's if that has as many hosts and devices."""
    if terms.price_per_hour is None and _is_same_cluster(run, terms):
        return terms.plan.get("price_per_hour")
    return terms.price_per_hour


def _is_same_cluster(run: RunRecord, terms: Terms) -> bool:
    hosts = terms.plan.get("hosts", 0)
    planned_for = hosts, hosts * terms.plan.get("gpus", 0)
    return planned_for == (run.facts.get("hosts"), run.facts.get("processes"))


# --- On the page


def section(run: RunRecord, terms: Terms) -> str:
    """Markdown; empty without a plan and a price."""
    if terms == NONE:
        return ""
    parts = ["## Plan and bill", _about(terms), _compared(run, terms), _notes(run, terms), _where(run, terms)]
    return "\n\n".join(part for part in parts if part)


def amount(value: float | None, unit: str = "") -> str:
    """The value with three significant digits at least; `-` for None."""
    if value is None or not math.isfinite(value):
        return "-"
    if 0 < abs(value) < LEAST:
        return f"{value:.2e}{unit}"
    digits = 2 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{max(0, digits)}f}{unit}"


def _about(terms: Terms) -> str:
    if not terms.plan:
        return ""
    line = terms.plan.get("line", {})
    command = " ".join([f"{terms.plan.get('script', '?')}.py", *terms.plan.get("flags", [])])
    whole = [f"{amount(line[n])} {what}" for n, what in WHOLE_PLAN.items() if line.get(n) is not None]
    ends = f", {' and '.join(whole)} to the recipe's end" if whole else ""
    strategy, limit = (md.text(line.get(name) or "?") for name in ("strategy", "limit"))
    about = md.text(terms.plan.get("about", "?"))
    return f"Planned for {about}: {strategy}, limited by {limit}, {md.code(command)}{ends}."


def _compared(run: RunRecord, terms: Terms) -> str:
    ours, theirs = actual(run, terms), planned(run, terms)
    memory = f"memory of a {'process' if run.is_rehearsal else 'device'}"
    rows = []
    for name, label, unit, scale in (
        ("hours", f"hours{_share(run)}", "", 1),
        ("price", "price", "", 1),
        ("memory_gib", memory, " GiB", 1),
        ("images_per_s", f"{run.unit}/s", "", 1),
        ("step_s", "time of a step", " ms", 1000),
    ):
        cells = [amount(value and scale * value, unit) for value in (theirs[name], ours[name])]
        if terms.plan:
            rows.append([md.text(label), *cells, _difference(theirs[name], ours[name])])
        elif ours[name] is not None:
            rows.append([md.text(label), cells[1]])
    return md.table(["", "planned", "actual", "difference"] if terms.plan else ["", "actual"], rows)


def _difference(plan: float | None, ours: float | None) -> str:
    if not plan or not ours:
        return "-"
    ratio = ours / plan
    is_factor = ratio >= FACTOR or ratio <= 1 / FACTOR
    return f"x {amount(ratio)}" if is_factor else f"{100 * (ratio - 1):+.1f} %"


def _share(run: RunRecord) -> str:
    """`, for 40 steps, 10.3% of the recipe`; empty for a whole run."""
    steps, epochs = run.facts.get("steps"), run.facts.get("epochs")
    epoch = max((line["epoch"] for line in run.metrics), default=0)
    if not steps or not epochs or epoch >= epochs:
        return ""
    return f", for {plural(f'{steps:,}', 'step')}, {epoch / epochs:.1%} of the recipe"


def _notes(run: RunRecord, terms: Terms) -> str:
    price = price_per_hour(run, terms)
    lines = []
    if terms.plan:
        lines.append("The plan's hours are of training steps alone, the actual ones of all parts below.")
    if price is not None:
        lines.append(f"The price: {price:g} an hour for all hosts together.")
    if price is not None and run.changes:
        lines.append("It counts all hosts all the time, also those that were away.")
    if terms.plan and run.is_rehearsal:
        lines.append(
            "Memory on a CPU: the plan counts tensors, the run a process's resident memory at its peak, with"
            " Python and its libraries."
        )
    elif terms.plan:
        lines.append("Memory: tensors at the peak, without CUDA's context.")
    return " ".join(lines)


def _where(run: RunRecord, terms: Terms) -> str:
    """A table of the parts of the run's time, and a line on its pauses."""
    parts, price = parts_s(run), price_per_hour(run, terms)
    head, hours = "### Where the time went", planned(run, terms)["hours"]
    if not parts:
        return f"{head}\n\nNot known: a process records it when it ends."
    whole_s, of_steps = sum(parts.values()), amount(hours and 3600 * hours, " s")
    rows = []
    for name, seconds in [*parts.items(), (WHOLE, whole_s)]:
        row = [md.text(name), f"{seconds:,.1f} s", f"{seconds / whole_s:.1%}"]
        row += [amount(seconds / 3600 * price)] if price is not None else []
        if terms.plan:
            row.append(of_steps if name in (PARTS[TRAINING], WHOLE) else "-")
        rows.append(row)
    columns = ["", "time", "share"] + (["price"] if price is not None else [])
    table = md.table(columns + (["planned"] if terms.plan else []), rows)
    return f"{head}\n\nBy the clock of the main process.\n\n{table}\n\n{_telemetry(run)}".rstrip()


def _telemetry(run: RunRecord) -> str:
    """How busy the devices were, and the pauses between processes."""
    said = []
    busy, kind = utilisation_pct(run)
    if busy is not None:
        said.append(f"Mean utilisation: {busy:.0f} % of the {kind}s.")
    throttled = [host["throttled_pct"] for host in run.host_summaries() if host.get("throttled_pct")]
    if throttled:
        said.append(f"Throttled in up to {max(throttled):.0f} % of the samples of a host.")
    if (pause_s := paused_s(run)) >= 1:
        restarts = len(starts(run)) - 1
        said.append(f"Not counted: {pause_s:,.0f} s without a process, at {plural(restarts, 'restart')}.")
    return " ".join(said)
