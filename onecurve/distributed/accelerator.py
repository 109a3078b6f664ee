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
    choose_algorithms,
    keep_freed_memory,
    refuse_shared_gpu,
    rehearse_on_cpu,
    use_all_cores,
)
from onecurve.distributed.exact_sum import ExactSum, use_foreach
from onecurve.distributed.hang import configure_flight_recorder
from onecurve.distributed.initial_weights import share_initial_weights
from onecurve.distributed.job_accelerator import JobAccelerator
from onecurve.distributed.launch_config import (
    check_launch_config,
    check_wrapped_classes,
    disable_ineffective_answers,
    enabled_precision,
    replace_auto_values,
)
from onecurve.distributed.layout import plain_module
from onecurve.distributed.precision import (
    HALF_DTYPES,
    autocast_forward,
    chosen_precision,
    launch_command_precision,
    make_input_cast_hook,
    settle_precision,
)
from onecurve.distributed.rendezvous import (
    backend,
    check_process_count,
    choose_gloo_interface,
    create_group_in_agents_store,
    elastic_batch,
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
from onecurve.system.phase import CUDA_START, PROCESS_GROUP, STARTING, now, timed_as
from onecurve.system.processes import launcher_sigterm_warning
from onecurve.upstream import accelerate_, deepspeed_, torch_

if TYPE_CHECKING:
    from onecurve.distributed.blocks import Compilation


class LaunchSettings(NamedTuple):
    """Settings that a process determines before it joins the process group.

    `deepspeed_config` is the DeepSpeed JSON file's content, or None. `is_rehearsal` is True if CPU processes
    stand in for GPUs.
    """

    batch: Batch
    deepspeed_config: dict[str, Any] | None
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
    launch_settings = _read_launch_settings(job)
    check_devices()
    compilation, config_remarks = _set_environment(job, launch_settings)
    accelerator = _join_group(job, launch_settings, clip_norm, compilation)
    _agree_on_start(job, launch_settings, accelerator, config_remarks)
    watch.ready(accelerator)
    return accelerator, launch_settings.batch


def _read_launch_settings(job: Job) -> LaunchSettings:
    """Read and check the launcher's settings, and start watching for signals.

    This function does not communicate with other ranks.
    """
    requested_precision = job.mixed_precision or launch_command_precision()
    deepspeed_config = check_launch_config(
        os.environ,
        world_size(),
        deepspeed_config_file=job.deepspeed_config,
        precision=requested_precision,
    )
    check_process_count()
    # Rank 0 reports to launch.py. In an elastic job, the call may wait for other hosts.
    batch = elastic_batch(job)
    watch.start(job.timeout_s)
    # A launcher started this process on a host without usable GPUs
    is_rehearsal = "LOCAL_RANK" in os.environ and not torch.cuda.is_available()
    return LaunchSettings(batch, deepspeed_config, is_rehearsal)


def _set_environment(job: Job, launch_settings: LaunchSettings) -> tuple["Compilation", list[str]]:
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
    config_remarks = disable_ineffective_answers(launch_settings.is_rehearsal)
    if launch_settings.is_rehearsal:
        rehearse_on_cpu()
    compilation = chosen_compilation(job.compile)
    if not compilation:
        torch_.postpone_compiler()
    choose_gloo_interface()
    configure_flight_recorder()
    keep_segments_out_of_nccl()
    torch_.set_default_group_timeout(job.timeout_s)
    return compilation, config_remarks


def _join_group(
    job: Job, launch_settings: LaunchSettings, clip_norm: float, compilation: "Compilation"
) -> JobAccelerator:
    """Create the process group and an Accelerator that stores the device-dependent settings.

    This function is collective. On a CPU, it also sets torch's number of threads and the memory allocator's
    options.

    Raises:
        ValueError: If two processes use the same GPU, or if the strategy does not support a flag.
    """
    from onecurve.distributed.step_graph import chosen_step_graph
    from onecurve.models.attention import has_kernel

    batch = launch_settings.batch
    with timed_as(PROCESS_GROUP):
        create_group_in_agents_store(job.timeout_s)  # only under torchrun; else Accelerate creates the group
        accelerator = make_accelerator(job, batch, launch_settings.deepspeed_config, clip_norm)
    if accelerator.device.type == "cuda":
        with timed_as(CUDA_START):
            torch.zeros((), device=accelerator.device)  # the first tensor creates the CUDA context
    assert accelerator.num_processes == batch.processes
    if batch.processes > 1 and accelerator.device.type == "cuda" and backend() == "nccl":
        gpu_uuid = str(torch.cuda.get_device_properties(accelerator.device).uuid)
        refuse_shared_gpu(Channel(), rank(), batch.processes, gpu_uuid)
    accelerator.compilation = compilation
    accelerator.step_graph = chosen_step_graph(accelerator, job.step_graph)
    accelerator.uses_short_attention_kernel = has_kernel(accelerator.device, precision(accelerator))
    if accelerator.step_graph and accelerator.device.type == "cuda":
        accelerator.step_stream = torch.cuda.Stream()
    _refuse_unsupported_flags(accelerator)
    if accelerator.device.type == "cpu":
        use_all_cores(job.deterministic)
        keep_freed_memory()
    return accelerator


def _refuse_unsupported_flags(accelerator: JobAccelerator) -> None:
    """Raise ValueError for flags that the strategy does not support."""
    strategy_name = strategy(accelerator)
    if accelerator.compilation and strategy_name == "zero3":
        raise ValueError(
            f"--compile {accelerator.compilation} (or dynamo_backend in the accelerate config)"
            " does not work with ZeRO-3, which gathers parameters inside each block."
            " Use --compile no, or train with ZeRO-2 or FSDP2."
        )
    if accelerator.deterministic and strategy_name.startswith("zero") and accelerator.num_processes > 1:
        raise ValueError(
            "--deterministic does not work with ZeRO,"
            " because ZeRO adds gradients in an order that depends on the number of processes."
            " Train with DDP or FSDP2, or remove --deterministic."
        )


def _agree_on_start(
    job: Job, launch_settings: LaunchSettings, accelerator: JobAccelerator, config_remarks: list[str]
) -> None:
    """Check that all ranks chose the same settings, and print the settings and the startup remarks.

    This function is collective.
    """
    from onecurve.models.attention import kernel_version

    batch, compilation = launch_settings.batch, accelerator.compilation
    agreed_settings: dict[str, Any] = {"strategy": strategy(accelerator), "sharding": sharding(accelerator)}
    agreed_settings |= {"compile": str(compilation), "grad_checkpointing": accelerator.grad_checkpointing}
    agreed_settings |= vars(accelerator.precision)
    code_and_versions = {"script and onecurve/": _code_hash(), **versions()}
    agreed_settings |= {"deterministic": job.deterministic, "step_graph": accelerator.step_graph}
    if job.deterministic:  # the attention kernel rounds differently from torch's attention
        agreed_settings |= {"short_attention": accelerator.uses_short_attention_kernel and kernel_version()}
    if job.deterministic and accelerator.device.type == "cpu":  # the number of threads affects gradient sums
        agreed_settings |= {"threads": torch.get_num_threads()}
    agree(accelerator, {**code_and_versions, "recipe": agreed_part(job), **agreed_settings})
    if launch_settings.is_rehearsal:
        accelerator.print(
            f"rehearsal on CPU: {batch.processes} gloo processes stand in for {batch.processes} GPUs"
        )
    for startup_remark in (*config_remarks, replacement_problem(), launcher_sigterm_warning()):
        if startup_remark:
            accelerator.print(startup_remark)
    accelerator.print(
        f"{strategy(accelerator)}, {batch}, mixed precision {precision(accelerator)}"
        + _describe_uncommon_settings(accelerator, batch)
    )


def _describe_uncommon_settings(accelerator: JobAccelerator, batch: Batch) -> str:
    """Return the end of the startup line, with the less common settings."""
    settings_text = f", compiled ({accelerator.compilation})" if accelerator.compilation else ""
    settings_text += ", half-precision weights" if accelerator.precision.half_precision == "weights" else ""
    settings_text += ", activation checkpointing" if accelerator.grad_checkpointing else ""
    settings_text += ", a CUDA graph for each step" if accelerator.step_graph else ""
    if accelerator.deterministic:
        settings_text += ", deterministic"
        if batch.processes * batch.accumulations > 1:
            settings_text += " (gradients in float64: twice the memory and traffic)"
        settings_text += f", threads {torch.get_num_threads()}" if accelerator.device.type == "cpu" else ""
    return settings_text


def make_accelerator(
    job: Job, batch: Batch, deepspeed_config: dict[str, Any] | None, clip_norm: float
) -> JobAccelerator:
    """Return the Accelerator for the launcher's environment and the job's flags, with compilation disabled.

    This function creates the process group unless it exists. It also patches Accelerate, so that only one
    process per host prints and DeepSpeed is not imported without need.

    Args:
        job: The job's flags.
        batch: The batch arithmetic.
        deepspeed_config: The DeepSpeed JSON file's content, as returned by check_launch_config(), or None.
        clip_norm: Maximum gradient norm for DeepSpeed's engine. 0 disables clipping.
    """
    accelerate_.print_only_where(is_hosts_first)
    deepspeed_precision = enabled_precision(deepspeed_config)
    mixed_precision = chosen_precision(job.mixed_precision or deepspeed_precision)
    accelerator = JobAccelerator(
        mixed_precision=mixed_precision,
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=deepspeed_config) if job.deepspeed_config else None,
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
        accelerator, mixed_precision, deepspeed_precision == mixed_precision, job.grad_compression
    )
    accelerator.deterministic = job.deterministic
    accelerator.grad_checkpointing = job.grad_checkpointing
    if accelerator.distributed_type == DistributedType.FSDP:
        fsdp_plugin = accelerator.state.fsdp_plugin
        accelerator.grad_checkpointing |= bool(fsdp_plugin.activation_checkpointing)
        fsdp_plugin.activation_checkpointing = False  # wrap() applies activation checkpointing
        if job.deterministic:
            from torch.distributed.fsdp import MixedPrecisionPolicy

            # ExactSum's additions are exact only in float64
            fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    on_cpu = accelerator.device.type == "cpu"
    if on_cpu and mixed_precision == "fp16" and accelerator.distributed_type != DistributedType.DEEPSPEED:
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
    wrapped_model, wrapped_optimizer = wrap(accelerator, model, optimizer)
    now.enter(STARTING)
    return wrapped_model, wrapped_optimizer


