"""Creates the Accelerator under any launcher, for GPUs or for a CPU rehearsal."""

import hashlib
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate import DeepSpeedPlugin, DistributedDataParallelKwargs
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    TorchDynamoPlugin,
    gather_object,
)
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
from onecurve.distributed.hang import record_collectives
from onecurve.distributed.initial_weights import share_initial_weights
from onecurve.distributed.job_accelerator import JobAccelerator
from onecurve.distributed.launch_config import (
    check_launch_config,
    check_wrapped_classes,
    disable_meaningless,
    enabled_precision,
    settle_auto,
)
from onecurve.distributed.layout import plain_module
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
)
from onecurve.distributed.strategy import (
    keep_strides,
    precision,
    refuse_missing_gradients,
    refuse_skipped_steps,
    sharding,
    strategy,
    versions,
)
from onecurve.distributed.watch import watch
from onecurve.flags.recipe import Batch, Job, agreed_part
from onecurve.system.env import is_hosts_first, rank, world_size
from onecurve.system.output import log
from onecurve.system.paths import ROOT
from onecurve.system.phase import CUDA_START, PROCESS_GROUP, STARTING, now, spending
from onecurve.system.processes import deaf_launcher
from onecurve.upstream import accelerate_, deepspeed_, torch_

if TYPE_CHECKING:
    from onecurve.distributed.blocks import Compilation


class Launch(NamedTuple):
    """Settings that a process determines before it joins the process group.

    `deepspeed` is the DeepSpeed JSON file's content, or None. `is_rehearsal` is True if CPU processes stand
    in for GPUs.
    """

    batch: Batch
    deepspeed: dict[str, Any] | None
    is_rehearsal: bool


def start(job: Job, clip_norm: float = 0.0) -> tuple[JobAccelerator, Batch]:
    """Start the job in this process, and return the Accelerator and the batch arithmetic.

    Args:
        job: The job's flags.
        clip_norm: Maximum gradient norm for DeepSpeed's engine. 0 disables clipping.

    Raises:
        ValueError: If the launcher's config contains an unsupported answer, the processes can't divide the
            batch evenly, the host has too few GPUs, or the processes' settings differ.
    """
    launch = _read_launcher(job)
    check_devices()
    compilation, remarks = _set_environment(job, launch)
    accelerator = _join_group(job, launch, clip_norm, compilation)
    _agree_on_start(job, launch, accelerator, remarks)
    watch.ready(accelerator)
    return accelerator, launch.batch


def _read_launcher(job: Job) -> Launch:
    """Read and check the launcher's settings without communication, and start watching for signals."""
    requested_precision = job.mixed_precision or typed_precision()
    zero_config = check_launch_config(
        os.environ,
        world_size(),
        deepspeed_config=job.deepspeed_config,
        precision=requested_precision,
    )
    check_processes()
    batch = elastic_batch(job)
    watch.start(job.timeout_s)
    return Launch(batch, zero_config, "LOCAL_RANK" in os.environ and not torch.cuda.is_available())


def _set_environment(job: Job, launch: Launch) -> tuple["Compilation", list[str]]:
    """Configure torch, Accelerate and DeepSpeed before importing DeepSpeed and creating the process group.

    Returns:
        The compilation settings, and remarks about ineffective launcher settings.
    """
    from onecurve.distributed.blocks import chosen_compilation
    from onecurve.distributed.step_graph import keep_segments_out_of_nccl

    choose_algorithms(job.deterministic)
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"  # Accelerate reads this variable while it imports DeepSpeed
    if job.deepspeed_config:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    accelerate_.cache_package_lookups()
    remarks = disable_meaningless(launch.is_rehearsal)
    if launch.is_rehearsal:
        rehearse_on_cpu()
    compilation = chosen_compilation(job.compile)
    if not compilation:
        torch_.postpone_compiler()
    name_interface()
    record_collectives()
    keep_segments_out_of_nccl()
    torch_.set_default_group_timeout(job.timeout_s)
    return compilation, remarks


