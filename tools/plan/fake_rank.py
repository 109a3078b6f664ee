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
from onecurve.distributed.launch_config import check_launch_config, disable_meaningless
from onecurve.flags.recipe import Batch, Recipe
from onecurve.upstream import deepspeed_, torch_fakes
from onecurve.upstream.accelerate_ import launch_arguments
from tools.plan.cost import Collective


def start_as_rank_0(config_file: Path, batch: Batch, hosts: int, recipe: Recipe) -> JobAccelerator:
    """Return the Accelerator of rank 0 in a job with batch.processes processes on `hosts` hosts."""
    env = launchers_environment(config_file, batch.processes, hosts)
    os.environ.update(env)
    deepspeed = check_launch_config(os.environ, batch.processes, precision=recipe.mixed_precision)
    disable_meaningless(True)
    keep_freed_memory()
    if env:
        rehearse_on_cpu("fake")
        torch_fakes.join_fake_group(batch.processes)
    accelerator = make_accelerator(recipe, batch, deepspeed, recipe.clip_norm)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        deepspeed_.skip_comparisons()
    return accelerator


def launchers_environment(config_file: Path, processes: int, hosts: int) -> dict[str, str]:
    """Return the environment variables that `accelerate launch` sets for rank 0, or {} for one process."""
    from accelerate.utils import launch

    launch_words = ["--config_file", str(config_file), "--num_processes", str(processes)]
    launch_words += ["--num_machines", "1", "--num_cpu_threads_per_process", "1"]
    with contextlib.redirect_stdout(sys.stderr):
        arguments, config = launch_arguments([*launch_words, "plan.py"])
    if arguments.use_parallelism_config:
        arguments.parallelism_config_dp_replicate_size = hosts
        arguments.parallelism_config_dp_shard_size = processes // hosts
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(config.deepspeed_config)
        _, env = launch.prepare_deepspeed_cmd_env(arguments)
    elif arguments.use_fsdp or arguments.multi_gpu:
        env = launch.prepare_multi_gpu_env(arguments)
    else:
        return {}
    launcher_env = {name: value for name, value in env.items() if os.environ.get(name) != value}
    rank_0: dict[str, object] = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}  # no process connects
    rank_0 |= {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes // hosts}
    return launcher_env | {name: str(value) for name, value in rank_0.items()}


@contextlib.contextmanager
def without_contents() -> Iterator[None]:
    """Make all tensors in the context fake, and allow engines to wrap models there."""
    torch_fakes.skip_ddp_checks()
    torch_fakes.read_ranks_of_meshes()
    torch_fakes.hide_whole_shapes()
    with torch_fakes.fake_contents():
        yield


def materialize(model: nn.Module) -> nn.Module:
    """Move a model from the meta device to the fake CPU, and disable all its later moves.

    Module.to() swaps tensors, but torch can't swap a fake tensor to which other tensors refer.
    """
    model = model.to_empty(device="cpu")
    for index, parameter in enumerate(model.parameters(), 1):
        # Accelerate identifies the shard of a parameter by its address. Fake tensors have no
        # address, so return the parameter's index.
        parameter.data_ptr = partial(int, index)  # type: ignore[method-assign]

    def to(*_: Any, memory_format: torch.memory_format | None = None, **__: Any) -> nn.Module:
        if memory_format:
            for parameter in model.parameters():
                if parameter.ndim == 4:
                    parameter.data = parameter.data.contiguous(memory_format=memory_format)
        return model

    def to_half(dtype: torch.dtype) -> nn.Module:
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
        return model

    for name, replacement in {
        "to": to,
        "float": lambda: model,
        "bfloat16": lambda: to_half(torch.bfloat16),
        "half": lambda: to_half(torch.float16),
    }.items():
        setattr(model, name, replacement)
    return model


def fake_reducer(model: nn.Module, exchanged: list[Collective]) -> None:
    """Replace DDP's all-reduce, whose C++ code reads tensor contents, with a hook that records collectives.

    Args:
        model: Wrapped model. This function does nothing unless DDP wraps the model.
        exchanged: List to which the hook appends one collective for each bucket.
    """
    if not isinstance(model, DistributedDataParallel):
        return

    def exchange(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        exchanged.append(("all_reduce", bucket.buffer().nbytes, dist.get_world_size()))
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, exchange)
    torch_fakes.keep_first_buckets(model)