def wrap(
    accelerator: JobAccelerator, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, AcceleratedOptimizer]:
    """Wrap the model and the optimizer like prepare(), but do not share initial weights.

    If step graphs are enabled on a GPU, all GPU work runs on the step graphs' stream.
    """
    from onecurve.distributed.step_graph import on_step_stream

    with on_step_stream(accelerator):
        return _wrap_in_stages(accelerator, model, optimizer)


def _wrap_in_stages(
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
    if accelerator.uses_short_attention_kernel:
        attention_dtype = HALF_DTYPES[accelerator.precision.mixed_precision]
        kernel_error = kernel_failure(model, accelerator.device, attention_dtype)
        if kernel_error is not None:  # all ranks must use the same attention kernel
            kernel_errors_by_rank = gather_object([kernel_error])
            kernel_error = next((rank_error for rank_error in kernel_errors_by_rank if rank_error), "")
        if kernel_error:
            accelerator.print(
                "using torch's attention"
                f" because the attention kernel for short sequences failed: {kernel_error}"
            )
        accelerator.uses_short_attention_kernel = not kernel_error and use_kernel(model)
    if not accelerator.deterministic:
        prefer_cudnn(model, accelerator.device)
    # FSDP2 and ZeRO flatten parameters and thereby lose the channels_last format. With --deterministic, every
    # strategy uses FSDP2's memory format, because the order of additions in a convolution depends on it.
    if strategy(accelerator) in ("single", "ddp") and not accelerator.deterministic:
        model = model.to(memory_format=torch.channels_last)
    running_statistics = RunningStatistics(model)
    needs_block_classes = accelerator.compilation or strategy(accelerator) in ("fsdp", "zero3")
    if needs_block_classes and next(blocks_of(model), None) is None:
        model_name = type(model).__name__
        accelerator.print(
            f"{model_name} defines no block classes, so the model is gathered or compiled as a whole"
        )
    if accelerator.compilation:
        as_one_graph = strategy(accelerator) in ("single", "ddp") and not accelerator.grad_checkpointing
        as_one_graph &= not accelerator.deterministic  # results must match FSDP2's block-by-block compilation
        micro_batches_per_step = accelerator.gradient_accumulation_steps
        compile_blocks(model, accelerator.compilation, as_one_graph, micro_batches_per_step)
    if accelerator.grad_checkpointing:
        checkpoint_activations(model)
    # Accelerate itself applies autocast for single and ddp
    is_model_sharded = strategy(accelerator) not in ("single", "ddp")
    if is_model_sharded and accelerator.precision.half_precision == "autocast":
        autocast_forward(accelerator, model)
    adds_exactly = accelerator.deterministic and accelerator.distributed_type != DistributedType.DEEPSPEED
    if adds_exactly and (accelerator.device.type == "cpu" or sharding(accelerator).get("offload_params")):
        use_foreach(optimizer)  # the optimizer steps on the CPU
    elif adds_exactly and accelerator.scaler:  # fused SGD rounds differently if it unscales gradients
        torch_.unscale_before_step(optimizer)
    if adds_exactly and not is_model_sharded:  # ExactSum replaces DDP's gradient exchange
        prepared_model = accelerator.prepare_model(model, evaluation_mode=True)  # without DDP's wrapper
        prepared_optimizer = accelerator.prepare_optimizer(optimizer)
    else:
        prepared_model, prepared_optimizer = accelerator.prepare(model, optimizer)
    if adds_exactly:
        keep_strides(prepared_model)
        # Several gradients per parameter in each step
        if accelerator.gradient_accumulation_steps * accelerator.num_processes > 1:
            accelerator.exact_sum = ExactSum(accelerator, prepared_model)
    running_statistics.register_update_hook(accelerator, plain_module(prepared_model))
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        if accelerator.precision.half_precision == "weights":
            input_cast_hook = make_input_cast_hook(precision(accelerator))
            plain_module(prepared_model).register_forward_pre_hook(input_cast_hook)
        if precision(accelerator) == "fp16":
            deepspeed_.allow_smallest_scale(prepared_optimizer.optimizer)
        else:
            refuse_skipped_steps(prepared_optimizer.optimizer)
    if isinstance(prepared_model, nn.parallel.DistributedDataParallel):
        prepared_model.broadcast_buffers = False  # onecurve.run.evaluation broadcasts the buffers
        refuse_missing_gradients(plain_module(prepared_model), prepared_optimizer.optimizer)
    prepared_model.train()
    accelerator.prepared_model = prepared_model
    return prepared_model, prepared_optimizer


def _fill_deepspeed_config(deepspeed_config: dict[str, Any], batch: Batch, clip_norm: float) -> None:
    """Write the recipe's settings into a DeepSpeed config in place, so that all strategies use them.

    This function also replaces "auto" values. Rank 0 logs each replacement. If the config does not set a
    clipping norm, DeepSpeed would clip gradients at norm 1.0.
    """
    recipe_values = {
        "train_batch_size": batch.total,
        "train_micro_batch_size_per_gpu": batch.per_device,
        "gradient_accumulation_steps": batch.accumulations,
        "gradient_clipping": clip_norm,
    }
    for config_key, recipe_value in recipe_values.items():
        if deepspeed_config.get(config_key, "auto") not in ("auto", recipe_value) and rank() == 0:
            log.info(
                f"replacing {config_key} {deepspeed_config[config_key]} in the DeepSpeed config"
                f" with the recipe's value, {recipe_value}"
            )
        deepspeed_config[config_key] = recipe_value
    deepspeed_config.setdefault("steps_per_print", sys.maxsize)  # the script writes its own log
    for config_remark in replace_auto_values(deepspeed_config):
        if rank() == 0:
            log.info(config_remark)
    deepspeed_.hide_untested_optimizers()  # filters a warning from DeepSpeed's log
    # With offload, Accelerate would replace the script's optimizer with DeepSpeed's Adam and compile it.
    deepspeed_config.setdefault("zero_force_ds_cpu_optimizer", False)


def _code_hash() -> str:
    """Return a hash of the running script and onecurve/, to detect hosts with outdated code."""
    script_file = Path(sys.argv[0]).resolve()
    code_digest = hashlib.sha256(script_file.name.encode() + script_file.read_bytes())
    for package_file in sorted((ROOT / "onecurve").rglob("*.py")):
        code_digest.update(str(package_file.relative_to(ROOT)).encode() + package_file.read_bytes())
    return code_digest.hexdigest()[:16]
