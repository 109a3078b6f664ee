"""Tests of model FLOPs, counted in the same way as in torch, and of MFU, based on the table's peak rates."""

from dataclasses import fields
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from onecurve.flags.recipe import parse, without_initial_weights
from onecurve.models.script import load_script, recipe_class
from onecurve.telemetry import flops
from onecurve.telemetry.flops import Utilisation, find_device, flops_per_image, known_devices, peak_flops
from tests.conftest import ROOT, metrics, result, rows_of
from tools.logbook.page import run_page
from tools.logbook.run_record import RunRecord


def test_an_operation_is_an_addition_or_a_multiplication():
    """Check that FLOPs per image exclude the unneeded gradient of the first layer's input."""
    layers = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 8 * 8, 10))
    convolution, linear = 2 * 3 * 4 * 9 * 8 * 8, 2 * 4 * 8 * 8 * 10
    assert flops_per_image(lambda: layers.to("meta"), 8) == 2 * convolution + 3 * linear


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
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=True))
    assert peak_flops("NVIDIA A100-SXM4-80GB", "no") == 156e12
    assert peak_flops("Tesla V100-SXM2-32GB", "no") == 15.7e12
    assert find_device("NVIDIA L40S").name == "NVIDIA L40S"
    assert find_device("NVIDIA A100-SXM4-80GB").memory_gb == 80
    assert find_device("NVIDIA L4").memory_gb == 24
    assert find_device("Tesla V100-PCIE-16GB").name == "Tesla V100-PCIE"


@pytest.mark.parametrize("name", ["NVIDIA L40", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H200 NVL"])
def test_a_longer_device_name_is_another_device(name):
    assert find_device(name) is None


def test_devices_of_several_kinds(capsys):
    peak = flops.total_peak_flops(["NVIDIA H200", "NVIDIA A10G"], "bf16")
    assert peak == 1059.5e12
    assert Utilisation(12.0, peak).mfu_pct(1e12) == pytest.approx(100 * 12e12 / 1059.5e12)
    assert flops.total_peak_flops(["NVIDIA H200", "NVIDIA GeForce GTX 1080"], "bf16") is None
    assert Utilisation(12.0, None).mfu_pct(1e12) is None
    assert "contains no peak performance of NVIDIA GeForce GTX 1080 in this" in capsys.readouterr().out


def test_a_run_on_a_cpu(trained):
    folder, output = trained
    facts = result(folder)
    script = load_script(ROOT / "train_cnn_a.py")
    recipe = recipe_class(script)(widths=(4, 8, 32))
    assert facts["flops_per_image"] == flops_per_image(lambda: script.build_model(recipe, 10), 32)
    assert (facts["peak_flops"], facts["mfu_pct"]) == (None, None)
    assert not any("train/mfu_pct" in line for line in metrics(folder))
    assert "MFU" not in output
    text = run_page(RunRecord(folder), "x", [])
    assert " FLOP per image |" in text


SMALL = {"train_cnn_a": [], "train_cnn_b": ["--width=8"]}
SMALL |= {"train_vit": ["--model=test_vit", "--image_size=32", "--patch_size=8"]}


@pytest.mark.parametrize("name", SMALL)
def test_every_boolean_flag_leaves_the_operations_countable(name, capsys):
    script = load_script(ROOT / f"{name}.py")
    recipe_type = recipe_class(script)
    switches = [field.name for field in fields(recipe_type) if "bool" in str(field.type)]
    assert "deterministic" in switches
    for switch in switches:
        other_flags = ["--pretrained"] if switch == "freeze" else []
        recipe = parse(recipe_type, [*SMALL[name], f"--{switch}", *other_flags])
        build_model = partial(script.build_model, without_initial_weights(recipe), 10)
        utilisation = flops.utilisation_of_run(build_model, recipe.image_size, ["NVIDIA H200"], "bf16")
        assert capsys.readouterr().out == "", switch
        assert utilisation.mfu_pct(1e6) > 0, switch
