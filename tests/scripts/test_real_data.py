"""Tests that train CIFAR-10 with every accelerate config and check the accuracies in the README."""

import re
from itertools import cycle

import pytest

from tests.conftest import CNN, RESNET, ROOT, VIT, Job, accelerate, full, metrics, python, result, run

# Accelerate configs for one host. tests/scripts/test_launch.py starts the configs for two hosts.
CONFIGS = sorted(path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml") if "_2x" not in path.stem)
SCRIPTS = {"cnn_a": CNN, "cnn_b": RESNET, "vit": VIT}
QUICK = ("cpu", "single_gpu", "fsdp_2gpu")  # `make test-all` also runs the other configs
PAIRS = [
    (config, script) if config in QUICK else full(config, script)
    for config, script in zip(CONFIGS, cycle(SCRIPTS))
]


@pytest.mark.parametrize(("config", "script"), PAIRS)
def test_cifar10_under_each_config(config, script, cifar10, tmp_path, cache):
    """Train with each config's number of processes and precision.

    The run with cpu.yaml evaluates all 10,000 test images.
    """
    count = re.search(r"_(\d)gpu", config)
    processes = int(count.group(1)) if count else 1
    flags = ["--data", cifar10, "--batch_size", "64", "--max_steps", "4", "--log_every", "2", *cache]
    flags += [] if config == "cpu" else ["--max_val_images", "1000"]
    output = run([*accelerate(config), *SCRIPTS[script], *flags, "--output_dir", tmp_path / "run"])
    facts = result(tmp_path / "run")
    assert facts["processes"] == processes
    assert facts["val_images"] == (10_000 if config == "cpu" else 1000)
    assert facts["steps"] == 4
    assert facts["strategy"] == config.split("_")[0].replace("cpu", "single")
    rehearsal = f"rehearsal on CPU: {processes} gloo processes stand in for {processes} GPUs"
    assert output.count(rehearsal) == (processes > 1)


def test_the_fast_recipe_of_cifar10_starts(cifar10, cache, tmp_path):
    words = ["train_cnn_b.py", "--config", "recipes/cnn_b_cifar10_fast.yaml", "--data", cifar10, *cache]
    words += ["--width", "8", "--max_steps", "3", "--log_every", "1", "--max_val_images", "64"]
    run([*python(), *words, "--mixed_precision", "no", "--output_dir", tmp_path / "run"])
    assert result(tmp_path / "run")["steps"] == 3
    rates = [line["train/lr"] for line in metrics(tmp_path / "run") if "train/lr" in line]
    warmup_steps = int(0.1 * 26 * (50_000 // 512))
    assert rates == pytest.approx([0.2 * (step + 1) / warmup_steps for step in range(3)])


@pytest.mark.full
def test_cifar10_in_ten_epochs(cifar10, tmp_path, cache):
    flags = ["--data", cifar10, *cache, "--output_dir", tmp_path / "run"]
    status, output = Job([*accelerate("cpu"), "train_cnn_a.py", *flags]).wait(timeout_s=1800)
    assert status == 0, output
    assert result(tmp_path / "run")["final_accuracy"] >= 0.73
