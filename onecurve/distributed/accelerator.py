"""Creates the Accelerator under any launcher, on GPUs or as a rehearsal on the CPU."""

import functools
import hashlib
import importlib
import logging
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin, DistributedDataParallelKwargs, PartialState
from accelerate import accelerator as accelerate_accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    TorchDynamoPlugin,
    gather_object,
)
from accelerate.utils import imports as accelerate_imports
from accelerate.utils import other as accelerate_other
from torch import nn

from onecurve.distributed.agreement import agree
from onecurve.distributed.channel import Channel
from onecurve.distributed.devices import (
    check_devices,
    check_own_gpu,
    choose_algorithms,
    keep_freed_memory,
    rehearse_on_cpu,
    use_all_cores,
)
from onecurve.distributed.exact_sum import ExactSum, use_foreach
from onecurve.distributed.launch_config import (
    check_launch_config,
    check_wrapped_classes,
    disable_meaningless,
    enabled_precision,
    settle_auto,
)
from onecurve.distributed.precision import (
    HALF,
    autocast_forward,
    cast_inputs,
    chosen_precision,
    settle_precision,
    typed_precision,
)
from onecurve.distributed.rendezvous import (
    backend,
    check_processes,
    elastic_batch,
    join_agents_store,
    name_interface,
    replacement_problem,
    set_group_timeout,
)
from onecurve.distributed.strategy import (
    keep_strides,
    plain_module,
    precision,
    refuse_missing_gradients,
    refuse_skipped_steps,
    sharding,
    share_initial_weights,
    strategy,
    versions,
)
from onecurve.distributed.watch import stop, watch, watch_ranks
from onecurve.flags.recipe import Batch, Job, agreed_part
from onecurve.system.env import is_hosts_first, rank, world_size
from onecurve.system.paths import ROOT
from onecurve.system.phase import CUDA, GROUP, STARTING, now, record_collectives, spending
from onecurve.system.processes import deaf_launcher


