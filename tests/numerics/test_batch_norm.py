"""Tests that only micro-batch 0 updates the running statistics of torch's and timm's BatchNorm."""

import pytest
import timm
import torch
from accelerate.utils import GradientAccumulationPlugin
from torch import nn

from onecurve.distributed.accelerator import prepare
from onecurve.distributed.job_accelerator import JobAccelerator
from onecurve.distributed.strategy_layouts import layout_of
from tests.conftest import HALF_THE_CORES, accelerate, copy_project, full, mutate, python, run
from tests.distributed.test_parity import FLAGS, assert_same_training

ACCUMULATIONS = 2


@pytest.fixture
def accelerator():
    plugin = GradientAccumulationPlugin(num_steps=ACCUMULATIONS, sync_with_dataloader=False)
    return JobAccelerator(cpu=True, gradient_accumulation_plugin=plugin)


def small_timm_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=10, drop_path_rate=0.5, drop_rate=0.5)


MODELS = [("test_resnet", True), ("test_byobnet", False), ("test_efficientnet", False)]
MODELS += [full(name, not checkpointed) for name, checkpointed in MODELS]


@pytest.mark.parametrize(("name", "checkpointed"), MODELS)
def test_statistics_follow_the_first_micro_batch_of_each_step(name, checkpointed, accelerator):
    plain, model = small_timm_model(name), small_timm_model(name)
    names = list(model.state_dict())
    accelerator.grad_checkpointing = checkpointed
    model, optimizer = prepare(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1))
    forwards = torch.Generator().manual_seed(0)
    for k in range(3 * ACCUMULATIONS):
        images = torch.randn(4, 3, 32, 32, generator=forwards).to(memory_format=torch.channels_last)
        with accelerator.accumulate(model):
            torch.manual_seed(k)
            accelerator.backward(model(images).square().mean())
            drawn = torch.rand(())
            optimizer.step()
            optimizer.zero_grad()
        if k % ACCUMULATIONS == 0:  # Result that torch's layers compute for this micro-batch
            torch.manual_seed(k)
            plain.train()(images)
            assert torch.rand(()) == drawn  # Recomputing activations leaves the random numbers unchanged
        else:
            trained = dict(model.named_parameters())
            with torch.no_grad():
                for parameter_name, parameter in plain.named_parameters():
                    parameter.copy_(trained[parameter_name])
    assert list(model.state_dict()) == names
    assert dict(layout_of(model, optimizer).buffers()).keys() == dict(plain.named_buffers()).keys()
    for buffer_name, buffer in plain.named_buffers():
        torch.testing.assert_close(model.state_dict()[buffer_name], buffer, msg=buffer_name)
    images = torch.randn(4, 3, 32, 32, generator=forwards)
    torch.testing.assert_close(model.eval()(images), plain.eval()(images), rtol=1e-3, atol=1e-3)


def test_a_frozen_layer_keeps_its_statistics(accelerator):
    """Check that a frozen layer's results in training and evaluation are independent of the batch."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))
    model[:2].requires_grad_(False)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model, optimizer = prepare(accelerator, model, torch.optim.SGD(model[3].parameters(), lr=0.1))
    images = torch.randn(4, 3, 8, 8) + 3
    torch.testing.assert_close(model(images)[:2], model(images[:2]))
    accelerator.backward(model(images).square().mean())
    optimizer.step()
    for name, buffer in before.items():
        assert torch.equal(model.state_dict()[name], buffer), name
    torch.testing.assert_close(model(images), model.eval()(images))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.SyncBatchNorm(4), "the running statistics of the model's SyncBatchNorm layers would depend"),
        (nn.BatchNorm2d(4, momentum=None), "the model contains a BatchNorm2d layer without momentum"),
    ],
)
def test_other_statistics_are_refused(layer, message, accelerator):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), layer)
    with pytest.raises(ValueError, match=message):
        prepare(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1))


TIMM = ["train_cnn_b.py", "--data", "digits", *FLAGS]


@pytest.fixture(scope="module")
def timm_script(tmp_path_factory):
    """Copy the project with a timm model as CNN-B. Its script does not mention BatchNorm or blocks."""
    project = copy_project(tmp_path_factory.mktemp("timm") / "project")
    project_model = "    return ResNet18(recipe.width, recipe.stem, classes, recipe.blurpool)\n"
    timm_model = "    return __import__('timm').create_model('test_efficientnet', num_classes=classes)\n"
    mutate(project, "train_cnn_b.py", project_model, timm_model)
    # FSDP and ZeRO can't use the channels_last format. Sums in this format round differently, which changes
    # the loss by 1.1e-5 by step 4.
    layout_condition = 'if strategy(accelerator) in ("single", "ddp") and not accelerator.deterministic:'
    mutate(project, "onecurve/distributed/accelerator.py", layout_condition, "if False:")
    return project


@pytest.fixture(scope="module")
def one_process(timm_script, tmp_path_factory, cache):
    folder = tmp_path_factory.mktemp("one") / "run"
    run([*python(), *TIMM, *cache, "--output_dir", folder], cwd=timm_script, env=HALF_THE_CORES)
    return folder


CHECKPOINTED = ["--grad_checkpointing"]
CONFIGS = [("ddp_2gpu", CHECKPOINTED), *(full(*row) for row in (("fsdp_2gpu", []), ("zero2_2gpu", [])))]


@pytest.mark.parametrize(("config", "flags"), [*CONFIGS, full("zero3_4gpu", CHECKPOINTED)])
def test_a_timm_model_trains_the_same_on_two_processes(
    config, flags, timm_script, one_process, tmp_path, cache
):
    launcher = accelerate(config, "--num_processes", "2")
    run([*launcher, *TIMM, *cache, *flags, "--output_dir", tmp_path / "run"], cwd=timm_script)
    assert_same_training(tmp_path / "run", one_process)
