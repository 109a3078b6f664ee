"""Tests of initial weights for fine-tuning, which are loaded from a file or run and adapted as in timm."""

import json
import shlex
import sys
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf
from timm.optim import param_groups_layer_decay
from torch import Tensor

from onecurve.checkpoint import weights
from onecurve.checkpoint.format import remove_checkpoint, write_checkpoint, write_step_index
from onecurve.checkpoint.snapshot import Snapshot
from onecurve.flags.recipe import parse
from onecurve.models.script import as_flags
from onecurve.models.timm_models import data_config_of
from tests.conftest import full
from train_vit import Vit, build_model, build_optimizer

SMALL = {"model": "test_vit", "image_size": 32, "patch_size": 8}


def saved(file: Path, classes: int = 10, **changes) -> Path:
    """Write a file with a small model's weights. `changes` maps names to replacement tensors."""
    torch.manual_seed(1)
    model = build_model(Vit(**SMALL), classes)
    save_file(model.state_dict() | changes, file)
    return file


@pytest.fixture
def file(tmp_path) -> Path:
    return saved(tmp_path / "small.safetensors")


def load_into_model(weights: Path, classes: int = 10, **flags) -> dict[str, Tensor]:
    return build_model(Vit(**SMALL | flags, weights=str(weights)), classes).state_dict()


@pytest.mark.parametrize(
    "flags", [{"image_size": 48}, {"patch_size": 4}, {"image_size": 40, "patch_size": 4}, {}], ids=str
)
def test_embeddings_are_resampled_like_timm(flags, file):
    size, patch = (SMALL | flags)["image_size"], (SMALL | flags)["patch_size"]
    actual = load_into_model(file, **flags)
    options = {"img_size": size, "patch_size": patch, "num_classes": 10}
    overlay = {"file": str(file), "num_classes": 10}
    expected = timm.create_model("test_vit", True, pretrained_cfg_overlay=overlay, **options).state_dict()
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def test_another_number_of_classes_gets_a_new_head(file, tmp_path, capsys):
    state, source = load_into_model(file, classes=3), load_file(file)
    assert state["head.weight"].shape == (3, 64)
    # timm initializes a new head's weights with small random values
    assert 0.01 < state["head.weight"].std() < 0.03
    assert not state["head.bias"].any()
    for name in source.keys() - {"head.weight", "head.bias"}:
        assert torch.equal(state[name], source[name]), name
    assert "a new head for 3 classes replaces the file's head for 10 classes" in capsys.readouterr().out
    headless = {name: tensor for name, tensor in source.items() if not name.startswith("head.")}
    save_file(headless, tmp_path / "headless.safetensors")
    assert load_into_model(tmp_path / "headless.safetensors", classes=3)["head.weight"].shape == (3, 64)


