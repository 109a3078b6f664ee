"""Tests that train scripts synchronize with the device only when they log a line or evaluate.

The tests use fake CUDA tensors. tests/support/waits.py explains the method and lists the synchronizations
that it can't detect.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.utils import DistributedType

from onecurve.data.images import Images
from onecurve.data.splits import BATCHES_SENT_AHEAD, ArraySplit, SplitPart
from onecurve.models.script import load_script, recipe_class
from onecurve.numerics import augment
from onecurve.numerics.augment import DRAWS, RAND_AUGMENT
from onecurve.numerics.optimizers import can_fuse_sgd
from onecurve.numerics.order import uniforms
from onecurve.numerics.rand_augment import rand_augment
from tests.conftest import ROOT, full
from tests.models.test_timm_models import Operators
from tests.support.waits import counted, waits_of

VAL = 16  # Number of images in an evaluation
AUGMENTED = dict(randaug_layers=1, color_jitter=0.4, random_erasing=0.25, drop_path=0.1)
RECIPES = {
    "train_hello": dict(data_size=48),
    "train_cnn_a": {},
    "train_cnn_b": dict(width=8),
    "train_vit": dict(model="test_vit", image_size=32, patch_size=8, **AUGMENTED),
}
# Synchronizations in 2 epochs of 3 steps, with a log line after every second step and at each end of an epoch
LINES = {"session.py:mean_loss": 4}
# Synchronizations in a run with evaluations. The images move to the device once.
EVALUATIONS = LINES | {"evaluation.py:evaluate": 2 * 5, "splits.py:_copy_to_device": 2}
WAITS = {
    # After the loop, the script draws a plot.
    "train_hello": LINES | {"train_hello.py:evaluate": 2 * 2, "train_hello.py:main": 4},
    "train_cnn_a": EVALUATIONS,
    "train_cnn_b": EVALUATIONS,
    # The EMA is evaluated as well as the model
    "train_vit": EVALUATIONS | {"evaluation.py:evaluate": 2 * 2 * 5},
}


def waits(file: Path, name: str, folder: Path) -> dict[str, int]:
    splits = []
    for split, count in (("train", 48), ("val", VAL)):
        np.save(folder / f"{split}.npy", np.zeros((count, 32, 32, 3), np.uint8))
        pixels = np.load(folder / f"{split}.npy", mmap_mode="c")
        splits.append(ArraySplit(pixels, SplitPart(split, np.arange(count) % 10)))
    images = Images("", tuple("0123456789"), *splits, val_name="val")
    script = load_script(file)
    numbers = dict(epochs=2, batch_size=16, per_device_batch_size=8, clip_norm=1.0, log_every=2)
    recipe = recipe_class(script)(**numbers, **RECIPES[name])
    return waits_of(script, recipe, images, 1000 if name == "train_hello" else VAL)


def test_each_script_of_this_list_is_there():
    assert set(WAITS) <= {path.stem for path in ROOT.glob("train_*.py")}


@pytest.mark.parametrize("name", [name if name == "train_vit" else full(name) for name in WAITS])
def test_a_script_waits_only_for_its_log(name, tmp_path):
    assert waits(ROOT / f"{name}.py", name, tmp_path) == WAITS[name]


@pytest.mark.parametrize(
    ("name", "old", "new", "added_waits"),
    [
        ("train_cnn_a", "run.add(loss, ids)", "run.add(loss, ids), loss.item()", 12),
        ("train_cnn_a", "run.add(loss, ids)", "run.add(loss + loss.new_tensor(1.0), ids)", 12),
        ("train_cnn_a", "run.add(loss, ids)", "run.add(loss if loss > 0 else -loss, ids)", 12),
        ("train_hello", "F.mse_loss(model(rows(x, ids))", "F.mse_loss(model(x[ids])", 12),
        ("train_hello", "rows(y, ids))[:valid]", "rows(y, ids))[y[:8, 0] > 0][:valid]", None),
    ],
)
def test_a_wait_in_a_loop_is_seen(name, old, new, added_waits, tmp_path):
    text = (ROOT / f"{name}.py").read_text()
    assert text.count(old) == 1
    changed = tmp_path / f"{name}.py"
    changed.write_text(text.replace(old, new))
    if added_waits is None:  # Only the device knows the result's size
        with pytest.raises(Exception, match="nonzero"):
            waits(changed, name, tmp_path)
        return
    counts = waits(changed, name, tmp_path)
    caller = f"{name}.py:main"
    assert counts == WAITS[name] | {caller: WAITS[name].get(caller, 0) + added_waits}


def test_arrays_cross_to_the_device_in_one_copy(monkeypatch):
    draws = uniforms(0, 0, np.arange(64), DRAWS)
    with counted() as waits_seen:
        images = torch.zeros(64, 32, 32, 3, dtype=torch.uint8, device="cuda")
        rand_augment(images, draws[:, RAND_AUGMENT], 2, 10)
        assert waits_seen.copies == 1
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (2**40, 2**40))
        split = ArraySplit(np.zeros((64, 32, 32, 3), np.uint8), SplitPart("train", np.arange(64) % 10))
        plan = [(epoch, np.arange(16)) for epoch in (0, 1) for _ in range(BATCHES_SENT_AHEAD + 1)]
        options = dict(device="cuda", size=32, seed=0, workers=0)
        copies = [waits_seen.copies for _ in split.batches(iter(plan), train=True, **options)]
    # The images are copied to the device before each group's labels and positions
    assert copies == [3] * BATCHES_SENT_AHEAD + [4] + [5] * BATCHES_SENT_AHEAD + [6]
    assert set(waits_seen.places) == {"splits.py:_copy_to_device"}


@pytest.mark.parametrize("train", [True, False])
def test_a_step_uses_its_part_of_a_group(train):
    """Check that micro-batches copied as a group receive the same images and labels as without a group."""
    pixels = np.random.RandomState(0).randint(0, 256, (64, 8, 8, 3), np.uint8)
    split, draw = ArraySplit(pixels, SplitPart("train", np.arange(64) % 10)), np.random.RandomState(1)
    split.mirror = True
    plan = [
        (epoch, draw.permutation(64)[: 16 - epoch]) for epoch in (0, 1) for _ in range(BATCHES_SENT_AHEAD + 2)
    ]
    options = dict(device="cpu", train=train, size=8, seed=0, workers=0)
    alone = [next(split.batches(iter([item]), **options)) for item in plan]
    with Operators() as operators:
        grouped = []
        for batch in split.batches(iter(plan), **options):
            grouped.append((batch, [f.overloadpacket.__name__ for f in operators.called if not f.is_view]))
            operators.called.clear()
    for (batch, _), single_batch in zip(grouped, alone, strict=True):
        assert (batch.epoch, batch.ids is single_batch.ids) == (single_batch.epoch, True)
        assert torch.equal(batch.images, single_batch.images)
        assert torch.equal(batch.labels, single_batch.labels)
    begin_groups = {
        first + index for first in (0, BATCHES_SENT_AHEAD + 2) for index in (0, BATCHES_SENT_AHEAD)
    }
    steps = {tuple(names) for index, (_, names) in enumerate(grouped) if index not in begin_groups}
    # NumPy's `take`, which is not a torch operator, also runs.
    assert steps == {("empty", "add", "index_select") if train else ("empty",)}


def test_packed_arrays_arrive_whole(monkeypatch):
    """Replace the copy to the device, because this test has no device."""
    monkeypatch.setattr(augment, "send", lambda tensor, device: tensor)
    arrays = [
        np.arange(5),
        np.full((2, 3), 0.5, np.float32),
        np.zeros((0, 2), np.int32),
        np.arange(3, dtype=np.int32),
    ]
    arrays.append(np.arange(12).reshape(3, 4).T)
    received = augment.send_arrays(arrays, torch.device("cuda"))
    for array, tensor in zip(arrays, received, strict=True):
        np.testing.assert_array_equal(array, tensor.numpy(), strict=True)


@pytest.mark.parametrize(
    ("device", "distributed_type", "fused"),
    [("cuda", "MULTI_GPU", True), ("cuda", "DEEPSPEED", True), ("cuda", "FSDP", False), ("cpu", "NO", False)],
)
def test_sgd_is_fused_on_gpus_without_fsdp(device, distributed_type, fused):
    accelerator = SimpleNamespace(
        device=torch.device(device), distributed_type=DistributedType(distributed_type)
    )
    assert can_fuse_sgd(accelerator) == fused
