"""A strategy's line in plan.py's table, and what is chosen among the lines."""

from collections.abc import Sequence
from dataclasses import dataclass

from tools.plan.cost import CONTEXT_BYTES, LAUNCHES, Trace

ALIKE = 1.05  # times as long: more than the estimates can tell apart
HEAD = ("strategy", "GiB", "images", "largest", "link MB", "net MB", "step ms", "images/s", "eff.", "hours")
ROW = "{:<9}{:>7}{:>8}{:>9}{:>9}{:>8}{:>10}{:>10}{:>6}{:>9}{:>9}  {}"


@dataclass(frozen=True)
class Line:
    """A strategy's line. Bytes are of a device; images is per forward on a device."""

    strategy: str
    config_file: str
    memory: dict[str, int]
    images: int  # 0: not even a few fit
    largest: int
    limit: str
    link_bytes: float = 0
    network_bytes: float = 0
    step_s: float | None = None  # of an optimizer step with all its accumulations; None: not estimated
    images_per_s: float | None = None
    efficiency: float | None = None  # images/s of a device, as a share of a single one's
    hours: float | None = None  # to the recipe's end; None where the number of images is not known
    price: float | None = None

    def __str__(self) -> str:
        total = sum(self.memory.values()) / 2**30
        cells = [self.strategy, f"{total:.2f}", self.images or "-", f"{self.largest:,}"]
        cells += [_shown(self.link_bytes / 1e6), _shown(self.network_bytes / 1e6)]
        cells += [_shown(self.step_s and self.step_s * 1e3, 1), _shown(self.images_per_s)]
        cells += [_shown(n, 2) for n in (self.efficiency, self.hours, self.price)]
        return ROW.format(*cells, self.limit)


def _shown(number: float | None, digits: int = 0) -> str:
    return "-" if number is None else f"{number:,.{digits}f}"


def title() -> str:
    return ROW.format(*HEAD, "price", "limited by")


def best_of(lines: Sequence[Line], processes: int) -> tuple[Line | None, list[Line]]:
    """The fastest line that fits, of those within ALIKE of it the simplest; and the others to choose from."""
    candidates = [line for line in lines if line.strategy != "single" or processes == 1]
    if not (fitting := [line for line in candidates if line.images]):
        return None, candidates
    fastest = max(line.images_per_s or 0 for line in fitting)
    # The table begins with what shards least: of equally fast ones the simplest.
    best = next(line for line in fitting if (line.images_per_s or 0) >= fastest / ALIKE)
    if best.limit == LAUNCHES:  # engines launch differently, which the estimate does not tell apart
        best = next(line for line in fitting if line.limit == LAUNCHES)
    return best, [line for line in candidates if line is not best]


def reason(line: Line, best: Line) -> str:
    """Why the best line is taken instead of this one."""
    if not line.images:
        return f"at most {line.largest} images fit"
    if not line.images_per_s or not best.images_per_s:
        return "its optimizer steps on the CPU, which is slower; the time is not estimated"
    return f"{best.images_per_s / line.images_per_s:.2f} times as long"


def command(best: Line, hosts: int, gpus: int, script: Sequence[str]) -> list[str]:
    """The words that start the training. script: the script and its flags."""
    launcher = ["accelerate", "launch"] if hosts == 1 else ["python", "launch.py", "--hostfile", "hostfile"]
    words = [*launcher, "--config_file", best.config_file]
    if hosts == 1:
        words += ["--num_processes", str(gpus)]
    return [*words, *script, "--per_device_batch_size", str(best.images)]


def memory_of(strategy: str, trace: Trace) -> dict[str, int]:
    """The parts of a device's memory at the peak of a step, in bytes.

    MemTracker does not know DDP's gradients, which are views of its buckets: they count as gradients, too.
    """
    peak = next(iter(trace.peaks.values()))  # of the planned size
    optimizer = min(trace.optimizer, peak["Total"] - trace.parameters)
    rest = peak["Total"] - trace.parameters - optimizer
    activations = min(peak.get("Activation", 0), rest)
    buffers = min(peak.get("Buffer", 0), rest - activations)
    rest -= activations + buffers
    gradients = min(peak.get("Gradient", 0) or trace.gradients, rest)
    return {
        "parameters": trace.parameters,
        "optimizer": 0 if strategy == "offload" else optimizer,
        "activations": activations,
        "buffers": buffers,
        "gradients": gradients,
        "buckets_temporaries": rest - gradients,
        "context": CONTEXT_BYTES,
    }
