"""Images a second, launches of a step, the GPU's busy share, MFU and waits, one process a case.

MFU is the model's own floating-point operations (torch's counter, forward and backward) in a second, divided
by what a large bf16 product reaches on this device, and by the peak of its data sheet. Expected are estimates
for one H100.
"""

import json
import shutil
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.gpu.inputs import photographs
from benchmarks.gpu.rows import (
    END_TO_END,
    FAIL,
    OK,
    Result,
    Row,
    Setting,
    Skip,
    run_flags,
    small_images,
    succeeds,
)


@dataclass(frozen=True)
class Case:
    """A script, its flags, the images/s and launches that are expected, and the goals on one H200."""

    script: str
    flags: tuple[Any, ...]
    expected: float
    launches: float | None = None
    images_per_s: float | None = None
    mfu_pct: float | None = None
    large: bool = False  # images of 224 pixels, which are augmented as they are


VIT_S = ("--model", "vit_small_patch16_224", "--randaug_layers", 2, "--batch_size", 256)
VIT_B = Case("train_vit", ("--batch_size", 512), 10_000, 800)
RESNET = Case("train_cnn_b", ("--batch_size", 512), 52_000, 320)
CNN_A = Case("train_cnn_a", ("--batch_size", 512), 475_000, 76)
SMALL_VIT = Case("train_vit", VIT_S, 6_000, 1450, large=True)
CASES = {
    "vit ViT-B/32 at 224, batch 512": VIT_B,
    "ResNet-18, batch 512": RESNET,
    "CNN-A, batch 512": CNN_A,
    "vit ViT-S/16 at 224, RandAugment, batch 256": SMALL_VIT,
}
# Other flags of these cases: each is a row beside the eager one.
VARIANTS = {
    "vit ViT-B/32, compiled": (replace(VIT_B, expected=16_500, mfu_pct=45), ("--compile", "default")),
    "ResNet-18, compiled": (replace(RESNET, expected=75_000), ("--compile", "default")),
    "CNN-A, step graph": (replace(CNN_A, expected=1_200_000, images_per_s=1e6), ("--step_graph",)),
    "ResNet-18, step graph": (replace(RESNET, expected=60_000), ("--step_graph",)),
    "CNN-A, reduce-overhead": (replace(CNN_A, expected=900_000), ("--compile", "reduce-overhead")),
    "vit ViT-S/16, compiled": (
        replace(SMALL_VIT, expected=8_000, images_per_s=8_000),
        ("--compile", "default"),
    ),
}


def rows() -> dict[str, Row]:
    return {name: eager(case) for name, case in CASES.items()}


def variants() -> dict[str, Row]:
    return {name: variant(*words) for name, words in VARIANTS.items()}


def eager(case: Case) -> Row:
    def row(setting: Setting) -> dict[str, Result]:
        found = probe(setting, case, "fed,resident,profile,waits", "--compile", "no")
        profile, waits = found["profile"], found["waits"]
        share = round(found["fed"]["images_per_s"] / found["resident"]["images_per_s"], 3)
        busy = f"busy {100 * profile['busy_share']:.0f} %"
        places = ", ".join(f"{place} {count}" for place, count in waits["places"].items())
        judged = setting.judge(share >= END_TO_END)
        return {
            "eager": speed(setting, case, found),
            "data / resident": Result(share, "", f"at least {END_TO_END}", judged),
            "launches": Result(
                round(profile["launches"]),
                "a step",
                case.launches,
                note=busy,
                kernels=tuple(map(tuple, profile["kernels"])),
            ),
            "waits": Result(waits["waits"], "a step", 0, FAIL if waits["waits"] else OK, places),
        }

    return row


def variant(case: Case, flags: tuple[str, ...]) -> Row:
    def row(setting: Setting) -> Result:
        if setting.is_small and "--compile" in flags:
            raise Skip("takes minutes on a CPU")
        return speed(setting, case, probe(setting, case, "fed", *flags))

    return row


def speed(setting: Setting, case: Case, found: dict[str, Any]) -> Result:
    fed = found["fed"]
    value = round(fed["images_per_s"])
    flops = 100 * value * found["flops_per_image"]
    mfu_pct = flops / found["product"]
    sheet = f", {flops / found['sheet']:.1f} % of the data sheet" if found["sheet"] else ""
    note = f"MFU {mfu_pct:.1f} % of a measured product{sheet}; spread {100 * fed['spread']:.0f} %"
    for goal, reached in ((case.images_per_s, value), (case.mfu_pct, mfu_pct)):
        if goal:
            note += f"; goal {goal:,g}{' % MFU' if goal is case.mfu_pct else ''}"
            return Result(value, "images/s", case.expected, setting.judge(reached >= goal), note)
    return Result(value, "images/s", case.expected, note=note)


def probe(setting: Setting, case: Case, what: str, *flags: Any) -> dict[str, Any]:
    """What benchmarks.gpu.probe finds. No telemetry, no line of the log and no checkpoint disturbs it."""
    words = ["-m", "benchmarks.gpu.probe", what, "--seconds", setting.size(2, 0.2)]
    words += ["--steps", setting.size(20, 3), *script_words(setting, case), *flags]
    folder = setting.folder / "run"
    words += [*run_flags(setting, folder, words), "--telemetry_s", 0]
    words += ["--log_every", 10**9, "--epochs", 10**6, "--checkpoint_every", 10**9]
    try:
        return json.loads(succeeds(setting, words).splitlines()[-1])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def script_words(setting: Setting, case: Case) -> list[Any]:
    words = small_images(setting, case.script)
    if case.large:
        edge, words = setting.size(224, 32), list(words)
        words[2] = photographs(setting.folder / f"{edge}_pixels", setting.size(2048, 128), [(edge, edge)])
    return words if setting.is_small else [*words, *case.flags]
