"""The cost of a run, beside what plan.py had planned, and where its time went. All of it is measured.

Prices are of all hosts together, as --price_per_hour of plan.py and of logbook.py add.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from common.system.phase import ENDING, EVALUATION, READING, SAVING, STARTING, TRAINING
from common.system.text import plural
from tools.logbook.markdown import amount
from tools.logbook.record import KINDS, RunRecord, complete, read_output

PARTS = {
    TRAINING: "training steps",
    READING: "waiting for data, augmenting",
    EVALUATION: "evaluation",
    SAVING: "saving",
    STARTING: "starting: imports, data, model, first batch",
    ENDING: "ending: pictures, last checkpoint, upload",
}
LOST = "lost at restarts: work after the last checkpoint"
FACTOR = 2  # differences from twice on, or down to half, are factors


@dataclass(frozen=True)
class Terms:
    """What a run's cost is computed from: the flags of logbook.py add."""

    plan: dict[str, Any] = field(default_factory=dict)  # of plan_of(); empty without --plan
    price_per_hour: float | None = None  # of all hosts together


NONE = Terms()


def plan_of(file: Path, run: RunRecord) -> dict[str, Any]:
    """What plan.py has written, with the `line` of the run's strategy in place of all `lines`.

    ValueError for a file that is no plan, or none of this script and strategy.
    """
    make = f"make one: python plan.py --output {file.name} ... {run.script}.py"
    try:
        plan = read_output(file, "plan", ("script", "hosts", "gpus", "lines"))
    except ValueError as error:
        raise ValueError(f"--plan {error}; {make}") from None
    if plan["script"] != run.script:
        raise ValueError(f"--plan {file} is for {plan['script']}, but {run.folder} ran {run.script}; {make}")
    strategy = planned_strategy(run.facts.get("strategy", "unknown"), run.about.get("sharding", {}))
    lines = {line["strategy"]: line for line in plan.pop("lines") if line.get("strategy")}
    if strategy not in lines:
        raise ValueError(
            f"--plan {file} plans {', '.join(lines) or 'nothing'}, not {strategy}, which {run.folder} used:"
            " make one for this number of hosts and devices"
        )
    return complete(plan, KINDS["plan"]) | {"line": complete(lines[strategy], KINDS["plan"]["lines"][0])}


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
    return {name: s for name, s in sorted(found.items(), key=lambda part: -part[1]) if s > 0}


# --- Planned and actual


def planned(run: RunRecord, terms: Terms) -> dict[str, float | None]:
    """The plan's hours and cost for the steps that the run has made, and its other numbers."""
    line = terms.plan.get("line") or dict.fromkeys(KINDS["plan"]["lines"][0])
    speed, memory = line["images_per_s"], line["memory"] or {}
    hours = None
    if speed and {"steps", "batch_size"} <= run.facts.keys():
        hours = run.facts["steps"] * run.facts["batch_size"] / speed / 3600
    an_hour = terms.plan.get("price_per_hour")
    if an_hour is None and _is_same_cluster(run, terms):
        an_hour = terms.price_per_hour
    tensors = [size for name, size in memory.items() if name != "context" and size]
    return {
        "hours": hours,
        "cost": None if hours is None or an_hour is None else hours * an_hour,
        "memory_gib": sum(tensors) / 2**30 if tensors else None,
        "images_per_s": speed,
        "step_s": line["step_s"],
    }


def actual(run: RunRecord, terms: Terms) -> dict[str, float | None]:
    """The same numbers of the run itself, its hours from its first process's start on."""
    whole_s, an_hour, speed = used_s(run), price_per_hour(run, terms), run.facts.get("images_per_s")
    hours = None if whole_s is None else whole_s / 3600
    batch = run.facts.get("batch_size")
    return {
        "hours": hours,
        "cost": None if hours is None or an_hour is None else hours * an_hour,
        "memory_gib": run.memory_gib,
        "images_per_s": speed,
        "step_s": batch / speed if batch and speed else None,
    }


def price_per_hour(run: RunRecord, terms: Terms) -> float | None:
    """The price of all hosts: the given one, else the plan's if that has as many hosts and devices."""
    if terms.price_per_hour is None and _is_same_cluster(run, terms):
        return terms.plan.get("price_per_hour")
    return terms.price_per_hour


def _is_same_cluster(run: RunRecord, terms: Terms) -> bool:
    hosts, gpus = terms.plan.get("hosts", 0), terms.plan.get("gpus", 0)
    return (hosts, hosts * gpus) == (run.facts.get("hosts"), run.facts.get("processes"))


# --- In words


def difference(plan: float | None, ours: float | None) -> str | None:
    if not plan or not ours:
        return None
    ratio = ours / plan
    return f"{100 * (ratio - 1):+.1f} %" if 1 / FACTOR < ratio < FACTOR else f"x {amount(ratio)}"


def share(run: RunRecord) -> str:
    """`, for 40 steps, 10.3% of the recipe`; empty for a whole run."""
    steps, epochs = run.facts.get("steps"), run.facts.get("epochs")
    if not steps or not epochs or run.epoch >= epochs:
        return ""
    return f", for {plural(f'{steps:,}', 'step')}, {run.epoch / epochs:.1%} of the recipe"
