"""Model FLOPs and their utilisation (MFU): the share of the devices' peak that the model's own operations
take (arXiv 2204.02311, appendix B).

An operation is one addition or multiplication, so that a fused one counts twice. What activation
checkpointing computes again does not count. A GPU's peak stands in devices.yaml; a CPU has none.
"""

import copy
import dataclasses
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from onecurve.flags.fields import flags_where, switched_off
from onecurve.flags.recipe import ImageRecipe, Recipe
from onecurve.system.output import log
from onecurve.system.paths import shortest

TABLE = Path(__file__).with_name("devices.yaml")


@dataclass(frozen=True)
class Device:
    """A row of devices.yaml: peaks in 10^12 FLOP/s by type, memory and links in 10^9 bytes (a second)."""

    name: str
    peaks: dict[str, float]
    memory_gb: float
    memory_gb_s: float
    link: str
    link_gb_s: float
    source: str
    network_gb_s: float = 12.5  # of a host, in one direction


@functools.cache
def known_devices() -> tuple[Device, ...]:
    import yaml

    return tuple(Device(name, **row) for name, row in yaml.safe_load(TABLE.read_text()).items())


def find_device(name: str) -> Device | None:
    """The row of the device that torch calls so; None for a device that is not in the table."""
    rows = (device for device in known_devices() if f"{name}-".startswith(f"{device.name}-"))
    return max(rows, key=lambda device: len(device.name), default=None)


def flops_per_image(build: Callable[[], nn.Module], size: int) -> float:
    """Operations of a forward and a backward pass for one image of size x size, counted on no device.

    build(): the model. Under torch.device("meta") it has no weights.
    """
    with torch.device("meta"):
        model, images = build(), torch.zeros(2, 3, size, size)
    with FlopCounterMode(display=False) as counter:
        model(images).sum().backward()
    return counter.get_total_flops() / len(images)


@dataclass(frozen=True)
class Utilisation:
    """What the MFU of a training is computed from, as result.json has it."""

    flops_per_image: float
    peak_flops: float | None  # of all processes' devices; None where one is not known

    def pct(self, images_per_s: float) -> float | None:
        """The share of the peak; None where that is not known."""
        return 100 * images_per_s * self.flops_per_image / self.peak_flops if self.peak_flops else None


def utilisation(recipe: Recipe, classes: int, devices: list[str], precision: str) -> Utilisation | None:
    """That of the running train script's model. None without images or build_model, or if the image size
    changes in training.

    devices: of all processes, as torch names them.
    """
    build: Any = getattr(sys.modules["__main__"], "build_model", None)
    if build is None or recipe.train_sizes or not isinstance(recipe, ImageRecipe):
        return None
    fresh = copy.copy(recipe)  # replace() would refuse --freeze without weights
    choosing = flags_where(type(recipe), "initial_weights")
    for field in dataclasses.fields(recipe):
        if field.name in choosing:
            object.__setattr__(fresh, field.name, switched_off(field))
    try:
        counted = flops_per_image(partial(build, fresh, classes), recipe.image_size)
    except Exception as error:  # a model may raise many kinds
        log.info(f"the model's operations can't be counted: {type(error).__name__}: {error}")
        return None
    return Utilisation(counted, total_peak(devices, precision))


def total_peak(devices: list[str], precision: str) -> float | None:
    """The sum of the devices' peaks; None where one is not known, which is printed for GPUs."""
    peaks = {name: peak_flops(name, precision) for name in dict.fromkeys(devices)}
    if unknown := [name for name, peak in peaks.items() if peak is None]:
        if not unknown[0].startswith("CPU"):
            log.info(f"no MFU: {', '.join(unknown)} is not in {shortest(TABLE)}, or not in this precision")
        return None
    return sum(peaks[name] or 0.0 for name in devices)


def peak_flops(name: str, precision: str) -> float | None:
    """Operations a second of a device at its best; None where the table does not have it.

    name: as torch has it. precision: of --mixed_precision.
    """
    device = find_device(name)
    fp32 = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "fp32"
    kind = fp32 if precision == "no" else precision
    # A device without units for TF32 computes it as fp32.
    peaks = {} if device is None else {"tf32": device.peaks["fp32"]} | device.peaks
    return 1e12 * peaks[kind] if kind in peaks else None
