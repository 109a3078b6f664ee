"""Images/s, launches of a step, the GPU's busy share, MFU and waits, one process a case; recipes with goals.

MFU is the model's own floating-point operations (torch's counter, forward and backward) in a second, divided
by what a large bf16 product reaches on this device, and by the peak of its data sheet. Expected are estimates
for one H100.
"""

import io
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.gpu.checks import no_waits
from benchmarks.gpu.rows import Result, Row, Setting, on_gpu, row, run_flags, small_images, succeeds, trained

END_TO_END = 0.95  # goal: a training's speed, divided by that on a batch that stays on the device


@dataclass(frozen=True)
class Case:
    """A script, its flags, the images/s and launches that are expected, and the goals on one H200.

    photographs: (width, height) of the images, in turn, instead of --data.
    """

    script: str
    flags: tuple[Any, ...]
    expected: float
    launches: float | None = None
    images_per_s: float | None = None
    mfu_pct: float | None = None
    photographs: Sequence[tuple[int, int]] = ()


VIT_S = ("--model", "vit_small_patch16_224", "--randaug_layers", 2, "--batch_size", 256)
VIT_B = Case("train_vit", ("--batch_size", 512), 10_000, 800)
RESNET = Case("train_cnn_b", ("--batch_size", 512), 52_000, 320)
CNN_A = Case("train_cnn_a", ("--batch_size", 512), 475_000, 76)
SMALL_VIT = Case("train_vit", VIT_S, 6_000, 1450, photographs=[(224, 224)])
CASES = {
    "vit ViT-B/32 at 224, batch 512": VIT_B,
    "ResNet-18, batch 512": RESNET,
    "CNN-A, batch 512": CNN_A,
    "vit ViT-S/16 at 224, RandAugment, batch 256": SMALL_VIT,
}
COMPILED = ("--compile", "default")  # and then a graph, by itself
EAGER = ("--compile", "no", "--no_step_graph")
# Other flags of these cases: each is a row beside the eager one.
VARIANTS = {
    "vit ViT-B/32, compiled": (replace(VIT_B, expected=16_500, mfu_pct=45), COMPILED),
    "vit ViT-B/32, bf16 residual": (replace(VIT_B, expected=11_000), ("--half_residual",)),
    "ResNet-18, compiled": (replace(RESNET, expected=75_000), COMPILED),
    "ResNet-18, step graph": (replace(RESNET, expected=60_000), ("--step_graph",)),
    "vit ViT-B/32, step graph": (VIT_B, ("--step_graph",)),
    # Some 80 bytes of memory traffic a parameter, and 6 launches for each tensor, more than without the flag.
    "vit ViT-B/32, deterministic": (replace(VIT_B, expected=9_500), ("--deterministic",)),
    "ResNet-18, deterministic": (replace(RESNET, expected=50_000), ("--deterministic",)),
    "CNN-A, deterministic": (replace(CNN_A, expected=275_000), ("--deterministic",)),
    "CNN-A, step graph": (replace(CNN_A, expected=1_200_000, images_per_s=1e6), ("--step_graph",)),
    "CNN-A, reduce-overhead": (replace(CNN_A, expected=900_000), ("--compile", "reduce-overhead")),
    "vit ViT-S/16, compiled": (replace(SMALL_VIT, expected=8_000, images_per_s=8_000), COMPILED),
}
# The usual photograph of ImageNet, decoded beside the training; images of one size would be decoded once.
DECODED = replace(SMALL_VIT, photographs=[(500, 375), (375, 500)], flags=(*VIT_S, "--workers", 12))


def rows() -> dict[str, Row]:
    """A dry run has the network that is fastest, and the one with images of its own."""
    dry = (CNN_A, SMALL_VIT)
    return {name: (row if case in dry else on_gpu)(eager, case) for name, case in CASES.items()}


def variants() -> dict[str, Row]:
    dry = "CNN-A, deterministic"
    return {name: (row if name == dry else on_gpu)(variant, *words) for name, words in VARIANTS.items()}


def inputs() -> dict[str, Row]:
    return {"decoding, one core": decoding, "vit photographs / resident": row(beside_decoding)}


def eager(setting: Setting, case: Case) -> dict[str, Result]:
    found = probe(setting, case, "fed,resident,profile,waits", *EAGER)
    launches, kernels = round(found["profile"]["launches"]), found["profile"]["kernels"]
    busy = f"busy {100 * found['profile']['busy_share']:.0f} %"
    return {
        "eager": speed(setting, case, found),
        "data / resident": share_of_resident(setting, found),
        "launches": Result(launches, "a step", case.launches, note=busy, kernels=kernels),
        "waits": no_waits(found["waits"]),
    }


def variant(setting: Setting, case: Case, flags: tuple[str, ...]) -> Result:
    return speed(setting, case, probe(setting, case, "fed", *flags))


def beside_decoding(setting: Setting) -> Result:
    return share_of_resident(setting, probe(setting, DECODED, "fed,resident"))


