"""fp16 with loss scaling, in real fp16 on the CPU: it follows fp32, and a step that overflows is left out."""

from itertools import product

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import CNN, RESNET, STRATEGIES, VIT, accelerate, metrics, mutate, python, result, run

FLAGS = [
    "--data",
    "digits",
    "--batch_size",
    "32",
    "--max_steps",
    "4",
    "--log_every",
    "1",
    "--trackers",
    "none",
]
SCRIPTS = {"cnn_a": CNN, "cnn_b": [*RESNET, "--lr", "0.01"], "vit": VIT}
QUICK = [("vit", "fsdp")]
PAIRS = [
    pytest.param(script, strategy, marks=[] if (script, strategy) in QUICK else pytest.mark.full)
    for script, strategy in product(SCRIPTS, STRATEGIES)
]


@pytest.mark.parametrize(("script", "strategy"), PAIRS)
def test_fp16_follows_fp32(script, strategy, tmp_path, cache):
    """Mixup, drop path, clipping and the EMA of the ViT included."""
    words = [*STRATEGIES[strategy], *SCRIPTS[script], *FLAGS, *cache]
    losses = {}
    for precision in ("no", "fp16"):
        folder = tmp_path / precision
        output = run([*words, "--mixed_precision", precision, "--output_dir", folder])
        assert result(folder)["mixed_precision"] == precision
        assert ("fp16 is slow on a CPU" in output) == (precision == "fp16")
        losses[precision] = [line.get("train/loss", line.get("val/loss")) for line in metrics(folder)]
    assert losses["fp16"] == pytest.approx(losses["no"], rel=0.02)
    assert losses["fp16"] != losses["no"]


@pytest.mark.parametrize(
    "launcher",
    [python(), pytest.param(accelerate("fsdp_2gpu"), marks=pytest.mark.full)],
    ids=["single", "fsdp"],
)
def test_a_step_that_overflows_changes_nothing(launcher, project_copy, tmp_path, cache):
    """All ranks skip each step when every gradient is infinite, by a loss scale beyond fp16."""
    mutate(
        project_copy,
        "common/distributed/accelerator.py",
        'GradScaler("cpu")',
        'GradScaler("cpu", init_scale=2.0**60)',
    )
    weights = []
    for flags in (["--lr", "0"], ["--lr", "0.1"], ["--lr", "0.1", "--mixed_precision", "no"]):
        folder = tmp_path / f"run{len(weights)}"
        words = [*launcher, *CNN, *FLAGS, "--mixed_precision", "fp16", *flags, *cache, "--output_dir", folder]
        run(words, cwd=project_copy)
        assert result(folder)["final_loss"] > 0
        weights.append(load_file(folder / result(folder)["checkpoint"] / "model.safetensors"))
    untouched, overflowed, trained = weights
    assert all(torch.equal(overflowed[name], tensor) for name, tensor in untouched.items())
    assert not any(torch.equal(trained[name], tensor) for name, tensor in untouched.items())


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2", "zero3"])
def test_an_overflow_on_one_rank_leaves_the_step_out_on_all(strategy, project_copy, tmp_path, cache):
    mutate(
        project_copy,
        "train_cnn_a.py",
        "accelerator.backward(loss)",
        "accelerator.backward(loss * (1e30 if accelerator.process_index == 1 else 1))",
    )
    weights = []
    for lr in ("0", "0.1"):
        folder = tmp_path / lr
        words = [*STRATEGIES[strategy], *CNN, *FLAGS, "--mixed_precision", "fp16", "--lr", lr, *cache]
        run([*words, "--output_dir", folder], cwd=project_copy)
        weights.append(load_file(folder / result(folder)["checkpoint"] / "model.safetensors"))
    untouched, overflowed = weights
    assert all(torch.equal(overflowed[name], tensor) for name, tensor in untouched.items())
