"""fp16 with loss scaling, in real fp16 on the CPU: it follows fp32, and a step that overflows is left out."""

from itertools import product

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import CNN, RESNET, STRATEGIES, VIT, full, metrics, mutate, result, run

FLAGS = ["--data", "digits", "--batch_size", "32", "--max_steps", "4", "--log_every", "1"]
FLAGS += ["--trackers", "none"]
SCRIPTS = {"vit": VIT, "cnn_a": CNN, "cnn_b": [*RESNET, "--lr", "0.01"]}
REST = [full(*pair) for pair in product(SCRIPTS, STRATEGIES) if pair != ("vit", "fsdp")]


@pytest.mark.parametrize(("script", "strategy"), [("vit", "fsdp"), *REST])
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


SCALER = ("common/distributed/accelerator.py", 'GradScaler("cpu")', 'GradScaler("cpu", init_scale=2.0**60)')
ON_ONE_RANK = (
    "train_cnn_a.py",
    "accelerator.backward(loss)",
    "accelerator.backward(loss * (1e30 if accelerator.process_index == 1 else 1))",
)


@pytest.mark.parametrize(
    ("strategy", "overflow"),
    [
        ("single", SCALER),  # every gradient is infinite, by a loss scale beyond fp16
        full("fsdp", SCALER),
        *(full(strategy, ON_ONE_RANK) for strategy in ("ddp", "fsdp", "zero2", "zero3")),
    ],
)
def test_a_step_that_overflows_is_left_out_on_all_ranks(strategy, overflow, project_copy, tmp_path, cache):
    def trained(name: str, *flags) -> dict[str, torch.Tensor]:
        words = [*STRATEGIES[strategy], *CNN, *FLAGS, "--mixed_precision", "fp16", *flags, *cache]
        run([*words, "--output_dir", tmp_path / name], cwd=project_copy)
        assert result(tmp_path / name)["final_loss"] > 0
        return load_file(tmp_path / name / result(tmp_path / name)["checkpoint"] / "model.safetensors")

    mutate(project_copy, *overflow)
    untouched, overflowed = trained("untouched", "--lr", "0"), trained("overflowed", "--lr", "0.1")
    assert all(torch.equal(overflowed[name], tensor) for name, tensor in untouched.items())
    if overflow == SCALER:
        in_fp32 = trained("trained", "--lr", "0.1", "--mixed_precision", "no")
        assert not any(torch.equal(in_fp32[name], tensor) for name, tensor in untouched.items())