@pytest.mark.parametrize("model", ["test_vit", "deit_tiny_distilled_patch16_224", "test_resnet"])
@pytest.mark.parametrize(
    ("classes", "rows", "message"),
    [
        (("cat", "dog", "wolf"), [0, 1, 2], ""),
        (
            ("wolf", "cat", "dog"),
            [2, 0, 1],
            "rows for 3 classes with known names and adds rows for 0 classes",
        ),
        (("wolf", "cat"), [2, 0], "rows for 2 classes with known names and adds rows for 0 classes"),
        (
            ("dog", "fox", "wolf"),
            [1, None, 2],
            "rows for 2 classes with known names and adds rows for 1 class",
        ),
        (
            ("fox", "hen", "ox"),
            [None] * 3,
            "rows for 0 classes with known names and adds rows for 3 classes",
        ),
        ((), [0, 1, 2], ""),
        (
            ("a", "b", "c"),
            [0, 1, 2],
            "so the head's rows are assumed to be in the data's class order",
        ),
    ],
)
def test_a_head_keeps_the_rows_of_known_classes(model, classes, rows, message, tmp_path, capsys):
    recipe = {"model": model, "image_size": 32, "patch_size": 16 if "deit" in model else None}
    recipe |= {"drop_path": 0.0}
    source = build_model(Vit(**recipe), 3).state_dict()
    heads = [name for name in source if name.split(".")[0] in ("head", "head_dist", "fc")]
    source |= {name: torch.randn_like(source[name]) for name in heads}  # A new head's bias is 0
    save_file(source, file := tmp_path / "model.safetensors")
    if classes != ("a", "b", "c"):
        (tmp_path / "config.json").write_text('{"label_names": ["cat", "dog", "wolf"]}')
    capsys.readouterr()
    state = build_model(Vit(**recipe, weights=str(file)), len(rows), classes).state_dict()
    assert message in (output := capsys.readouterr().out)
    assert ("class" in output) == bool(message)
    assert len(heads) == (4 if "deit" in model else 2)
    for name in heads:
        assert len(state[name]) == len(rows)
        for row, before in zip(state[name], rows, strict=True):
            is_kept = [torch.equal(row, stored_row) for stored_row in source[name]]
            assert is_kept == [k == before for k in range(3)], name
    assert all(torch.equal(state[name], source[name]) for name in source.keys() - heads)


