"""Images a second, launches of a step, the GPU's busy share and MFU, eager and compiled; data beside them.

MFU is the model's own floating-point operations (torch's counter, forward and backward) in a second, divided
by what a large bf16 product reaches on this device.
"""

import json
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.ceilings import product_flops
from benchmarks.gpu.rows import (
    END_TO_END,
    Result,
    Row,
    Setting,
    Skip,
    judged,
    need_gpu,
    small_images,
    succeeds,
)
from common.recipe import parse
from common.script import load_script, recipe_class
from common.system.paths import ROOT
from common.telemetry import flops


@dataclass(frozen=True)
class Case:
    """A script, its flags, and the goals on one H200: images/s, and MFU in percent."""

    script: str
    flags: tuple[Any, ...]
    images_per_s: float | None = None
    mfu_pct: float | None = None


VIT_S = ("--model", "vit_small_patch16_224", "--randaug_layers", 2, "--batch_size", 256)
CASES = {
    "CNN-A, batch 128": Case("train_cnn_a", ("--batch_size", 128)),
    "CNN-A, batch 512": Case("train_cnn_a", ("--batch_size", 512), images_per_s=1e6),
    "ResNet-18, batch 128": Case("train_cnn_b", ("--batch_size", 128)),
    "vit ViT-B/32 at 224, batch 512": Case("train_vit", ("--batch_size", 512), mfu_pct=45),
    "vit ViT-S/16 at 224, RandAugment, batch 256": Case("train_vit", VIT_S, images_per_s=8000),
}
MODES = {"eager": "no", "compiled": "default", "reduce-overhead": "reduce-overhead"}


def rows() -> dict[str, Row]:
    found: dict[str, Row] = {}
    for name, case in CASES.items():
        for mode, value in MODES.items():
            found[f"{name}, {mode}"] = speed(case, value)
        found[f"{name}, data / resident"] = end_to_end(case)
        found[f"{name}, launches and busy share"] = profiled(case)
    return found


def speed(case: Case, mode: str) -> Row:
    def row(setting: Setting) -> Result:
        if setting.dry_run and mode != "no":
            raise Skip("takes minutes on a CPU")
        images_per_s = probe(setting, case, "speed", "--compile", mode)["images_per_s"]
        mfu_pct = 100 * images_per_s * flops_per_image(setting, case) / product_flops(setting, torch.bfloat16)
        value, note = round(images_per_s), f"MFU {mfu_pct:.1f} %"
        if setting.dry_run or mode == "no" or not (case.images_per_s or case.mfu_pct):
            return Result(value, "images/s", note=note)
        if case.images_per_s:
            return judged(value, "images/s", case.images_per_s, note)
        assert case.mfu_pct
        return judged(round(mfu_pct, 1), "% MFU", case.mfu_pct, f"{value:,} images/s")

    return row


def end_to_end(case: Case) -> Row:
    eager = ["--compile", "no"]

    def row(setting: Setting) -> Result:
        fed, alone = (
            probe(setting, case, "speed", *words)["images_per_s"] for words in (eager, [*eager, "--resident"])
        )
        share = round(fed / alone, 3)
        return Result(share) if setting.dry_run else judged(share, "", END_TO_END)

    return row


def profiled(case: Case) -> Row:
    def row(setting: Setting) -> Result:
        need_gpu(setting)
        found = probe(setting, case, "profile")
        return Result(round(found["launches"]), "launches", note=f"busy {100 * found['busy_share']:.0f} %")

    return row


_probed: dict[tuple[Case, str, tuple[Any, ...]], dict[str, Any]] = {}


def probe(setting: Setting, case: Case, what: str, *flags: Any) -> dict[str, Any]:
    """flags: the probe's --resident, and those of the script. What was probed already is not probed again."""
    if (key := (case, what, flags)) in _probed:
        return _probed[key]
    own = [flag for flag in flags if flag == "--resident"]
    words = [
        "-m",
        "benchmarks.gpu.probe",
        what,
        "--steps",
        setting.size(100, 3),
        *own,
        *script_words(setting, case),
    ]
    folder = setting.folder / f"run_{len(list(setting.folder.glob('run_*')))}"
    words += [flag for flag in flags if flag != "--resident"]
    words += ["--output_dir", folder, "--trackers", "none", "--log_every", 1000, "--epochs", 100]
    words += ["--checkpoint_every", 10**9, "--cache_dir", setting.folder.parent / "cache"]
    _probed[key] = json.loads(succeeds(setting, words).splitlines()[-1])
    return _probed[key]


def script_words(setting: Setting, case: Case) -> list[Any]:
    small = small_images(setting, case.script)
    return small if setting.dry_run else [*small, *case.flags]


def flops_per_image(setting: Setting, case: Case) -> float:
    """Floating-point operations of a forward and a backward pass for one image, counted on no device."""
    script = load_script(ROOT / f"{case.script}.py")
    recipe = parse(recipe_class(script), list(map(str, script_words(setting, case)[1:])))
    return flops.flops_per_image(lambda: script.build_model(recipe, 10), recipe.image_size)
