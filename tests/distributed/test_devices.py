"""Tests that a host is refused if torch can't use its GPUs.

The tests simulate the driver by replacing functions of pynvml.
"""

import json
import os
import threading

import pynvml
import pytest
import torch
import torch.distributed as dist

from onecurve.distributed.channel import Channel
from onecurve.distributed.devices import check_devices, refuse_shared_gpu
from onecurve.distributed.launch_config import check_launch_config
from onecurve.system import gpus
from onecurve.system.env import LOCAL_NUMBER_VARIABLE, is_hosts_first, local_rank
from tests.conftest import CNN, accelerate, python, run, torchrun
from tests.distributed.test_accelerator import simulate_gpus


@pytest.fixture
def driver(monkeypatch):
    """Return driver(count, cuda), which simulates a host with `count` T4 GPUs.

    `cuda` is the CUDA version that the driver supports, for example 12020 for CUDA 12.2.
    """
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.2")

    def simulate(count: int = 4, cuda: int = 12020, error: int | None = None) -> None:
        def start() -> None:
            if error:
                raise pynvml.NVMLError(error)

        answers = {
            "nvmlInit": start,
            "nvmlShutdown": lambda: None,
            "nvmlSystemGetCudaDriverVersion_v2": lambda: cuda,
            "nvmlSystemGetDriverVersion": lambda: "535.183.01",
            "nvmlDeviceGetCount": lambda: count,
            "nvmlDeviceGetHandleByIndex": lambda number: number,
            "nvmlDeviceGetName": lambda handle: "Tesla T4",
            "nvmlDeviceGetCudaComputeCapability": lambda handle: (7, 5),
        }
        others = ("MemoryInfo", "ComputeRunningProcesses", "P2PStatus")
        answers |= {f"nvmlDeviceGet{name}": not_supported for name in others}
        for name, answer in answers.items():
            monkeypatch.setattr(pynvml, name, answer)

    return simulate


def not_supported(*_):
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


VISIBLE = "CUDA_VISIBLE_DEVICES"
MISMATCH, NO_LIBRARY = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, pynvml.NVML_ERROR_LIBRARY_NOT_FOUND


@pytest.mark.parametrize(
    ("simulated", "visible", "torchs_cuda", "message"),
    [
        (
            {},
            None,
            "13.2",
            "4 GPUs .Tesla T4.: driver 535.183.01 supports CUDA up to 12.2.*13.2.*driver 580 or",
        ),
        ({"cuda": 13000}, None, None, "the installed torch was built without CUDA"),
        ({"error": MISMATCH}, None, "13.2", "does not respond"),  # The driver was updated but not reloaded
        ({"cuda": 13000}, "7", "13.2", "CUDA_VISIBLE_DEVICES=7 selects none of the host's GPUs"),
        # Error message from torch
        ({"cuda": 13000}, None, "13.2", r"Error 802: system not yet initialized\. "),
    ],
)
def test_gpus_that_torch_cannot_use(simulated, visible, torchs_cuda, message, driver, monkeypatch):
    def fail() -> None:
        raise RuntimeError("Error 802: system not yet initialized\nand more")

    driver(**simulated)
    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.setattr(torch.version, "cuda", torchs_cuda)
    if visible:
        monkeypatch.setenv(VISIBLE, visible)
    with pytest.raises(ValueError, match=f"^torch can't use this host's .*{message}") as error:
        check_devices()
    assert "To rehearse on the CPU, put CUDA_VISIBLE_DEVICES=" in str(error.value)


@pytest.mark.parametrize(
    ("variable", "value", "error"),
    [
        (VISIBLE, "", None),
        (VISIBLE, "-1", None),
        (VISIBLE, "NoDevFiles", None),  # Slurm sets this value on hosts without GPUs
        ("ACCELERATE_USE_CPU", "True", None),
        ("", "", NO_LIBRARY),  # The host has no GPUs
        ("", "", pynvml.NVML_ERROR_DRIVER_NOT_LOADED),
    ],
)
def test_a_requested_rehearsal(variable, value, error, driver, monkeypatch):
    driver(error=error)
    if variable:
        monkeypatch.setenv(variable, value)
    check_devices()


def test_a_gpu_that_torch_has_no_code_for(monkeypatch):
    simulate_gpus(monkeypatch, 1, (7, 0))
    with pytest.raises(ValueError, match=r"only sm_75, sm_80, sm_90, but GPU 0 \(a GPU\) .*7\.0"):
        check_devices()
    simulate_gpus(monkeypatch, 1, (8, 9))  # GPU that runs code compiled for sm_80
    check_devices()


