"""Names and one-line descriptions of a run, for all pages of the log book."""

from pathlib import Path
from typing import Any

from common.system.text import plural
from tools.logbook.record import RunRecord

FIRST = "the first"  # how older runs chose the images of the split that they evaluated
STRATEGIES = {"single": "one process", "ddp": "DDP", "fsdp": "FSDP2"}
HALF_PRECISION = {
    "autocast": "by autocast: weights and residual stream in fp32",
    "weights": "weights and all activations",
}


def number(value: float | None, form: str = "{:,.1f}") -> str:
    """The formatted value; `-` for None. form: as `{:,.1f} s`."""
    return "-" if value is None else form.format(value)


def as_flag(value: Any) -> str:
    """The value as it is written after a flag."""
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    return "unset" if value is None else str(value)


def devices(run: RunRecord) -> str:
    """`2 x NVIDIA T4`; of several kinds `1 x A, 1 x B`."""
    names = run.about.get("devices")
    if not names:
        return f"{run.facts.get('processes', '?')} x {run.facts.get('device', 'unknown device')}"
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def where(run: RunRecord) -> str:
    """`DDP on 2 x NVIDIA T4`"""
    strategy, hosts = run.facts.get("strategy", "unknown strategy"), run.facts.get("hosts", 1)
    shown = STRATEGIES.get(strategy, strategy.replace("zero", "ZeRO-"))
    return f"{shown} on {devices(run)}" + (f", {hosts} hosts" if hosts > 1 else "")


def mixed_precision(facts: dict[str, Any]) -> str:
    """`bf16, by autocast: weights and residual stream in fp32`"""
    kind, how = facts.get("mixed_precision", "-"), HALF_PRECISION.get(facts.get("half_precision", ""))
    return f"{kind}, {how}" if how else kind


def model(run: RunRecord) -> str:
    """The recipe's model, or without one the script's name."""
    return str(run.recipe.get("model") or run.facts.get("script", "unknown script"))


def data(run: RunRecord) -> str:
    return Path(run.facts.get("data", "unknown data")).name


def evaluated_images(run: RunRecord, which: str = "val") -> str:
    """The images that the run was evaluated on: during the training ("val"), or at its end ("test")."""
    name = run.facts.get(f"{which}_name")
    whole = f"{name} split" if name else "held-out images"
    part = run.recipe.get("max_val_images")
    if not isinstance(part, int):
        return whole
    first = "first " if chosen(run) == FIRST else ""
    return f"{first}{part:,} images of the {whole}"


def chosen(run: RunRecord) -> str:
    """The rule by which --max_val_images chose the images. Older runs record none: they took the first."""
    return run.about.get("val_chosen", FIRST) if run.recipe.get("max_val_images") else "all"


def claim(run: RunRecord) -> str:
    """The outcome in one line of plain text."""
    facts = run.facts
    epoch = max((line["epoch"] for line in run.metrics), default=0)
    found = f"no evaluation of {data(run)}"
    for measure in ("accuracy", "loss"):
        if f"test_{measure}" in facts:
            found = f"reaches {measure} {facts[f'test_{measure}']:.4f} on the {evaluated_images(run, 'test')}"
            found += f" of {data(run)} with the best weights on the {evaluated_images(run)}"
            break
        if f"final_{measure}" in facts:
            found = f"reaches {measure} {facts[f'final_{measure}']:.4f} on the {evaluated_images(run)}"
            found += f" of {data(run)}"
            break
    epochs = f"{epoch:.3g} of {plural(facts.get('epochs', '?'), 'epoch')}"
    took = number(facts.get("wall_s"), ", {:,.0f} s") if "wall_s" in facts else ""
    return f"{model(run)} {found} in {epochs}{took}, {where(run)}"


def memory_gib(run: RunRecord) -> float | None:
    """The largest peak of any process."""
    return max((process.get("peak") or 0 for process in run.facts.get("memory_gib", [])), default=None)


def utilisation_pct(run: RunRecord) -> tuple[float | None, str]:
    """The mean over all GPUs, or without GPUs over the hosts' processors; and `GPU` or `CPU`."""
    hosts = run.host_summaries()
    for name, weight, kind in (("utilisation_pct", "gpus", "GPU"), ("cpu_pct", "samples", "CPU")):
        known = [(host[name], host.get(weight) or 1) for host in hosts if host.get(name) is not None]
        if known:
            return sum(value * w for value, w in known) / sum(w for _, w in known), kind
    return None, "device"


INDEXED = ["script", "strategy", "batch_size", "epochs", "hosts", "processes", "status", "device"]
INDEXED += ["best_accuracy", "final_accuracy", "test_accuracy", "val_name", "test_name", "wall_s"]


def index_values(run: RunRecord) -> dict[str, Any]:
    """The values of a run that the index shows."""
    found = {"model": model(run), "data": data(run), "is_rehearsal": run.is_rehearsal}
    return {name: run.facts.get(name) for name in INDEXED} | found