def share_of_resident(setting: Setting, found: dict[str, Any]) -> Result:
    fed, resident = (found[name]["images_per_s"] for name in ("fed", "resident"))
    share = round(fed / resident, 3)
    judged = setting.judge(share >= END_TO_END)
    return Result(share, "", f"at least {END_TO_END}", judged, f"{fed:,.0f} of {resident:,.0f} images/s")


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
        return json.loads(succeeds(setting, words))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def script_words(setting: Setting, case: Case) -> list[Any]:
    words = list(small_images(setting, case.script))
    if case.photographs:
        sizes = setting.size(case.photographs, [(w // 7, h // 7) for w, h in case.photographs])
        words[2] = photographs(setting, sizes)
    return words if setting.is_small else [*words, *case.flags]


def photographs(setting: Setting, sizes: Sequence[tuple[int, int]]) -> Path:
    """Class folders of smooth noise, which a JPEG compresses to a photograph's size. Returns their root."""
    random, root = np.random.default_rng(0), setting.folder / "x".join(map(str, sizes[0]))
    count = setting.size(2048, 128)
    for split, images in (("train", count), ("val", count // 16)) if not root.exists() else ():
        for number in range(images):
            folder = root / split / f"class_{number % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            small = Image.fromarray(random.integers(0, 256, (48, 64, 3), dtype=np.uint8))
            data = io.BytesIO()
            small.resize(sizes[number % len(sizes)], Image.Resampling.BICUBIC).save(data, "JPEG", quality=95)
            (folder / f"{number}.jpg").write_bytes(data.getvalue())
    return root


def decoding(setting: Setting) -> Result:
    file, folder = setting.folder / "decoding.json", photographs(setting, DECODED.photographs)
    words = ["-m", "benchmarks.decoding", "--images", folder / "val", "--rounds", setting.size(9, 1)]
    succeeds(setting, [*words, "--json", file])
    found = json.loads(file.read_text())
    value = np.median([each["ours, originals"] for each in found["rounds"]])
    return Result(round(value), "images/s", 500, note=f"{found['ratios']['ours, originals']:.2f} times PIL's")


# --- Recipes with goals on CIFAR-10: accuracy, and the seconds of training with and without their start

FAST = ("--config", "recipes/cnn_b_cifar10_fast.yaml")
IMAGES = 50_000  # of CIFAR-10 to train on


def recipes() -> dict[str, Row]:
    """Estimates and goals: seconds of the whole training on one H100, and on one H200."""
    return {
        "fast recipe, eager": row(trains, "train_cnn_b", 0.94, 25, 15, *FAST, *EAGER),
        "fast recipe, step graph": on_gpu(trains, "train_cnn_b", 0.94, 22, 15, *FAST, "--step_graph"),
        "fast recipe, compiled": on_gpu(trains, "train_cnn_b", 0.94, 18, 15, *FAST, *COMPILED),
        "CNN-A": on_gpu(trains, "train_cnn_a", 0.75, 4, None),
    }


def trains(
    setting: Setting, script: str, accuracy: float, expected_s: float, goal_s: float | None, *flags: Any
) -> dict[str, Result]:
    small = ["--epochs", 2, "--max_steps", 4, "--log_every", 1, "--max_val_images", 64]
    words = [*small_images(setting, script), *flags, *setting.size([], small), "--telemetry_s", 0]
    with trained(setting, script, words) as (folder, result):
        seconds, settled, evaluations = times(folder, result)
    # Generated images are fewer: the time is that of as many steps as CIFAR-10 has.
    share = result["epochs"] * IMAGES / (result["steps"] * result["batch_size"])
    is_whole = setting.data != "synthetic"
    seconds, settled = (s if is_whole else s * share for s in (seconds, settled))
    verdict = setting.judge(settled <= goal_s) if goal_s else ""
    note = f"goal {goal_s} s" if goal_s else ""
    note += "" if is_whole else "; as for CIFAR-10's number of images"
    reached = round(result["final_accuracy"], 4)
    judged = setting.judge(reached >= accuracy) if is_whole else ""
    return {
        "training": Result(round(seconds, 1), "s", note="with autotuning and compilation"),
        "training after epoch 1": Result(round(settled, 1), "s", expected_s, verdict, note.lstrip("; ")),
        "evaluations": Result(round(sum(evaluations), 2), "s", note=f"the first {evaluations[0]:.2f} s"),
        "accuracy": Result(reached, "", f"at least {accuracy}" if is_whole else "", judged),
    }


def times(folder: Path, result: dict[str, Any]) -> tuple[float, float, list[float]]:
    """Seconds of training; epochs 2 to n times n / (n - 1), as the first autotunes and compiles; evaluations.

    Evaluations are no part of the training's seconds. The first one autotunes and compiles, too.
    """
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    per_epoch, epochs = result["steps"] / result["epochs"], result["epochs"]
    before, first_s, evaluations = 0, 0.0, []
    for last, line in zip([{}, *lines], lines, strict=False):
        if "train/images_per_s" in line and line["step"] <= per_epoch:
            first_s += (line["step"] - before) * result["batch_size"] / line["train/images_per_s"]
            before = line["step"]
        if "val/loss" in line and "wall_s" in last:
            evaluations.append(line["wall_s"] - last["wall_s"])
    return result["train_s"], (result["train_s"] - first_s) * epochs / (epochs - 1), evaluations
