"""Run a process as rank 0 of a planned job, without the job's GPUs, network and memory.

All tensors are torch's fake tensors, which have shapes but no contents. All collectives in torch's fake
process group return immediately. Accelerate, FSDP2, DDP and DeepSpeed run unchanged, except for functions
that read the contents of tensors. onecurve/upstream/torch_fakes.py replaces these functions.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

# Set this variable before the import of Accelerate, which imports DeepSpeed. DeepSpeed reads the variable.
os.environ["DS_ACCELERATOR"] = "cpu"

import torch.distributed as dist
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from onecurve.distributed.accelerator import make_accelerator
from onecurve.distributed.devices import keep_freed_memory, rehearse_on_cpu
from onecurve.distributed.job_accelerator import JobAccelerator
from onecurve.distributed.launch_config import check_launch_config, disable_ineffective_answers
from onecurve.flags.recipe import Batch, Recipe
from onecurve.upstream import deepspeed_, torch_fakes
from onecurve.upstream.accelerate_ import launch_arguments
from tools.plan.cost import Collective


def start_as_rank_0(config_file: Path, batch: Batch, host_count: int, recipe: Recipe) -> JobAccelerator:
    """Turn this process into rank 0 of a job on `host_count` hosts, and return its Accelerator.

    The job has batch.processes processes. This function changes os.environ, patches Accelerate and DeepSpeed,
    and joins torch's fake process group, in which no other process takes part.
    """
    launcher_env = launcher_env_for_rank_0(config_file, batch.processes, host_count)
    os.environ.update(launcher_env)
    deepspeed_config = check_launch_config(os.environ, batch.processes, precision=recipe.mixed_precision)
    disable_ineffective_answers(is_rehearsal=True)
    keep_freed_memory()
    if launcher_env:  # the job has several processes
        rehearse_on_cpu("fake")
        torch_fakes.join_fake_group(batch.processes)
    accelerator = make_accelerator(recipe, batch, deepspeed_config, recipe.clip_norm)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        deepspeed_.skip_comparisons()
    return accelerator


def launcher_env_for_rank_0(config_file: Path, process_count: int, host_count: int) -> dict[str, str]:
    """Return the environment variables that `accelerate launch` sets for rank 0, or {} for one process.

    The same Accelerate functions build the variables. Nothing is launched, and os.environ does not change.
    """
    from accelerate.utils import launch

    launch_flags = ["--config_file", str(config_file), "--num_processes", str(process_count)]
    launch_flags += ["--num_machines", "1", "--num_cpu_threads_per_process", "1"]
    with contextlib.redirect_stdout(sys.stderr):  # stdout must contain only the trace
        launch_args, launch_config = launch_arguments([*launch_flags, "plan.py"])
    if launch_args.use_parallelism_config:
        launch_args.parallelism_config_dp_replicate_size = host_count
        launch_args.parallelism_config_dp_shard_size = process_count // host_count
    if launch_args.use_deepspeed:
        # `accelerate launch` sets this attribute in launch_command(), which would also start the job.
        launch_args.deepspeed_fields_from_accelerate_config = ",".join(launch_config.deepspeed_config)
        _, launch_env = launch.prepare_deepspeed_cmd_env(launch_args)
    elif launch_args.use_fsdp or launch_args.multi_gpu:
        launch_env = launch.prepare_multi_gpu_env(launch_args)
    else:
        return {}
    # `launch_env` is a copy of os.environ with additional variables.
    launcher_env = {name: value for name, value in launch_env.items() if os.environ.get(name) != value}
    rank_0_env: dict[str, object] = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}  # no process connects
    rank_0_env |= {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": process_count}
    rank_0_env |= {"LOCAL_WORLD_SIZE": process_count // host_count}
    return launcher_env | {variable: str(value) for variable, value in rank_0_env.items()}


@contextlib.contextmanager
def fake_tensor_contents() -> Iterator[None]:
    """Make all tensors that the context creates fake, and allow engines to wrap models there.

    The patches of DDP, FSDP2 and DTensor remain active in this process after the context.
    """
    torch_fakes.skip_ddp_checks()
    torch_fakes.read_ranks_of_meshes()
    torch_fakes.hide_whole_shapes()
    with torch_fakes.fake_contents():
        yield


def materialize_on_fake_cpu(model: nn.Module) -> nn.Module:
    """Move a model from the meta device to the fake CPU, and replace its methods that move or convert it.

    Module.to() swaps tensors, but torch can't swap a fake tensor to which other tensors refer. The replaced
    methods never change the device, and change the memory format or the dtype in place.
    """
    model = model.to_empty(device="cpu")
    for parameter_index, parameter in enumerate(model.parameters(), 1):
        # Accelerate identifies the shard of a parameter by its address. Fake tensors have no
        # address, so partial(int, parameter_index) returns the parameter's index instead.
        parameter.data_ptr = partial(int, parameter_index)  # type: ignore[method-assign]

    def to_memory_format(*_: Any, memory_format: torch.memory_format | None = None, **__: Any) -> nn.Module:
        if memory_format:
            for parameter in model.parameters():
                if parameter.ndim == 4:  # convolution weights, as in Module.to()
                    parameter.data = parameter.data.contiguous(memory_format=memory_format)
        return model

    def convert_in_place(dtype: torch.dtype) -> nn.Module:
        for model_tensor in (*model.parameters(), *model.buffers()):
            if model_tensor.is_floating_point():
                model_tensor.data = model_tensor.data.to(dtype)
        return model

    for method_name, replacement_method in {
        "to": to_memory_format,
        "float": lambda: model,
        "bfloat16": lambda: convert_in_place(torch.bfloat16),
        "half": lambda: convert_in_place(torch.float16),
    }.items():
        setattr(model, method_name, replacement_method)
    return model


def record_reducer_collectives(wrapped_model: nn.Module, recorded_collectives: list[Collective]) -> None:
    """Replace DDP's all-reduce, whose C++ code reads tensor contents, with a hook that records collectives.

    Args:
        wrapped_model: Model. This function does nothing unless DDP wraps the model.
        recorded_collectives: List to which the hook appends one collective for each bucket.
    """
    if not isinstance(wrapped_model, DistributedDataParallel):
        return

    def record_and_skip(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        recorded_collectives.append(("all_reduce", bucket.buffer().nbytes, dist.get_world_size()))
        completed_future: torch.futures.Future[Tensor] = torch.futures.Future()
        completed_future.set_result(bucket.buffer())
        return completed_future

    wrapped_model.register_comm_hook(None, record_and_skip)
    torch_fakes.keep_first_buckets(wrapped_model)
