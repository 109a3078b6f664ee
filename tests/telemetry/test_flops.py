"""Model FLOPs and MFU: counted as torch counts them, against the table of devices."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from common.script import load_script, recipe_class
from common.telemetry import flops
from common.telemetry.flops import Utilisation, find_device, flops_per_image, known_devices, peak_flops
from tests.conftest import ROOT, metrics, result, rows_of
from tools.logbook.page import page
from tools.logbook.record import RunRecord

MODELS = {
    "train_cnn_a": {},
    "train_cnn_b": {"width": 8},
    "train_vit": {"model": "test_vit", "image_size": 32, "patch_size": 8},
}


@pytest.mark.parametrize("name", MODELS)
def test_the_count_is_that_of_torch(name):
    script = load_script(ROOT / f"{name}.py")
    recipe = recipe_class(script)(**MODELS[name])

    def build():
        return script.build_model(recipe, 10)

    with torch.device("meta"):
        model, images = build(), torch.zeros(2, 3, recipe.image_size, recipe.image_size)
    with FlopCounterMode(display=False) as counter:
        model(images).sum().backward()
    assert flops_per_image(build, recipe.image_size) == counter.get_total_flops() / 2 > 0


def test_every_device_has_a_source():
    assert len(known_devices()) >= 10
    for device in known_devices():
        assert device.source.startswith("https://"), device.name
        assert device.peaks["fp32"] < 100 < 200 < device.memory_gb_s < 10_000, device.name
        assert 8 <= device.memory_gb < 200, device.name


@pytest.mark.parametrize(("name", "precision", "expected"), rows_of("peaks of devices"))
def test_peaks(name, precision, expected):
    assert peak_flops(name, precision) == expected


def test_tf32_counts_where_torch_may_use_it_and_the_longest_name(monkeypatch):
    monkeypatch.setattr(flops, "uses_tf32", lambda: True)
    assert peak_flops("NVIDIA A100-SXM4-80GB", "no") == 156e12
    assert peak_flops("Tesla V100-SXM2-32GB", "no") == 15.7e12
    assert find_device("NVIDIA L40S").name == "NVIDIA L40S"
    assert find_device("NVIDIA A100-SXM4-80GB").memory_gb == 80
    assert find_device("NVIDIA L4").memory_gb == 24


def test_devices_of_several_kinds(capsys):
    def of(*devices):
        return Utilisation(lambda: nn.Sequential(nn.Flatten(), nn.Linear(3, 1)), 1, devices, "bf16")

    both = of("NVIDIA H200", "NVIDIA A10G")
    assert both.facts(1e12) == {
        "flops_per_image": 12,
        "peak_flops": 1059.5e12,
        "mfu_pct": pytest.approx(100 * 12e12 / 1059.5e12),
    }
    unknown = of("NVIDIA H200", "NVIDIA GeForce GTX 1080").facts(1e12)
    assert (unknown["peak_flops"], unknown["mfu_pct"]) == (None, None)
    assert "no MFU: NVIDIA GeForce GTX 1080 is not in " in capsys.readouterr().out


def test_a_run_on_a_cpu(trained):
    folder, output = trained
    found = result(folder)
    script = load_script(ROOT / "train_cnn_a.py")
    recipe = recipe_class(script)(widths=(4, 8, 32))
    assert found["flops_per_image"] == flops_per_image(lambda: script.build_model(recipe, 10), 32)
    share = found["images_per_s"] * found["flops_per_image"] / found["peak_flops"]
    assert found["mfu_pct"] == pytest.approx(100 * share)
    last = [line for line in metrics(folder) if "train/loss" in line][-1]
    share = last["train/images_per_s"] * found["flops_per_image"] / found["peak_flops"]
    assert last["train/mfu_pct"] == pytest.approx(100 * share)
    assert f"MFU {last['train/mfu_pct']:.1f} %" in output
    text = page(RunRecord(folder), "x", [])
    assert f"FLOP per image: MFU {found['mfu_pct']:.1f} % of " in text
