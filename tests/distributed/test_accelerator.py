"""Tests of decisions made before the first process group: devices, precision and DeepSpeed's config."""

import logging

import pytest
import torch
from accelerate import Accelerator

from onecurve.distributed import accelerator, devices, precision
from onecurve.distributed.devices import check_devices
from onecurve.flags.recipe import share_out
from onecurve.run.ending import is_out_of_memory, out_of_memory_message
from onecurve.system.processes import Ancestor


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in ("MIXED_PRECISION", "USE_DEEPSPEED", "CONFIG_DS_FIELDS", "USE_CPU"):
        monkeypatch.delenv(f"ACCELERATE_{name}", raising=False)


def simulate_gpus(monkeypatch, count, capability=(9, 0)):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=0: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=0: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90"])


def test_too_few_gpus(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    simulate_gpus(monkeypatch, 2)
    with pytest.raises(ValueError, match="4 processes were started on this host, which has 2 GPUs") as error:
        check_devices()
    assert "Start 2 per host with accelerate's --num_processes, torchrun's --nproc_per_node" in str(
        error.value
    )
    assert "CUDA_VISIBLE_DEVICES=" in str(error.value)
    for enough in (0, 4, 8):  # On a host without GPUs, the job is a rehearsal
        simulate_gpus(monkeypatch, enough)
        check_devices()


# Compute capability of each simulated host's GPU, and whether the host's CPU supports bf16 natively
HOSTS = {"new gpu": ((9, 0), False), "old gpu": ((7, 5), True), "old cpu": (None, False)}
IN_FP32 = "training in fp32, because the launcher sets mixed precision to no"


@pytest.mark.parametrize(
    ("flag", "launcher", "host", "expected", "message"),
    [
        (None, None, "new gpu", "bf16", ""),
        (None, None, "old gpu", "no", ""),
        (None, None, "old cpu", "no", ""),
        (None, "no", "new gpu", "no", IN_FP32),  # Without a config, accelerate launch passes "no"
        ("no", "no", "new gpu", "no", ""),
        (None, "no", "old gpu", "no", ""),  # GPU without support for bf16
        (None, "bf16", "old gpu", "fp16", "fp16 instead of the config's bf16"),  # GPU that would emulate bf16
        (
            "bf16",
            "bf16",
            "old gpu",
            "bf16",
            "this GPU does not support bf16",
        ),  # The flag overrides the config
        (None, "bf16", "old cpu", "no", "this CPU does not support"),  # A rehearsal with a config for GPUs
        ("bf16", "no", "old cpu", "bf16", ""),
        ("no", "bf16", "new gpu", "no", ""),
        ("fp16", None, "old gpu", "fp16", ""),
        ("fp16", None, "old cpu", "fp16", "fp16 is slow on a CPU"),
        (None, "bf16, use_cpu", "old gpu", "bf16", ""),  # cpu.yaml selects the CPU
        (None, "bf16, use_cpu", "new gpu", "no", "this CPU does not support bf16"),
    ],
)
def test_precision(flag, launcher, host, expected, message, monkeypatch, capsys):
    """Simulate the GPU and CPU properties that torch reports, and check the selected precision."""
    capability, on_cpu = HOSTS[host]
    simulate_gpus(monkeypatch, 1 if capability else 0, capability)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: on_cpu)
    if launcher:
        launcher_precision, _, use_cpu = launcher.partition(", ")
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher_precision)
        monkeypatch.setenv("ACCELERATE_USE_CPU", str(bool(use_cpu)))
    assert precision.chosen_precision(flag) == expected
    output = capsys.readouterr().out
    assert message in output
    assert bool(message) == bool(output)


LAUNCH = "python -m accelerate.commands.launch"


@pytest.mark.parametrize(
    ("parent", "fields", "expected", "is_reported"),
    [
        # accelerate passes "no" although the user did not choose a precision
        (f"{LAUNCH} --config_file a.yaml s.py", "zero_stage", "bf16", False),
        ("python /bin/accelerate launch s.py", "", "bf16", False),
        (f"{LAUNCH} --mixed_precision no s.py", "", "no", False),
        (f"{LAUNCH} --mixed-precision=no s.py", "", "no", False),
        ("python /bin/accelerate launch --mixed_precision no s.py", "", "no", False),
        # The user's accelerate config sets the precision
        (f"{LAUNCH} s.py", "zero_stage,mixed_precision", "no", False),
        ("nsys profile python s.py", "", "bf16", True),  # A wrapper program hides the launcher
    ],
)
def test_accelerates_default_precision_with_a_deepspeed_file(
    parent, fields, expected, is_reported, monkeypatch, capsys
):
    simulate_gpus(monkeypatch, 1)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", fields)
    monkeypatch.setattr(precision, "ancestors", lambda: [Ancestor(None, parent.split())])
    assert precision.chosen_precision(None) == expected
    assert ("training in bf16" in capsys.readouterr().out) == is_reported


def test_deepspeeds_config_gets_the_recipes_numbers(capsys):
    config = {"train_batch_size": "auto", "gradient_clipping": 1.0}
    accelerator._fill_deepspeed_config(config, share_out(64, 8, 2), clip_norm=0.0)
    warning = logging.makeLogRecord({"msg": "**** You are using ZeRO with an untested optimizer"})
    # The warning is filtered, because the config allows untested optimizers
    assert not logging.getLogger("DeepSpeed").filter(warning)
    sizes = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4}
    assert (sizes | {"gradient_clipping": 0.0}).items() <= config.items()
    remark = "replacing gradient_clipping 1.0 in the DeepSpeed config with the recipe's value, 0.0\n"
    assert capsys.readouterr().out == remark


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"), True),
        # cuDNN error message
        (RuntimeError("GET was unable to find an engine to execute this computation"), True),
        (RuntimeError("NCCL Error 1: Failed to CUDA calloc async 608 bytes"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."), True),
        (MemoryError(), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"), False),
        (ValueError("out of memory"), False),
        (None, False),
    ],
)
def test_out_of_memory_errors_are_recognised(error, expected):
    assert is_out_of_memory(error) == expected


def test_an_error_that_does_not_mention_memory_is_quoted():
    """Check that the message quotes an error that may not be a memory error, such as an unsupported type."""
    batch, on_cpu = share_out(64, 32, 1), Accelerator(cpu=True)
    error = RuntimeError("GET was unable to find an engine to execute this computation\nC++ stack")
    message = out_of_memory_message(on_cpu, batch, error)
    assert message.startswith("out of memory on CPU")
    assert "Try --per_device_batch_size 16" in message
    assert message.endswith(". The error was: GET was unable to find an engine to execute this computation")
    assert "The error was" not in out_of_memory_message(
        on_cpu, batch, RuntimeError("CUDA error: out of memory")
    )
    assert "The error was" not in out_of_memory_message(on_cpu, batch, MemoryError())


def test_no_more_threads_than_cores(monkeypatch):
    """Check that a process uses only the cores that its container may use, although accelerate counts all
    cores.
    """
    before = torch.get_num_threads()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(devices, "allowed_cores", lambda: 1)
    try:
        torch.set_num_threads(2)
        devices.use_all_cores()
        assert torch.get_num_threads() == 1
        monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
        torch.set_num_threads(2)
        devices.use_all_cores()
        assert torch.get_num_threads() == 2  # With plain `python`, only the user can have set the variable
        monkeypatch.delenv("OMP_NUM_THREADS")
        devices.use_all_cores()
        assert torch.get_num_threads() == 1  # torch ignores a container's CPU quota
    finally:
        torch.set_num_threads(before)
