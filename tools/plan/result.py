"""What a trace of a training step found, and what measurements of one did."""

import json
from dataclasses import dataclass

Kernel = tuple[str, int, int]  # the type of what it writes, FLOPs, bytes read and written
Collective = tuple[str, int, int]  # its name, bytes, ranks


@dataclass
class Trace:
    """One process's optimizer step. Memory in bytes, by the images per forward."""

    strategy: str
    mixed_precision: str
    peaks: dict[int, dict[str, int]]  # MemTracker's parts at the peak, and `Total`
    parameters: int  # bytes of what this process keeps between steps
    optimizer: int  # masters under ZeRO, the optimizer's state, averages
    operations: list[Kernel]
    collectives: list[Collective]
    gradients: int = 0  # bytes of the parameters' .grad after the backward pass; ZeRO keeps them in buckets

    @classmethod
    def from_json(cls, text: str) -> "Trace":
        values = json.loads(text)
        values["peaks"] = {int(size): peak for size, peak in values["peaks"].items()}
        return cls(**values)


@dataclass(frozen=True)
class Measured:
    """A micro-batch with its optimizer step on one process that exchanges nothing."""

    forward_s: float
    backward_s: float
    optimizer_s: float
