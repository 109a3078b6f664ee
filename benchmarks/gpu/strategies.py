"""Every strategy: one process with the GPU's own backend, and two ranks that share one GPU over gloo."""

from pathlib import Path

from benchmarks.gpu.rows import (
    FAIL,
    OK,
    STRATEGIES,
    Result,
    Row,
    Setting,
    one_at_a_time,
    small_images,
    strategy,
    trained,
)

WITHIN = 1e-4  # of the loss after some steps in fp32; on a CPU it is 1e-5


def checks() -> dict[str, Row]:
    found: dict[str, Row] = {"single": reference}
    found |= {f"{name}, one process": beside_single(name, 1) for name in STRATEGIES}
    found |= {f"{name}, two ranks on one GPU, gloo": beside_single(name, 2) for name in STRATEGIES}
    return found


def reference(setting: Setting) -> Result:
    return Result(round(loss_of(setting, "single", [], [], {}), 6), "loss")


def beside_single(name: str, processes: int) -> Row:
    def row(setting: Setting) -> Result:
        single = loss_of(setting, "single", [], [], {})
        launcher, flags, env = strategy(name, processes)
        shared = ["-m", "benchmarks.gpu.shared_gpu"] if processes > 1 and not setting.dry_run else []
        loss = loss_of(setting, f"{name} {processes}", [*launcher, *shared], flags, env)
        off = abs(loss - single)
        return Result(
            float(f"{off:.2g}"), "of the loss to single", f"below {WITHIN}", OK if off < WITHIN else FAIL
        )

    return row


def loss_of(setting: Setting, name: str, launcher: list, flags: list, env: dict[str, str]) -> float:
    """The validation loss after some steps of CNN-A in fp32, without TF32; trained once in a section.

    BatchNorm would multiply rounding by a hundred within a few steps.
    """
    key = setting.folder / name
    words = [*launcher, *small_images(setting, "train_cnn_a"), "--batch_size", 64, "--mixed_precision", "no"]
    steps = ["--per_device_batch_size", 32, "--max_steps", setting.size(10, 2), "--max_val_images", 256]
    with one_at_a_time(key):
        if key not in _losses:
            flags = [*steps, "--deterministic", *flags]
            with trained(setting, name, words, *flags, env=env) as (_, result):
                _losses[key] = result["final_loss"]
        return _losses[key]


_losses: dict[Path, float] = {}
