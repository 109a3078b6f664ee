"""One Accelerator, whoever launched us, on GPUs or as a rehearsal on CPU."""

import contextlib
import ctypes
import hashlib
import os
import platform
import re
import sys
from collections.abc import Callable
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin, DistributedDataParallelKwargs, PartialState
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import (
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    TorchDynamoPlugin,
)
from torch import nn

from common.batch_norm import RunningStatistics
from common.distributed.activation_checkpointing import checkpoint_activations
from common.distributed.agreement import agree
from common.distributed.answers import (
    check_answers,
    check_device_kind,
    check_wrapped_classes,
    enabled_precision,
    settle_answers,
)
from common.distributed.compilation import asked_for, compile_blocks
from common.distributed.preemption import ready, watch
from common.recipe import Batch, Job, recipe_part, share_out
from common.system.env import launched, processes_per_host, rank, world_size
from common.system.network import interface_to
from common.system.paths import ROOT


def start(job: Job, clip_norm: float = 0.0) -> tuple[Accelerator, Batch]:
    """The Accelerator and this job's batch arithmetic. clip_norm is for DeepSpeed's engine; 0 does not clip.

    Raises ValueError when the launcher's config has an answer that is not supported, the batch does not
    divide, GPUs are too few, or processes disagree.
    """
    deepspeed = check_answers(
        os.environ, world_size(), deepspeed_config=job.deepspeed_config, precision=job.mixed_precision
    )
    batch = share_out(job.batch_size, job.per_device_batch_size, world_size(), job.unit)
    watch(job.timeout_s)
    _check_devices()
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"  # deepspeed reads it on import, and Accelerate imports deepspeed
    rehearsal = "LOCAL_RANK" in os.environ and not torch.cuda.is_available()
    if job.deepspeed_config:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    remarks = settle_answers(rehearsal)
    if rehearsal:
        _rehearse_on_cpu()
    compilation = asked_for(job.compile)
    _name_interface()
    _meet_again(job.timeout_s)
    accelerator = Accelerator(
        mixed_precision=_precision(job.mixed_precision or enabled_precision(deepspeed)),
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=deepspeed) if job.deepspeed_config else None,
        dynamo_plugin=TorchDynamoPlugin(backend="no"),  # prepare() compiles, block by block
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=batch.accumulations, sync_with_dataloader=False
        ),
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=timedelta(seconds=job.timeout_s)),
            # Buckets are the gradients themselves: no copy, a gradient's memory saved.
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
        ],
    )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        _fill_deepspeed_config(accelerator.state.deepspeed_plugin.deepspeed_config, batch, clip_norm)
    accelerator.compilation = compilation
    accelerator.grad_checkpointing = job.grad_checkpointing
    if accelerator.distributed_type == DistributedType.FSDP:
        plugin = accelerator.state.fsdp_plugin
        accelerator.grad_checkpointing |= bool(plugin.activation_checkpointing)
        plugin.activation_checkpointing = False  # prepare() does it
    if compilation and strategy(accelerator) == "zero3":
        raise ValueError(
            f"--compile {compilation} (dynamo_backend): ZeRO-3 gathers parameters inside of each block, which"
            " does not compile; choose --compile no, ZeRO-2 or FSDP"
        )
    if accelerator.device.type == "cpu":
        _use_all_cores()
        _keep_freed_memory()
        if precision(accelerator) == "fp16" and accelerator.distributed_type != DistributedType.DEEPSPEED:
            # As Accelerate does on a GPU; on a CPU it would compute in fp32 without a word.
            accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu")
    blocks = {"compile": str(compilation), "grad_checkpointing": accelerator.grad_checkpointing}
    code = {"script and common/": _code_hash(), **versions()}
    agree(accelerator, {**code, "recipe": recipe_part(job), **blocks})
    if rehearsal:
        accelerator.print(f"rehearsal on CPU: {batch.processes} gloo processes stand for as many GPUs")
    for remark in remarks:
        accelerator.print(remark)
    extras = f", compiled ({compilation})" if compilation else ""
    extras += ", activation checkpointing" if accelerator.grad_checkpointing else ""
    accelerator.print(f"{strategy(accelerator)}, {batch}, mixed precision {precision(accelerator)}{extras}")
    ready()
    return accelerator, batch


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, AcceleratedOptimizer]:
    """accelerator.prepare, after a check that all processes made the same weights.

    The model's `_no_split_modules` names the classes that FSDP wraps one by one; the same blocks are compiled
    and checkpointed, where that is asked for. BatchNorm gets running statistics as common.batch_norm says.
    """
    agree(accelerator, {"initial weights": _checksum(model)})
    check_wrapped_classes(model)
    if strategy(accelerator) in ("single", "ddp"):  # FSDP and ZeRO lay parameters out flat
        model = model.to(memory_format=torch.channels_last)
    statistics = RunningStatistics(model)
    if accelerator.compilation:
        compile_blocks(model, accelerator.compilation)
    if accelerator.grad_checkpointing:
        checkpoint_activations(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    statistics.follow(accelerator, plain_module(model))
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        plain_module(model).register_forward_pre_hook(_cast_inputs(precision(accelerator)))
        if precision(accelerator) == "fp16":
            # Run finds a loss that is not finite, and says more than DeepSpeed's traceback would.
            optimizer.optimizer.loss_scaler.raise_error_at_min_scale = False
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model.forward_sync_buffers = False  # common.evaluation broadcasts them where they are used
        _refuse_missing_gradients(model.module, optimizer.optimizer)
    model.train()
    return model, optimizer


def _refuse_missing_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Has the optimizer's first step raise ValueError where a trained parameter has no gradient.

    DDP averages no gradient of a bucket in which one is missing. It says so itself, but at the next forward,
    after a step by gradients that differ between the processes.
    """

    def check(stepping: torch.optim.Optimizer, *_) -> None:
        if stepping is not optimizer:  # a copy, which is tried before the training
            return
        hook.remove()
        if missing := [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]:
            raise ValueError(without_gradient(missing))

    hook = optimizer.register_step_pre_hook(check)


def unused_parameters(error: BaseException | None, parameters: list[str]) -> list[str]:
    """The names in DDP's own error about them, which comes when a gradient is missing in a later step."""
    found = re.search(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)", str(error))
    return [parameters[int(i)] for i in found[1].split()] if found else []


def without_gradient(names: list[str]) -> str:
    return (
        f"under DDP every trained parameter needs a gradient in each step, and {', '.join(names)} had none:"
        " set its requires_grad to False, or train with FSDP or ZeRO"
    )


def plain_module(model: nn.Module) -> nn.Module:
    """The model inside of DDP or DeepSpeed; unwrap_model would import deepspeed."""
    while type(model).__name__ in ("DistributedDataParallel", "DeepSpeedEngine"):
        model = model.module
    return model


def strategy(accelerator: Accelerator) -> str:
    """single, ddp, fsdp, zero1, zero2 or zero3."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return f"zero{accelerator.state.deepspeed_plugin.zero_stage}"
    return {DistributedType.NO: "single", DistributedType.FSDP: "fsdp"}.get(
        accelerator.distributed_type, "ddp"
    )


def sharding(accelerator: Accelerator) -> dict[str, Any]:
    """How FSDP or ZeRO divides the model, in the words of their configs; empty where each has it whole."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        config = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
        plain = {name: value for name, value in config.items() if not isinstance(value, dict)}
        parts = ("offload_optimizer", "offload_param")
        return plain | {name: config.get(name, {}).get("device", "none") for name in parts}
    if accelerator.distributed_type != DistributedType.FSDP:
        return {}
    from torch.distributed.fsdp import CPUOffloadPolicy

    plugin, sizes = accelerator.state.fsdp_plugin, accelerator.parallelism_config
    hybrid = sizes is not None and sizes.dp_replicate_size > 1
    return {
        "reshard_after_forward": plugin.reshard_after_forward,
        "offload_params": isinstance(plugin.cpu_offload, CPUOffloadPolicy),
        "replicas": sizes.dp_replicate_size if hybrid else 1,
    }


def precision(accelerator: Accelerator) -> str:
    """no, bf16 or fp16; under DeepSpeed it is the engine's."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        return next((kind for kind in ("bf16", "fp16") if config.get(kind, {}).get("enabled") is True), "no")
    return accelerator.mixed_precision


def device_name(accelerator: Accelerator) -> str:
    return (
        torch.cuda.get_device_name() if accelerator.device.type == "cuda" else f"CPU ({platform.machine()})"
    )


def versions() -> dict[str, str]:
    """Versions of the packages that affect results or communication."""
    packages = {name: version(name) for name in ("torch", "accelerate", "deepspeed", "timm", "numpy")}
    return {"python": platform.python_version(), **packages}


def _launched_with(plugin: str) -> bool:
    return os.environ.get(f"ACCELERATE_USE_{plugin}", "false").lower() == "true"


def _check_devices() -> None:
    check_device_kind()
    gpus, processes = torch.cuda.device_count(), processes_per_host()
    if 0 < gpus < processes:
        raise ValueError(
            f"{processes} processes were started on this host, which has {gpus} GPU{'s' if gpus > 1 else ''}:"
            f" set num_processes to {gpus} per host (--num_processes {gpus}), take another file of"
            " accelerate_configs/, or rehearse on CPU by CUDA_VISIBLE_DEVICES= before the same command"
        )


def _name_interface() -> None:
    """On several hosts gloo would take the address of the host's name, on Debian 127.0.1.1.

    It carries signals beside NCCL, and everything in a rehearsal: over the interface with the route to the
    master, unless GLOO_SOCKET_IFNAME says otherwise.
    """
    if world_size() == processes_per_host() or "MASTER_ADDR" not in os.environ:
        return
    with contextlib.suppress(ValueError):
        name, mine = interface_to(os.environ["MASTER_ADDR"])
        # The master may know its own name as a loopback address: there gloo finds another.
        if not mine.startswith("127."):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _meet_again(timeout_s: int) -> None:
    """After a restart by torchrun, in a corner of its store that the processes before have not written to.

    torch 2.15 keeps the store and its keys: who reads there the address of a dead process can't connect.
    """
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if restarts and world_size() > 1:
        timeout = timedelta(seconds=timeout_s)
        store, rank, processes = next(dist.rendezvous("env://", timeout=timeout))
        store = dist.PrefixStore(f"restart_{restarts}", store)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=processes, timeout=timeout)


def _rehearse_on_cpu() -> None:
    """Lets Accelerate run DDP, FSDP2 and DeepSpeed on gloo processes, from the config files meant for GPUs.

    Accelerate 1.15 looks for a GPU in these two methods alone; finding none, it would take each process for a
    job of its own.
    """
    if _launched_with("DEEPSPEED"):
        import deepspeed

        # gloo instead of the shared-memory op, which is compiled at first use and leaves a lock when killed
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # torch has fp16 on each CPU, fast or not; DeepSpeed asks for a fast one
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    sharded = _launched_with("FSDP") or _launched_with("DEEPSPEED")

    def prepare_backend(self: PartialState, *_: Any, **__: Any) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_GPU if sharded else DistributedType.MULTI_CPU

    def set_device(self: PartialState) -> None:
        self.device = torch.device("cpu")

    PartialState._prepare_backend = prepare_backend
    PartialState.set_device = set_device


def _use_all_cores() -> None:
    """On CPU a host's processes share its cores.

    torchrun and accelerate set OMP_NUM_THREADS=1, right beside a GPU; deepspeed leaves all cores to each.
    For one process accelerate counts the machine's cores, also those that this process may not use: two
    threads on one core are 35 times slower than one (CNN-A). Set by hand before `python` it stays: then one
    process rounds as each of several does.
    """
    cores = len(os.sched_getaffinity(0))
    if launched() and (os.environ.get("OMP_NUM_THREADS", "1") == "1" or torch.get_num_threads() > cores):
        torch.set_num_threads(max(1, cores // processes_per_host()))


def _keep_freed_memory() -> None:
    """Lets glibc keep freed activations for the next step instead of returning them to the kernel.

    CNN-A at batch 256, one thread: 57 instead of 82 ms of processor time a step, no instead of 14,000 page
    faults. Other C libraries are left as they are.
    """
    libc = ctypes.CDLL(None)
    if platform.libc_ver()[0] == "glibc":
        libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD: blocks up to 1 GiB come from the heap
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: the heap is not cut


def _fill_deepspeed_config(config: dict[str, Any], batch: Batch, clip_norm: float) -> None:
    """The recipe's numbers, the same under every strategy; told nothing, DeepSpeed would clip at 1.0."""
    numbers = {
        "train_batch_size": batch.total,
        "train_micro_batch_size_per_gpu": batch.per_device,
        "gradient_accumulation_steps": batch.accumulations,
        "gradient_clipping": clip_norm,
    }
    for key, number in numbers.items():
        if config.get(key, "auto") not in ("auto", number) and rank() == 0:
            print(f"DeepSpeed's {key} {config[key]} gives way to the recipe's {number}", flush=True)
        config[key] = number
    config.setdefault("steps_per_print", sys.maxsize)  # the script prints its own log
    # With offload accelerate would compile DeepSpeed's own Adam in place of the script's optimizer.
    config.setdefault("zero_force_ds_cpu_optimizer", False)


def _precision(flag: str | None) -> str:
    """The flag, else the launcher's, else bf16 where the device has it natively."""
    launchers = os.environ.get("ACCELERATE_MIXED_PRECISION")
    # accelerate launch passes "no" for a DeepSpeed config that leaves the precision to the JSON's "auto".
    fields = os.environ.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")
    if _launched_with("DEEPSPEED") and "mixed_precision" not in fields and launchers == "no":
        launchers = None
    wanted = flag or launchers or ("bf16" if _has_native_bf16() else "no")
    remark = ""
    if not torch.cuda.is_available() and wanted == "fp16":
        remark = "fp16 is slow on a CPU; it is computed all the same, with loss scaling as on a GPU"
    elif not torch.cuda.is_available() and wanted == launchers == "bf16" and not _has_native_bf16():
        remark, wanted = "bf16 is not native to this CPU: the rehearsal is in fp32", "no"
    elif wanted == "bf16" and torch.cuda.is_available() and not _has_native_bf16():
        remark = "this GPU has no native bf16 and emulates it: --mixed_precision fp16 is faster here"
    if remark and rank() == 0:
        print(remark, flush=True)
    return wanted


def _has_native_bf16() -> bool:
    if torch.cuda.is_available():
        return torch.cuda.get_device_capability() >= (8, 0)
    return torch.cpu._is_avx512_bf16_supported()


def _cast_inputs(kind: str) -> Callable:
    """DeepSpeed holds the weights in half precision and leaves the inputs as they are."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "no": torch.float32}[kind]
    return lambda module, inputs: tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)


def _checksum(model: nn.Module) -> str:
    return f"{sum(p.detach().double().abs().sum().item() for p in model.state_dict().values()):.15g}"


def _code_hash() -> str:
    """Hash of the started script and common/: it differs on a host with an old copy."""
    script, *files = Path(sys.argv[0]).resolve(), *sorted((ROOT / "common").rglob("*.py"))
    digest = hashlib.sha256(script.name.encode() + script.read_bytes())
    for file in files:
        digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()[:16]