def start(job: Job, clip_norm: float = 0.0) -> tuple[Accelerator, Batch]:
    """The Accelerator and this job's batch arithmetic. clip_norm is for DeepSpeed's engine; 0 does not clip.

    Raises ValueError when the launcher's config has an unsupported answer, the batch does not divide, there
    are too few GPUs, or the processes disagree. The order: what one process can refuse alone; variables that
    torch, Accelerate and DeepSpeed read at import, or when the group is made; the group; what needs its
    device or strategy; agree() on all that was chosen; the watch.
    """
    from onecurve.distributed.blocks import chosen_compilation, postpone_compiler
    from onecurve.distributed.step_graph import chosen_step_graph, keep_segments_out_of_nccl
    from onecurve.models.attention import has_kernel, kernel_version

    wanted = job.mixed_precision or typed_precision()
    deepspeed = check_launch_config(
        os.environ, world_size(), deepspeed_config=job.deepspeed_config, precision=wanted
    )
    check_processes()
    batch = elastic_batch(job)
    watch(job.timeout_s)
    check_devices()
    choose_algorithms(job.deterministic)
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"  # deepspeed reads it on import, and Accelerate imports deepspeed
    rehearsal = "LOCAL_RANK" in os.environ and not torch.cuda.is_available()
    if job.deepspeed_config:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    # Accelerate 1.15 asks for an optimizer's package twice a step, and Python looks through all its folders.
    accelerate_imports._is_package_available = functools.cache(accelerate_imports._is_package_available)
    remarks = disable_meaningless(rehearsal)
    if rehearsal:
        rehearse_on_cpu()
    compilation = chosen_compilation(job.compile)
    if not compilation:
        postpone_compiler()
    name_interface()
    record_collectives()
    keep_segments_out_of_nccl()
    set_group_timeout(job.timeout_s)
    with spending(GROUP):
        join_agents_store(job.timeout_s)
        accelerator = make_accelerator(job, batch, deepspeed, clip_norm)
    if accelerator.device.type == "cuda":
        with spending(CUDA):
            torch.zeros((), device=accelerator.device)
    assert accelerator.num_processes == batch.processes
    if batch.processes > 1 and accelerator.device.type == "cuda" and backend() == "nccl":
        gpu = str(torch.cuda.get_device_properties(accelerator.device).uuid)
        check_own_gpu(Channel(), rank(), batch.processes, gpu)
    accelerator.compilation = compilation
    accelerator.step_graph = chosen_step_graph(accelerator, getattr(job, "step_graph", False))
    accelerator.short_attention = has_kernel(accelerator.device, precision(accelerator))
    if accelerator.step_graph and accelerator.device.type == "cuda":
        accelerator.step_stream = torch.cuda.Stream()
    if compilation and strategy(accelerator) == "zero3":
        raise ValueError(
            f"--compile {compilation} (dynamo_backend): ZeRO-3 gathers parameters inside of each block, which"
            " does not compile; choose --compile no, ZeRO-2 or FSDP"
        )
    if job.deterministic and strategy(accelerator).startswith("zero") and batch.processes > 1:
        raise ValueError(
            "--deterministic: ZeRO adds gradients in an order that depends on the number of processes;"
            " choose DDP or FSDP2, or drop the flag"
        )
    if accelerator.device.type == "cpu":
        use_all_cores(job.deterministic)
        keep_freed_memory()
    blocks: dict[str, Any] = {"strategy": strategy(accelerator), "sharding": sharding(accelerator)}
    blocks |= {"compile": str(compilation), "grad_checkpointing": accelerator.grad_checkpointing}
    blocks |= vars(accelerator.precision)
    code = {"script and onecurve/": _code_hash(), **versions()}
    blocks |= {"deterministic": job.deterministic, "step_graph": accelerator.step_graph}
    if job.deterministic:  # its bits differ from those of torch's attention
        blocks |= {"short_attention": accelerator.short_attention and kernel_version()}
    if job.deterministic and accelerator.device.type == "cpu":  # its sums within a gradient depend on them
        blocks |= {"threads": torch.get_num_threads()}
    agree(accelerator, {**code, "recipe": agreed_part(job), **blocks})
    if rehearsal:
        accelerator.print(f"rehearsal on CPU: {batch.processes} gloo processes stand for as many GPUs")
    for remark in (*remarks, replacement_problem(), deaf_launcher()):
        if remark:
            accelerator.print(remark)
    extras = f", compiled ({compilation})" if compilation else ""
    extras += ", weights too" if accelerator.precision.half_precision == "weights" else ""
    extras += ", activation checkpointing" if accelerator.grad_checkpointing else ""
    extras += ", a CUDA graph for each step" if accelerator.step_graph else ""
    if job.deterministic:
        is_summed = batch.processes * batch.accumulations > 1
        extras += f", deterministic{': gradients in float64, twice the memory and traffic' * is_summed}"
        extras += f", threads {torch.get_num_threads()}" if accelerator.device.type == "cpu" else ""
    accelerator.print(f"{strategy(accelerator)}, {batch}, mixed precision {precision(accelerator)}{extras}")
    stop.is_ready = True
    watch_ranks(accelerator)
    return accelerator, batch