def _join_group(job: Job, launch: Launch, clip_norm: float, compilation: "Compilation") -> JobAccelerator:
    """Join the process group, and choose the settings that depend on the device or strategy."""
    from onecurve.distributed.step_graph import chosen_step_graph
    from onecurve.models.attention import has_kernel

    batch = launch.batch
    with spending(PROCESS_GROUP):
        join_agents_store(job.timeout_s)
        accelerator = make_accelerator(job, batch, launch.deepspeed, clip_norm)
    if accelerator.device.type == "cuda":
        with spending(CUDA_START):
            torch.zeros((), device=accelerator.device)
    assert accelerator.num_processes == batch.processes
    if batch.processes > 1 and accelerator.device.type == "cuda" and backend() == "nccl":
        gpu_uuid = str(torch.cuda.get_device_properties(accelerator.device).uuid)
        check_own_gpu(Channel(), rank(), batch.processes, gpu_uuid)
    accelerator.compilation = compilation
    accelerator.step_graph = chosen_step_graph(accelerator, job.step_graph)
    accelerator.short_attention = has_kernel(accelerator.device, precision(accelerator))
    if accelerator.step_graph and accelerator.device.type == "cuda":
        accelerator.step_stream = torch.cuda.Stream()
    _refuse_for_strategy(accelerator)
    if accelerator.device.type == "cpu":
        use_all_cores(job.deterministic)
        keep_freed_memory()
    return accelerator


def _refuse_for_strategy(accelerator: JobAccelerator) -> None:
    """Raise ValueError for flags that the strategy does not support."""
    name = strategy(accelerator)
    if accelerator.compilation and name == "zero3":
        raise ValueError(
            f"--compile {accelerator.compilation} (or dynamo_backend in the accelerate config) does not work"
            " with ZeRO-3, which gathers parameters inside each block. Use --compile no, or train with ZeRO-2"
            " or FSDP2."
        )
    if accelerator.deterministic and name.startswith("zero") and accelerator.num_processes > 1:
        raise ValueError(
            "--deterministic does not work with ZeRO, because ZeRO adds gradients in an order that depends on"
            " the number of processes. Train with DDP or FSDP2, or remove --deterministic."
        )


def _agree_on_start(job: Job, launch: Launch, accelerator: JobAccelerator, remarks: list[str]) -> None:
    """Check that all ranks chose the same settings, and print them."""
    from onecurve.models.attention import kernel_version

    batch, compilation = launch.batch, accelerator.compilation
    settings: dict[str, Any] = {"strategy": strategy(accelerator), "sharding": sharding(accelerator)}
    settings |= {"compile": str(compilation), "grad_checkpointing": accelerator.grad_checkpointing}
    settings |= vars(accelerator.precision)
    code_and_versions = {"script and onecurve/": _code_hash(), **versions()}
    settings |= {"deterministic": job.deterministic, "step_graph": accelerator.step_graph}
    if job.deterministic:  # the attention kernel rounds differently from torch's attention
        settings |= {"short_attention": accelerator.short_attention and kernel_version()}
    if job.deterministic and accelerator.device.type == "cpu":  # the number of threads affects gradient sums
        settings |= {"threads": torch.get_num_threads()}
    agree(accelerator, {**code_and_versions, "recipe": agreed_part(job), **settings})
    if launch.is_rehearsal:
        count = batch.processes
        accelerator.print(f"rehearsal on CPU: {count} gloo processes stand in for {count} GPUs")
    for remark in (*remarks, replacement_problem(), deaf_launcher()):
        if remark:
            accelerator.print(remark)
    accelerator.print(
        f"{strategy(accelerator)}, {batch}, mixed precision {precision(accelerator)}"
        + _less_common_settings(accelerator, batch)
    )


def _less_common_settings(accelerator: JobAccelerator, batch: Batch) -> str:
    """Return the end of the startup line, with the less common settings."""
    description = f", compiled ({accelerator.compilation})" if accelerator.compilation else ""
    description += ", half-precision weights" if accelerator.precision.half_precision == "weights" else ""
    description += ", activation checkpointing" if accelerator.grad_checkpointing else ""
    description += ", a CUDA graph for each step" if accelerator.step_graph else ""
    if accelerator.deterministic:
        is_summed = batch.processes * batch.accumulations > 1
        description += f", deterministic{' (gradients in float64: twice the memory and traffic)' * is_summed}"
        description += f", threads {torch.get_num_threads()}" if accelerator.device.type == "cpu" else ""
    return description


