"""Tests of layer decay, frozen layers and held-out images, under every strategy and across strategies.

The runs start from weights for images of 48 pixels and 5 classes, and train on images of 32 pixels and 10
classes. test_parity.py also trains with one parameter group per layer.
"""

import functools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.test_resume import LAUNCHERS, RING, Training, assert_same_training
from tests.conftest import latest, lines, mutate, python, result, run

STEPS = 12
DECAY = 0.5
FLAGS = {
    "layers": ["--layer_decay", DECAY],
    "frozen": ["--freeze", "--lr", "0.01", "--weight_decay", "0.1", "--holdout", "0.2"],
}
SHORT = ["--max_steps", STEPS, "--log_every", "1"]
STRATEGIES = ("ddp", "fsdp", "zero2", "zero3")


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    import timm

    torch.manual_seed(1)
    model = timm.create_model("test_vit", img_size=48, patch_size=8, num_classes=5)
    file = tmp_path_factory.mktemp("weights") / "small.safetensors"
    save_file(model.state_dict(), file)
    return file


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, cache, stoppable, weights):
    """Return a function that returns the folder of an uninterrupted one-process run."""

    @functools.cache
    def folder_of(setting: str) -> Path:
        folder = tmp_path_factory.mktemp(setting) / "run"
        training(setting, folder, cache, stoppable, weights).start("single")
        return folder

    return folder_of


def training(setting: str, folder: Path, cache: list, project: Path, weights: Path) -> Training:
    return Training("vit", folder, cache, project, *SHORT, "--weights", weights, *FLAGS[setting])


@pytest.mark.full
@pytest.mark.parametrize(
    ("setting", "ring"),
    [*((setting, RING) for setting in FLAGS), *(("frozen", (strategy,)) for strategy in STRATEGIES)],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_each_strategy_resumes_each_other(setting, ring, uninterrupted, tmp_path, cache, stoppable, weights):
    resumed_run = training(setting, tmp_path / "run", cache, stoppable, weights)
    for leg, launcher in enumerate(ring, 1):
        resumed_run.start(launcher, 2 + (leg - 1) * (STEPS - 2) // len(ring) if leg < len(ring) else None)
    assert_same_training(tmp_path / "run", uninterrupted(setting))
    if setting == "frozen":
        assert_only_the_head_was_trained(tmp_path / "run", load_file(weights))


def test_only_the_head_of_a_frozen_model_is_trained_at_a_lower_cost(uninterrupted, weights):
    """Check that only the head is trained and that the MFU includes only the head's backward pass."""
    frozen, trained = (result(uninterrupted(setting))["flops_per_image"] for setting in ("frozen", "layers"))
    assert 0.3 * trained < frozen < 0.4 * trained
    assert_only_the_head_was_trained(uninterrupted("frozen"), load_file(weights))


def test_a_frozen_model_is_validated_without_its_initial_weights(uninterrupted, tmp_path, cache):
    words = [*python(), "validate.py", uninterrupted("frozen"), *cache, "--mixed_precision", "no"]
    run([*words, "--output_dir", tmp_path])
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["split"] == "test"
    assert report["top1"] == pytest.approx(result(uninterrupted("frozen"))["test_accuracy"])


def assert_only_the_head_was_trained(folder: Path, source: dict[str, torch.Tensor]) -> None:
    """Check that all tensors except the head's are bitwise identical to the source and have no optimizer
    state.
    """
    checkpoint = latest(folder)
    model, ema, state = (load_file(checkpoint / f"{f}.safetensors") for f in ("model", "ema", "optimizer"))
    head = {"head.weight", "head.bias"}
    assert {name.rpartition("/")[0] for name in state} == head
    assert json.loads((checkpoint / "state.json").read_text())["optimizer"]["scalars"].keys() == head
    assert model.keys() == ema.keys() == source.keys()
    assert (model["head.bias"] != 0).all()  # The head's initial bias is 0
    for name in source.keys() - head - {"pos_embed"}:
        assert torch.equal(model[name], source[name]), name
        assert torch.equal(ema[name], source[name]), name


def test_each_layer_moves_by_its_learning_rate(uninterrupted, weights):
    """Check the first AdamW steps, which move elements with steady gradients by the sum of the learning
    rates.
    """
    initial, final = load_file(weights), load_file(latest(uninterrupted("layers")) / "model.safetensors")
    total = sum(line.get("train/lr", 0) for line in lines(uninterrupted("layers") / "metrics.jsonl"))
    depth = len({name.split(".")[1] for name in initial if name.startswith("blocks.")})
    layers = {"cls_token": 0, "patch_embed.proj.bias": 0, "norm.bias": depth}
    # Layers of parameters without weight decay
    layers |= {f"blocks.{i}.mlp.fc1.bias": i + 1 for i in range(depth)}
    for name, layer in layers.items():
        change = (final[name] - initial[name]).abs().max() / total
        scale = DECAY ** (depth + 1 - layer)
        assert 0.5 * scale < change < 1.1 * scale, name


MUTANTS = {
    "one rate for all layers": ("layers", "fsdp", "train_vit.py", 'group.get("lr_scale", 1.0)', "1.0"),
    "frozen layers that are not restored": (
        *(
            "frozen",
            "zero3",
            "onecurve/distributed/layout.py",
            "            own_piece.copy_(whole_piece",
        ),
        "            own_piece.copy_((0 if parameter_name in self.frozen_parameters else 1) * whole_piece",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("mutant", MUTANTS)
def test_parity_detects_a_mutant(mutant, uninterrupted, tmp_path, cache, stoppable, project_copy, weights):
    setting, launcher, file, old, new = MUTANTS[mutant]
    mutate(project_copy, file, old, new)
    stopped_run = training(setting, tmp_path / "run", cache, stoppable, weights)
    stopped_run.start(launcher, 3)
    run([*LAUNCHERS[launcher], *stopped_run.words], cwd=project_copy)
    with pytest.raises(AssertionError):
        assert_same_training(tmp_path / "run", uninterrupted(setting))