def make_accelerator(
    job: Job, batch: Batch, deepspeed: dict[str, Any] | None, clip_norm: float
) -> Accelerator:
    """The Accelerator for the launcher's environment and the job, without compilation.

    deepspeed: the DeepSpeed JSON from check_launch_config(), if there is one. Attributes of ours: precision
    (precision.Precision), compilation (blocks.Compilation or None), step_graph, deterministic,
    grad_checkpointing (bool), exact_sum (exact_sum.ExactSum or None), short_attention (bool): the device has
    the kernel of onecurve.models.attention, and after wrap() also the model uses it, prepared (the wrapped
    model, once there is one), step_stream (the stream of the step's graphs, or None).
    """
    # Accelerate prints where LOCAL_RANK is 0, which may be every process of a host.
    PartialState.is_local_main_process = property(lambda _: is_hosts_first())
    engines_precision = enabled_precision(deepspeed)
    kind = chosen_precision(job.mixed_precision or engines_precision)
    accelerator = Accelerator(
        mixed_precision=kind,
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=deepspeed) if job.deepspeed_config else None,
        dynamo_plugin=TorchDynamoPlugin(backend="no"),  # prepare() compiles
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=batch.accumulations, sync_with_dataloader=False
        ),
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=timedelta(seconds=job.timeout_s)),
            # Gradients are views of DDP's buckets, which saves a copy and its memory.
            DistributedDataParallelKwargs(
                gradient_as_bucket_view=True, comm_hook=DDPCommunicationHookType(job.grad_compression)
            ),
        ],
    )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        _import_muon()
        _fill_deepspeed_config(accelerator.state.deepspeed_plugin.deepspeed_config, batch, clip_norm)
    else:  # Accelerate 1.15 would import DeepSpeed, to ask if FSDP's model is its engine: 2 s in each process
        accelerate_other.is_deepspeed_available = lambda: False
    if accelerator.distributed_type != DistributedType.FSDP:  # it would import DTensor, a second
        accelerate_accelerator.model_has_dtensor = lambda model: False
    accelerator.precision = settle_precision(
        accelerator, kind, engines_precision == kind, job.grad_compression
    )
    accelerator.compilation, accelerator.step_graph, accelerator.step_stream = None, False, None
    accelerator.prepared, accelerator.short_attention = None, False
    accelerator.deterministic, accelerator.exact_sum = job.deterministic, None  # wrap() makes it
    accelerator.grad_checkpointing = job.grad_checkpointing
    if accelerator.distributed_type == DistributedType.FSDP:
        plugin = accelerator.state.fsdp_plugin
        accelerator.grad_checkpointing |= bool(plugin.activation_checkpointing)
        plugin.activation_checkpointing = False  # prepare() does it
        if job.deterministic:
            from torch.distributed.fsdp import MixedPrecisionPolicy

            plugin.mixed_precision_policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    is_cpu = accelerator.device.type == "cpu"
    if is_cpu and kind == "fp16" and accelerator.distributed_type != DistributedType.DEEPSPEED:
        # As Accelerate does on a GPU; on a CPU it would silently compute in fp32.
        accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu")
    return accelerator


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, AcceleratedOptimizer]:
    """accelerator.prepare, with rank 0's initial weights on every rank.

    The model's `_no_split_modules` names the classes that FSDP wraps one by one; the same blocks are
    checkpointed, and compiled unless the model is one graph, if the flags say so. BatchNorm gets the running
    statistics of onecurve.numerics.batch_norm.
    """
    share_initial_weights(accelerator, model)
    wrapped = wrap(accelerator, model, optimizer)
    now.enter(STARTING)
    return wrapped


def wrap(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, AcceleratedOptimizer]:
    """prepare() without the exchange of initial weights."""
    from onecurve.distributed.step_graph import on_step_stream

    with on_step_stream(accelerator):
        return _wrap(accelerator, model, optimizer)