ON_ONE_HOST = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", VISIBLE: "3"}


@pytest.mark.parametrize(
    "launcher",
    [
        # Variables that torchrun sets with --virtual-local-rank
        {"LOCAL_RANK": "0", "GROUP_WORLD_SIZE": "1"},
        # Variables in a Slurm job with --gpus-per-task=1, where the user sets LOCAL_RANK
        {"LOCAL_RANK": "1"},
    ],
)
def test_each_process_sees_only_its_gpu(launcher, monkeypatch):
    simulate_gpus(monkeypatch, 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: [(9, 0)][device])
    monkeypatch.setenv(LOCAL_NUMBER_VARIABLE, "")  # Makes monkeypatch remove the variable after the test
    for name, value in (ON_ONE_HOST | launcher).items():
        monkeypatch.setenv(name, value)
    check_devices()
    assert os.environ["LOCAL_RANK"] == "0"  # Accelerate and DeepSpeed must use device 0
    assert (local_rank(), is_hosts_first()) == (1, False)


def test_hosts_with_unequal_numbers_of_gpus(monkeypatch):
    """Check the first process of a host with two GPUs. The preceding host has one GPU."""
    for name, text in (ON_ONE_HOST | {"GROUP_WORLD_SIZE": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}).items():
        monkeypatch.setenv(name, text)
    assert is_hosts_first()


def test_two_processes_on_one_gpu_are_refused():
    store, errors = dist.HashStore(), {}

    def check(number: int, gpu: str) -> None:
        try:
            refuse_shared_gpu(Channel(store), number, 3, gpu)
        except ValueError as error:
            errors[number] = str(error)

    threads = [threading.Thread(target=check, args=(k, gpu)) for k, gpu in enumerate(("a", "b", "a"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(errors) == [0, 2]
    assert "ranks 0 and 2 use the same GPU. Start only one process per GPU" in errors[0]


@pytest.mark.full
def test_start_lines_appear_once_if_local_rank_is_0_in_each_process(tmp_path, cache):
    """Start a rehearsal in which torchrun distributes the listed devices among the processes."""
    words = [*torchrun(2, "--standalone", "--virtual-local-rank"), *CNN]
    words += ["--data", "digits", "--max_steps", "1"]
    output = run([*words, *cache, "--output_dir", tmp_path / "run"], env={VISIBLE: "-1,-1"})
    assert output.count("rehearsal on CPU: 2 gloo processes") == 1
    assert output.count("ddp, batch") == 1
    assert len(list((tmp_path / "run").glob("telemetry-*.jsonl"))) == 1


def test_an_unsupported_query_does_not_affect_the_others(driver):
    driver(count=2)
    host_gpus = gpus.list_gpus()
    assert (host_gpus.driver, host_gpus.driver_cuda, host_gpus.problem) == ("535.183.01", (12, 2), None)
    assert [gpu["name"] for gpu in host_gpus.gpus] == ["Tesla T4", "Tesla T4"]
    assert host_gpus.gpus[0]["memory_gib"] is None
    assert host_gpus.gpus[0]["capability"] == [7, 5]


def test_the_installed_torchs_cuda_is_read_without_torch():
    assert gpus.torch_cuda() == torch.version.cuda


WITHOUT_DEEPSPEED = """
import importlib.metadata, sys

def version(name, installed_version=importlib.metadata.version):
    if name == "deepspeed":
        raise importlib.metadata.PackageNotFoundError(name)
    return installed_version(name)

importlib.metadata.version, sys.modules["deepspeed"] = version, None
"""


@pytest.mark.full
@pytest.mark.real_processes
@pytest.mark.parametrize("launcher", [python(), accelerate("fsdp_2gpu")], ids=["single", "fsdp"])
def test_other_strategies_work_without_deepspeed(launcher, tmp_path, cache):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_DEEPSPEED)
    words = ["train_cnn_a.py", "--data", "digits", "--max_steps", 1, "--output_dir", tmp_path / "run", *cache]
    run([*launcher, *words], env={"PYTHONPATH": str(tmp_path)})
    assert "deepspeed" not in json.loads((tmp_path / "run" / "recipe.json").read_text())["versions"]


@pytest.mark.parametrize("flag", [None, "ds_configs/zero2.json"])
def test_zero_without_deepspeed(flag, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    env = {"ACCELERATE_USE_DEEPSPEED": "false" if flag else "true"}
    with pytest.raises(ValueError, match="ZeRO needs DeepSpeed, which is not installed"):
        check_launch_config(env, 2, deepspeed_config_file=flag)