def make_accelerator(
    job: Job, batch: Batch, zero_config: dict[str, Any] | None, clip_norm: float
) -> JobAccelerator:
    """Return the Accelerator for the launcher's environment and the job's flags, with compilation disabled.

    Args:
        job: The job's flags.
        batch: The batch arithmetic.
        zero_config: The DeepSpeed JSON file's content, as returned by check_launch_config(), or None.
        clip_norm: Maximum gradient norm for DeepSpeed's engine. 0 disables clipping.
    """
    accelerate_.print_where(is_hosts_first)
    engines_precision = enabled_precision(zero_config)
    mixed_precision = chosen_precision(job.mixed_precision or engines_precision)
    accelerator = JobAccelerator(
        mixed_precision=mixed_precision,
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=zero_config) if job.deepspeed_config else None,
        dynamo_plugin=TorchDynamoPlugin(backend="no"),  # wrap() compiles the model
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=batch.accumulations, sync_with_dataloader=False
        ),
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=timedelta(seconds=job.timeout_s)),
            # Make gradients views of DDP's buckets, to avoid copying the gradients.
            DistributedDataParallelKwargs(
                gradient_as_bucket_view=True, comm_hook=DDPCommunicationHookType(job.grad_compression)
            ),
        ],
    )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        deepspeed_.import_muon()
        _fill_deepspeed_config(accelerator.state.deepspeed_plugin.deepspeed_config, batch, clip_norm)
    else:
        accelerate_.skip_deepspeed_import()
    if accelerator.distributed_type != DistributedType.FSDP:
        accelerate_.skip_dtensor_import()
    accelerator.precision = settle_precision(
        accelerator, mixed_precision, engines_precision == mixed_precision, job.grad_compression
    )
    accelerator.deterministic, accelerator.grad_checkpointing = job.deterministic, job.grad_checkpointing
    if accelerator.distributed_type == DistributedType.FSDP:
        fsdp_plugin = accelerator.state.fsdp_plugin
        accelerator.grad_checkpointing |= bool(fsdp_plugin.activation_checkpointing)
        fsdp_plugin.activation_checkpointing = False  # wrap() applies activation checkpointing
        if job.deterministic:
            from torch.distributed.fsdp import MixedPrecisionPolicy

            fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    is_cpu = accelerator.device.type == "cpu"
    if is_cpu and mixed_precision == "fp16" and accelerator.distributed_type != DistributedType.DEEPSPEED:
        accelerate_.scale_loss_on_cpu(accelerator)
    return accelerator


def prepare(
    accelerator: JobAccelerator, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, AcceleratedOptimizer]:
    """Share rank 0's initial weights, and wrap the model and the optimizer like accelerator.prepare.

    The model's `_no_split_modules` lists the block classes that FSDP2 wraps individually. Activation
    checkpointing uses the same blocks, and so does compilation unless the whole model is compiled as one
    graph. BatchNorm layers use the running statistics of onecurve.numerics.batch_norm.
    """
    share_initial_weights(accelerator, model)
    wrapped = wrap(accelerator, model, optimizer)
    now.enter(STARTING)
    return wrapped


def wrap(
    accelerator: JobAccelerator, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, AcceleratedOptimizer]:
    """Wrap the model and the optimizer like prepare(), but do not share initial weights."""
    from onecurve.distributed.step_graph import on_step_stream

    with on_step_stream(accelerator):
        return _wrap(accelerator, model, optimizer)


