"""Computes model FLOPs and model FLOPs utilisation (MFU), the used fraction of the devices' peak performance.

The definition follows arXiv 2204.02311, appendix B. An operation is an addition or a multiplication, so a
fused multiply-add consists of two operations. Operations that activation checkpointing repeats are excluded.
devices.yaml lists the peak performance of GPUs. The peak performance of CPUs is not defined.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from onecurve.system.output import log
from onecurve.system.paths import shortest

DEVICES_FILE = Path(__file__).with_name("devices.yaml")


@dataclass(frozen=True)
class DeviceSpecs:
    """Entry of devices.yaml: peaks in 10^12 FLOP/s by dtype, memory in GB, bandwidth in GB/s (10^9 bytes)."""

    name: str
    peaks: dict[str, float]
    memory_gb: float
    memory_gb_s: float
    link: str  # Connection between the GPUs on one host
    link_gb_s: float
    source: str
    network_gb_s: float = 12.5  # Network bandwidth per host in one direction


@functools.cache
def known_devices() -> tuple[DeviceSpecs, ...]:
    """Return the entries of devices.yaml."""
    import yaml

    entry_by_name = yaml.safe_load(DEVICES_FILE.read_text())
    return tuple(DeviceSpecs(device_name, **entry) for device_name, entry in entry_by_name.items())


def find_device(torch_name: str) -> DeviceSpecs | None:
    """Return the entry for a device name from torch, or None if devices.yaml does not contain the device."""
    # "Tesla V100-PCIE-16GB" matches the entry "Tesla V100-PCIE", but "NVIDIA L40" does not match "NVIDIA L4".
    device_matches = [device for device in known_devices() if f"{torch_name}-".startswith(f"{device.name}-")]
    return max(device_matches, key=lambda device: len(device.name), default=None)


def flops_per_image(build_model: Callable[[], nn.Module], image_size: int) -> float:
    """Count the operations in a forward and backward pass for one image of image_size x image_size pixels.

    `build_model` is a function that returns the model. The function runs on the meta device, so no memory is
    allocated for weights, and no operations are executed.
    """
    with torch.device("meta"):
        meta_model = build_model()
        # Two images, because BatchNorm can't train with a single value per channel
        image_batch = torch.zeros(2, 3, image_size, image_size)
    with FlopCounterMode(display=False) as flop_counter:
        meta_model(image_batch).sum().backward()
    return flop_counter.get_total_flops() / len(image_batch)


@dataclass(frozen=True)
class Utilisation:
    """Model FLOPs and peak performance from which a run's MFU is computed. result.json stores both."""

    flops_per_image: float
    peak_flops: float | None  # Sum over the devices of all processes. None if a device is unknown

    def mfu_pct(self, images_per_s: float) -> float | None:
        """Return the MFU in percent, or None if the peak performance is unknown."""
        return 100 * images_per_s * self.flops_per_image / self.peak_flops if self.peak_flops else None


def utilisation_of_run(
    build_model: Callable[[], nn.Module], image_size: int, devices: list[str], precision: str
) -> Utilisation | None:
    """Return the FLOPs and the peak performance from which a run's MFU is computed.

    The function returns None if the model's operations can't be counted.

    Args:
        build_model: Function that returns the model without initial weights.
        image_size: Edge length of the square model input, in pixels.
        devices: Device names of all processes, as torch reports them.
        precision: Value of --mixed_precision.
    """
    try:
        model_flops_per_image = flops_per_image(build_model, image_size)
    except Exception as error:  # Models may raise many types of errors
        log.info(f"the operations of the model can't be counted: {type(error).__name__}: {error}")
        return None
    return Utilisation(model_flops_per_image, total_peak_flops(devices, precision))


def total_peak_flops(device_names: list[str], precision: str) -> float | None:
    """Return the total peak performance of the devices, or log unknown GPUs and return None."""
    unique_device_names = dict.fromkeys(device_names)
    flops_by_device = {device_name: peak_flops(device_name, precision) for device_name in unique_device_names}
    if unknown_devices := [device_name for device_name, flops in flops_by_device.items() if flops is None]:
        first_unknown_device, *_ = unknown_devices
        if not first_unknown_device.startswith("CPU"):  # no CPU has an entry in devices.yaml
            log.info(
                f"the MFU is unknown, because {shortest(DEVICES_FILE)} contains no peak performance of"
                f" {', '.join(unknown_devices)} in this precision"
            )
        return None
    return sum(flops_by_device[device_name] or 0.0 for device_name in device_names)


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the peak operations per second of a device, or None if devices.yaml does not contain the device.

    Args:
        device_name: Name of the device, as torch reports it.
        precision: Value of --mixed_precision.
    """
    device_specs = find_device(device_name)
    if device_specs is None:
        return None
    fp32_format = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "fp32"
    dtype_name = fp32_format if precision == "no" else precision
    # A device without TF32 units computes in fp32 instead.
    tflops_by_dtype = {"tf32": device_specs.peaks["fp32"]} | device_specs.peaks
    return 1e12 * tflops_by_dtype[dtype_name] if dtype_name in tflops_by_dtype else None
