"""Private names of Accelerate, and behaviour of it that is replaced. Seen in accelerate 1.15.0."""

from collections.abc import Callable
from typing import Any


def cache_package_lookups() -> None:
    """Look for an optional package once per process.

    Without it each optimizer step looks twice for LOMO's package (accelerate #2695). Python then goes through
    all folders of its path, which takes 33 us each time.
    """
    import functools

    from accelerate.utils import imports

    imports._is_package_available = functools.cache(imports._is_package_available)


def print_where(is_first: Callable[[], bool]) -> None:
    """Let accelerator.print and the trackers write in the processes in which is_first() is true.

    Without it they write where LOCAL_RANK is 0, which is every process of a host whose processes see one GPU
    each.
    """
    from accelerate import PartialState

    PartialState.is_local_main_process = property(lambda _: is_first())


def skip_deepspeed_import() -> None:
    """Answer that DeepSpeed is not installed, in a job that does not use it.

    Without it Accelerate imports DeepSpeed, to ask if FSDP's model is its engine: 2 s in each process.
    """
    from accelerate.utils import other

    other.is_deepspeed_available = lambda: False


def skip_dtensor_import() -> None:
    """Answer that no parameter is a DTensor, in a job without FSDP.

    Without it prepare() imports DTensor in each process, which takes a second.
    """
    from accelerate import accelerator

    accelerator.model_has_dtensor = lambda model: False


def scale_loss_on_cpu(accelerator: Any) -> None:
    """Give an Accelerator on the CPU fp16's autocast and loss scaler, which it makes on GPUs alone.

    Without it fp16 on a CPU would silently compute in fp32.
    """
    import torch

    accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu")


def set_backend(backend: str, distributed_type: Any) -> None:
    """Make Accelerate use this backend of torch.distributed, and this type of a job.

    Without it Accelerate chooses no backend on a host without a GPU. Each process would be a job of its own.
    """
    from accelerate import PartialState

    PartialState._prepare_backend = lambda *_, **__: (backend, distributed_type)


def set_device_to_cpu() -> None:
    """Make the CPU the device of each process.

    Without it Accelerate looks for a GPU with the number LOCAL_RANK as soon as there is a group.
    """
    import torch
    from accelerate import PartialState

    def set_device(self: Any) -> None:
        self.device = torch.device("cpu")

    PartialState.set_device = set_device


def launch_arguments(words: list[str]) -> tuple[Any, Any]:
    """Return the arguments of `accelerate launch WORDS`, filled from its config file, and the file's content.

    The command has no public function that reads its config file without starting the job.
    """
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    arguments, config, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    return arguments, config


def block_names(model: Any) -> tuple[str, ...]:
    """Return the names of the classes that FSDP wraps one by one; () if the model names none.

    Accelerate's wrap policy reads this attribute, which is a convention of transformers. Without it each FSDP
    config would have to name the classes, and fail for every other model.
    """
    return tuple(getattr(model, "_no_split_modules", None) or ())