def _wrap(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, AcceleratedOptimizer]:
    """Wrap the model and the optimizer.

    The order: what changes modules, as the strategy takes them as they are (memory layout, BatchNorm, blocks
    that are compiled, then checkpointed, autocast); the strategy; what needs its parameters or its wrapper
    (exact sums, running statistics, hooks, checks).
    """
    from onecurve.distributed.blocks import blocks_of, checkpoint_activations, compile_blocks
    from onecurve.models.attention import kernel_failure, prefer_cudnn, use_kernel
    from onecurve.numerics.batch_norm import RunningStatistics

    check_wrapped_classes(model)
    if accelerator.short_attention:
        dtype = HALF[accelerator.precision.mixed_precision]
        failure = kernel_failure(model, accelerator.device, dtype)
        if failure is not None:  # all ranks compute alike
            failure = next(filter(None, gather_object([failure])), "")
        if failure:
            accelerator.print(f"torch's attention is used, as the kernel for few tokens failed: {failure}")
        accelerator.short_attention = not failure and use_kernel(model)
    if not accelerator.deterministic:
        prefer_cudnn(model, accelerator.device)
    # FSDP and ZeRO flatten parameters; with --deterministic all compute on FSDP2's layout, as a convolution
    # adds in another order on another one.
    if strategy(accelerator) in ("single", "ddp") and not accelerator.deterministic:
        model = model.to(memory_format=torch.channels_last)
    statistics = RunningStatistics(model)
    goes_by_blocks = accelerator.compilation or strategy(accelerator) in ("fsdp", "zero3")
    if goes_by_blocks and next(blocks_of(model), None) is None:
        accelerator.print(f"{type(model).__name__} has no blocks: it is gathered or compiled as a whole")
    if accelerator.compilation:
        is_whole = strategy(accelerator) in ("single", "ddp") and not accelerator.grad_checkpointing
        is_whole &= not accelerator.deterministic  # FSDP2 has the same bits, and compiles block by block
        compile_blocks(model, accelerator.compilation, is_whole, accelerator.gradient_accumulation_steps)
    if accelerator.grad_checkpointing:
        checkpoint_activations(model)
    sharded = strategy(accelerator) not in ("single", "ddp")  # for these Accelerate does it
    if sharded and accelerator.precision.half_precision == "autocast":
        autocast_forward(accelerator, model)
    is_exact = accelerator.deterministic and accelerator.distributed_type != DistributedType.DEEPSPEED
    if is_exact and (accelerator.device.type == "cpu" or sharding(accelerator).get("offload_params")):
        use_foreach(optimizer)  # it steps on the CPU
    elif is_exact and accelerator.scaler:  # fused SGD that unscales rounds otherwise than FSDP2's
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    if is_exact and not sharded:  # without DDP
        prepared = accelerator.prepare_model(model, evaluation_mode=True)
        wrapped = accelerator.prepare_optimizer(optimizer)
    else:
        prepared, wrapped = accelerator.prepare(model, optimizer)
    if is_exact:
        keep_strides(prepared)
        if accelerator.gradient_accumulation_steps * accelerator.num_processes > 1:  # gradients to add
            accelerator.exact_sum = ExactSum(accelerator, prepared)
    statistics.follow(accelerator, plain_module(prepared))
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        # The engine has clipped; Accelerate 1.15 would copy the norm to the host, and nothing reads it.
        accelerator.clip_grad_norm_ = lambda *_, **__: None
        if accelerator.precision.half_precision == "weights":
            plain_module(prepared).register_forward_pre_hook(cast_inputs(precision(accelerator)))
        if precision(accelerator) == "fp16":
            # Run reports a loss that is not finite, and better than DeepSpeed's traceback.
            wrapped.optimizer.loss_scaler.raise_error_at_min_scale = False
        else:
            refuse_skipped_steps(wrapped.optimizer)
    if isinstance(prepared, nn.parallel.DistributedDataParallel):
        prepared.broadcast_buffers = False  # onecurve.run.evaluation broadcasts them before it uses them
        refuse_missing_gradients(plain_module(prepared), wrapped.optimizer)
    prepared.train()
    accelerator.prepared = prepared
    return prepared, wrapped


def _import_muon() -> None:
    """Imports DeepSpeed's Muon, for which DeepSpeed 0.19 looks in each optimizer, uncompiled: 5 s less."""
    from deepspeed.runtime import compiler

    compile = compiler.compile
    compiler.compile = lambda *_, **__: lambda function: function
    importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    compiler.compile = compile


def _fill_deepspeed_config(config: dict[str, Any], batch: Batch, clip_norm: float) -> None:
    """Sets the recipe's numbers, the same under every strategy. By default DeepSpeed would clip at 1.0."""
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
    for remark in settle_auto(config):
        if rank() == 0:
            print(remark, flush=True)
    logging.getLogger("DeepSpeed").addFilter(_is_said)
    # With offload Accelerate would replace the script's optimizer by DeepSpeed's Adam, which it compiles.
    config.setdefault("zero_force_ds_cpu_optimizer", False)


def _is_said(record: logging.LogRecord) -> bool:
    """DeepSpeed warns of the script's optimizer although its config allows it."""
    return "untested optimizer" not in record.getMessage()


def _code_hash() -> str:
    """Hash of the started script and onecurve/, which differs on a host with an old copy."""
    script, *files = Path(sys.argv[0]).resolve(), *sorted((ROOT / "onecurve").rglob("*.py"))
    digest = hashlib.sha256(script.name.encode() + script.read_bytes())
    for file in files:
        digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()[:16]
