"""Names and one-line descriptions of a run, for all pages of the log book."""

from pathlib import Path
from typing import Any

from common.system.text import plural
from tools.logbook.record import RunRecord

STRATEGIES = {"single": "one process", "ddp": "DDP", "fsdp": "FSDP2"}
HALF_PRECISION = {
    "autocast": "by autocast: weights and residual stream in fp32",
    "weights": "weights and all activations",
}


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
    return f"{part:,} images of the {whole}"


def chosen(run: RunRecord) -> str | None:
    """The rule by which --max_val_images chose the images."""
    return run.about.get("val_chosen") if run.recipe.get("max_val_images") else "all"


def claim(run: RunRecord) -> str:
    """The outcome in one line of plain text."""
    facts = run.facts
    epoch = max((line["epoch"] for line in run.metrics), default=0)
    keys = [f"{which}_{measure}" for measure in ("accuracy", "loss") for which in ("test", "final")]
    found, key = f"no evaluation of {data(run)}", next((key for key in keys if key in facts), None)
    if key:
        which, _, measure = key.partition("_")
        images = evaluated_images(run, "test" if which == "test" else "val")
        found = f"reaches {measure} {facts[key]:.4f} on the {images} of {data(run)}"
        found += f" with the best weights on the {evaluated_images(run)}" if which == "test" else ""
    epochs = f"{epoch:.3g} of {plural(facts.get('epochs', '?'), 'epoch')}"
    took = f", {facts['wall_s']:,.0f} s" if "wall_s" in facts else ""
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
