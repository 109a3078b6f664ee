"""The choice of mixed precision: the flag, the launcher's answer, or what the device has natively."""

import os
from collections.abc import Callable

import torch

from common.system.env import launched_with, rank


def chosen_precision(flag: str | None) -> str:
    """The flag, else the launcher's, else bf16 where the device has it natively."""
    launchers = os.environ.get("ACCELERATE_MIXED_PRECISION")
    # accelerate launch passes "no" for a DeepSpeed config that leaves the precision to the JSON's "auto".
    fields = os.environ.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")
    if launched_with("DEEPSPEED") and "mixed_precision" not in fields and launchers == "no":
        launchers = None
    wanted = flag or launchers or ("bf16" if has_native_bf16() else "no")
    remark = ""
    if not torch.cuda.is_available() and wanted == "fp16":
        remark = "fp16 is slow on a CPU; it is computed all the same, with loss scaling as on a GPU"
    elif not torch.cuda.is_available() and wanted == launchers == "bf16" and not has_native_bf16():
        remark, wanted = "bf16 is not native to this CPU: the rehearsal is in fp32", "no"
    elif (
        torch.cuda.is_available() and wanted == launchers == "bf16" and flag is None and not has_native_bf16()
    ):
        remark, wanted = "bf16 is not native to this GPU: the config's bf16 becomes fp16", "fp16"
    elif wanted == "bf16" and torch.cuda.is_available() and not has_native_bf16():
        remark = "this GPU has no native bf16 and emulates it: --mixed_precision fp16 is faster here"
    if remark and rank() == 0:
        print(remark, flush=True)
    return wanted


def has_native_bf16() -> bool:
    if torch.cuda.is_available():
        return torch.cuda.get_device_capability() >= (8, 0)
    return torch.cpu._is_avx512_bf16_supported()


def cast_inputs(kind: str) -> Callable:
    """DeepSpeed holds the weights in half precision and leaves the inputs as they are."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "no": torch.float32}[kind]
    return lambda module, inputs: tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)