def test_a_hub_folder_defines_the_preprocessing(tmp_path, capsys):
    """Check that a Hub folder's config.json overrides timm's configuration for the architecture."""
    base = {"input_size": (3, 48, 48), "interpolation": "bilinear", "crop_pct": 0.7, "crop_mode": "squash"}
    base |= {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
    folder = tmp_path / "hub"
    model = timm.create_model("test_vit", img_size=48)
    save_for_hf(model, str(folder), data_config=base, safe_serialization=True)
    recipe = Vit(model="test_vit", weights=str(folder)).resolved()
    assert recipe.image_size == 48
    config = data_config_of(build_model(recipe, 1000), recipe)
    assert (config.mean, config.std, *config.crop[:3]) == (
        base["mean"],
        base["std"],
        "bilinear",
        0.7,
        "squash",
    )
    assert "resamples" not in capsys.readouterr().out
    flags = {"interpolation": "bicubic", "crop_pct": 0.9, "crop_mode": "center"}
    recipe = Vit(model="test_vit", weights=str(folder), image_size=32, **flags).resolved()
    changed = data_config_of(build_model(recipe, 3), recipe)
    assert (changed.crop[:3], changed.mean) == (tuple(flags.values()), base["mean"])
    output = capsys.readouterr().out
    assert "; timm resamples pos_embed to match this model's size; a new head for 3 classes" in output
    with pytest.raises(ValueError, match=r"hub contains a test_vit model, .*\. Use --model test_vit"):
        build_model(Vit(model="test_vit2", weights=str(folder)), 10)


def checkpoint(run: Path, step: int, value: float, ema: float | None = None, **fields) -> Path:
    """Write a checkpoint with all weights set to `value` and all averaged weights set to `ema`."""
    specs = {n: (t.dtype, tuple(t.shape)) for n, t in build_model(Vit(**SMALL), 10).state_dict().items()}
    names = {"model.safetensors": value} | ({} if ema is None else {"ema.safetensors": ema})
    snapshots = {"optimizer.safetensors": Snapshot({}, pinned=False)}
    for name, fill in names.items():
        snapshots[name] = Snapshot(specs, pinned=False)
        for view in snapshots[name].views.values():
            view.fill_(fill)
    return write_checkpoint(
        run / "checkpoints", step, snapshots, {}, {"recipe": {"model": "test_vit"}} | fields
    )


def test_weights_come_from_a_run_a_checkpoint_or_an_exported_folder(tmp_path):
    def first(location: Path) -> float:
        return load_into_model(location)["norm.weight"][0].item()

    run = tmp_path / "run"
    best, latest = checkpoint(run, 10, 1.0, ema=2.0), checkpoint(run, 20, 3.0)
    assert first(run) == 3.0  # Without an index, the newest checkpoint is loaded
    write_step_index(run / "checkpoints", 20, 10)
    assert first(run) == 2.0  # The best checkpoint's averaged weights are loaded
    assert first(best) == 2.0
    assert first(latest) == 3.0
    assert first(best / "model.safetensors") == 1.0
    (tmp_path / "model").mkdir()
    saved(tmp_path / "model" / "model.safetensors")
    assert load_into_model(tmp_path / "model").keys() == load_into_model(best).keys()
    content = bytearray((best / "ema.safetensors").read_bytes())
    content[-1] ^= 1
    (best / "ema.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"--weights .*ema.safetensors does not match the SHA-256"):
        load_into_model(run)


@pytest.mark.parametrize("when", ["while it is verified", "before it is read"])
def test_a_best_checkpoint_that_is_replaced_during_the_read(when, tmp_path, monkeypatch):
    run, checked = tmp_path / "run", weights.verify_checkpoint
    manifest_fields = {"classes": ["a"], "written_by": {"script": "train_vit"}}

    def save(step: int) -> None:
        checkpoint(run, step, 0.0, ema=step, **manifest_fields)
        write_step_index(run / "checkpoints", step, step)

    def replace() -> None:
        save(2)
        remove_checkpoint(run / "checkpoints" / "step_00000001")

    def verify_checkpoint(folder: Path, *heartbeat):
        if when == "while it is verified" and folder.name.endswith("1"):
            replace()
        return checked(folder, *heartbeat)

    save(1)
    monkeypatch.setattr(weights, "verify_checkpoint", verify_checkpoint)
    chosen = weights.find_model(str(run), "best", tmp_path, lambda: None)
    if when == "before it is read":
        replace()
    weights.load_trained(model := build_model(Vit(**SMALL), 10), Path(chosen.weights))
    assert model.norm.weight[0].item() == chosen.step == (2 if when == "while it is verified" else 1)


def test_weights_of_another_model_are_refused_with_the_first_tensor(file, tmp_path):
    with pytest.raises(ValueError, match=r'test_vit2: Missing key\(s\) in state_dict: "reg_token"\. Set'):
        load_into_model(file, model="test_vit2")
    larger = saved(tmp_path / "more.safetensors", unknown=torch.zeros(1))
    with pytest.raises(ValueError, match=r'Unexpected key\(s\) in state_dict: "unknown"\. Set --model'):
        load_into_model(larger)
    best = checkpoint(tmp_path / "run", 10, 1.0)
    with pytest.raises(ValueError, match=r"test_vit2: .*\. Set --model to .* of the weights \(test_vit\)\.$"):
        load_into_model(best, model="test_vit2")
    with pytest.raises(ValueError, match=r"contains neither checkpoints nor model\.safetensors"):
        load_into_model(tmp_path)


@pytest.mark.parametrize(
    "prefix", ["_orig_mod.", "module.", "model.", "module._orig_mod.", "model._orig_mod."]
)
def test_names_of_a_wrapped_model(prefix, file, tmp_path, capsys):
    wrapped = tmp_path / "wrapped.safetensors"
    save_file({f"{prefix}{name}": tensor for name, tensor in load_file(file).items()}, wrapped)
    expected, state = load_into_model(file, classes=3), load_into_model(wrapped, classes=3)
    assert all(torch.equal(state[name], expected[name]) for name in expected if "head" not in name)
    assert (
        f"the prefix {prefix} is removed from all tensor names; a new head for 3" in capsys.readouterr().out
    )
    save_file({"model.norm.weight": torch.zeros(1), "unknown": torch.zeros(1)}, wrapped)
    with pytest.raises(ValueError, match=r"Missing key"):
        load_into_model(wrapped)


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_pickle_is_not_read_and_the_message_converts_it(is_zip, file, tmp_path, monkeypatch):
    state = load_file(file)
    # Some files store non-contiguous tensors.
    state["head.weight"] = state["head.weight"].t().contiguous().t()
    pickle = tmp_path / "their model.pth"
    torch.save({"model": state, "epoch": 3}, pickle, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(ValueError, match="is a pickle file, which can execute code when it is") as raised:
        load_into_model(pickle)
    command = str(raised.value).partition(" container: ")[2]
    words = shlex.split(command)
    assert words[:2] == ["python", "-c"]
    monkeypatch.setattr(sys, "argv", ["-c", *words[3:]])
    exec(words[2], {})
    converted = load_into_model(tmp_path / "their model.safetensors")
    assert all(torch.equal(converted[name], tensor) for name, tensor in state.items())


# --- Layer groups


@pytest.mark.parametrize("model", ["test_vit", "deit_tiny_distilled_patch16_224"])
def test_layers_get_timms_learning_rates(model):
    recipe = Vit(model=model, image_size=32, patch_size=16, layer_decay=0.5, weight_decay=0.1)
    with torch.device("meta"):
        network = build_model(recipe, 10)
    names = {id(p): name for name, p in network.named_parameters()}
    groups = build_optimizer(network, recipe).param_groups
    actual = {names[id(p)]: (g["lr_scale"], g["weight_decay"]) for g in groups for p in g["params"]}
    assert actual.keys() == set(names.values())
    timms = param_groups_layer_decay(network, 0.1, network.no_weight_decay(), layer_decay=0.5)
    assert actual == {names[id(p)]: (g["lr_scale"], g["weight_decay"]) for g in timms for p in g["params"]}
    depth = len(network.blocks)
    assert (actual["head.weight"], actual["head.bias"]) == ((1.0, 0.1), (1.0, 0.0))
    assert actual["norm.weight"] == (0.5, 0.0)  # The norm belongs to the last block's parameter group
    assert actual[f"blocks.{depth - 1}.mlp.fc1.weight"] == (0.5, 0.1)
    assert actual["blocks.0.mlp.fc1.bias"] == (0.5**depth, 0.0)
    assert actual["pos_embed"] == (0.5 ** (depth + 1), 0.0)
    plain_groups = build_optimizer(network, Vit(model=model)).param_groups
    assert [("lr_scale" in group, len(group["params"]) > 0) for group in plain_groups] == [(False, True)] * 2


@pytest.mark.parametrize(
    ("model", "layer_decay"),
    [
        ("test_vit", 1.0),
        ("deit_tiny_distilled_patch16_224", 0.7),
        full("test_vit", 0.7),
        full("eva02_tiny_patch14_224", 1.0),
    ],
)
def test_freeze_trains_only_the_head(model, layer_decay, tmp_path):
    size = {"model": model, "image_size": 56, "patch_size": 14}
    save_file(build_model(Vit(**size), 5).state_dict(), tmp_path / "w.safetensors")
    recipe = Vit(**size, weights=str(tmp_path / "w.safetensors"), freeze=True, layer_decay=layer_decay)
    network = build_model(recipe, 3)
    trained = {name for name, p in network.named_parameters() if p.requires_grad}
    assert {name.partition(".")[0] for name in trained} <= {"head", "head_dist"}
    assert {"head.weight", "head.bias"} <= trained
    groups = build_optimizer(network, recipe).param_groups
    assert sum(len(group["params"]) for group in groups) == len(trained)


def test_a_checkpoints_recipe_builds_the_model_without_its_initial_weights():
    """Build the model of a frozen run without the --weights file, which may be missing on this machine."""
    recipe = {"weights": "gone", "freeze": True, "layer_decay": 0.7, "pretrained": True, **SMALL}
    recipe |= {"half_residual": True}  # Flag that earlier versions defined
    assert parse(Vit, as_flags(json.loads(json.dumps(recipe)), Vit)) == Vit(**SMALL, layer_decay=0.7)
    with pytest.raises(ValueError, match="--freeze trains only the head"):
        Vit(freeze=True)