def _wrap(
    accelerator: JobAccelerator, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, AcceleratedOptimizer]:
    """Wrap the model and the optimizer in three stages.

    First, this function changes modules (memory layout, BatchNorm, compiled blocks, activation checkpointing,
    autocast), because the strategy wraps the modules as they are. Next, the strategy wraps the model. Last,
    the function sets up everything that needs the wrapped model: exact sums, running statistics, hooks and
    checks.
    """
    from onecurve.distributed.blocks import blocks_of, checkpoint_activations, compile_blocks
    from onecurve.models.attention import kernel_failure, prefer_cudnn, use_kernel
    from onecurve.numerics.batch_norm import RunningStatistics

    check_wrapped_classes(model)
    if accelerator.short_attention:
        dtype = HALF[accelerator.precision.mixed_precision]
        failure = kernel_failure(model, accelerator.device, dtype)
        if failure is not None:  # all ranks must use the same attention kernel
            failure = next(filter(None, gather_object([failure])), "")
        if failure:
            accelerator.print(
                f"using torch's attention because the attention kernel for short sequences failed: {failure}"
            )
        accelerator.short_attention = not failure and use_kernel(model)
    if not accelerator.deterministic:
        prefer_cudnn(model, accelerator.device)
    # FSDP2 and ZeRO flatten parameters and thereby lose the channels_last format. With --deterministic, every
    # strategy uses FSDP2's memory format, because the order of additions in a convolution depends on it.
    if strategy(accelerator) in ("single", "ddp") and not accelerator.deterministic:
        model = model.to(memory_format=torch.channels_last)
    statistics = RunningStatistics(model)
    uses_blocks = accelerator.compilation or strategy(accelerator) in ("fsdp", "zero3")
    if uses_blocks and next(blocks_of(model), None) is None:
        model_name = type(model).__name__
        accelerator.print(
            f"{model_name} defines no block classes, so the model is gathered or compiled as a whole"
        )
    if accelerator.compilation:
        is_whole = strategy(accelerator) in ("single", "ddp") and not accelerator.grad_checkpointing
        is_whole &= not accelerator.deterministic  # results must match FSDP2's block-by-block compilation
        compile_blocks(model, accelerator.compilation, is_whole, accelerator.gradient_accumulation_steps)
    if accelerator.grad_checkpointing:
        checkpoint_activations(model)
    # Accelerate itself applies autocast for single and ddp
    is_sharded = strategy(accelerator) not in ("single", "ddp")
    if is_sharded and accelerator.precision.half_precision == "autocast":
        autocast_forward(accelerator, model)
    is_exact = accelerator.deterministic and accelerator.distributed_type != DistributedType.DEEPSPEED
    if is_exact and (accelerator.device.type == "cpu" or sharding(accelerator).get("offload_params")):
        use_foreach(optimizer)  # the optimizer steps on the CPU
    elif is_exact and accelerator.scaler:  # fused SGD rounds differently if it unscales gradients
        torch_.unscale_before_step(optimizer)
    if is_exact and not is_sharded:  # ExactSum replaces DDP's gradient exchange
        prepared = accelerator.prepare_model(model, evaluation_mode=True)
        prepared_optimizer = accelerator.prepare_optimizer(optimizer)
    else:
        prepared, prepared_optimizer = accelerator.prepare(model, optimizer)
    if is_exact:
        keep_strides(prepared)
        # Several gradients per parameter in each step
        if accelerator.gradient_accumulation_steps * accelerator.num_processes > 1:
            accelerator.exact_sum = ExactSum(accelerator, prepared)
    statistics.follow(accelerator, plain_module(prepared))
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        if accelerator.precision.half_precision == "weights":
            plain_module(prepared).register_forward_pre_hook(cast_inputs(precision(accelerator)))
        if precision(accelerator) == "fp16":
            deepspeed_.allow_smallest_scale(prepared_optimizer.optimizer)
        else:
            refuse_skipped_steps(prepared_optimizer.optimizer)
    if isinstance(prepared, nn.parallel.DistributedDataParallel):
        prepared.broadcast_buffers = False  # onecurve.run.evaluation broadcasts the buffers
        refuse_missing_gradients(plain_module(prepared), prepared_optimizer.optimizer)
    prepared.train()
    accelerator.prepared = prepared
    return prepared, prepared_optimizer


def _fill_deepspeed_config(config: dict[str, Any], batch: Batch, clip_norm: float) -> None:
    """Write the recipe's settings into DeepSpeed's config, so that all strategies use the same settings.

    If the config does not set a clipping norm, DeepSpeed would clip gradients at norm 1.0.
    """
    recipe_values = {
        "train_batch_size": batch.total,
        "train_micro_batch_size_per_gpu": batch.per_device,
        "gradient_accumulation_steps": batch.accumulations,
        "gradient_clipping": clip_norm,
    }
    for key, recipe_value in recipe_values.items():
        if config.get(key, "auto") not in ("auto", recipe_value) and rank() == 0:
            log.info(
                f"replacing {key} {config[key]} in the DeepSpeed config with the recipe's value,"
                f" {recipe_value}"
            )
        config[key] = recipe_value
    config.setdefault("steps_per_print", sys.maxsize)  # the script writes its own log
    for remark in settle_auto(config):
        if rank() == 0:
            log.info(remark)
    deepspeed_.hide_untested_optimizers()
    # With offload, Accelerate would replace the script's optimizer with DeepSpeed's Adam and compile it.
    config.setdefault("zero_force_ds_cpu_optimizer", False)


def _code_hash() -> str:
    """Return a hash of the running script and onecurve/, to detect hosts with outdated code."""
    script_file, *package_files = Path(sys.argv[0]).resolve(), *sorted((ROOT / "onecurve").rglob("*.py"))
    digest = hashlib.sha256(script_file.name.encode() + script_file.read_bytes())
    for file in package_files:
        digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()[:16]
