"""Uses private names of Accelerate, and replaces some of its behaviour. Written for accelerate 1.15.0."""

from collections.abc import Callable
from typing import Any


def cache_package_lookups() -> None:
    """Make Accelerate look up each optional package only once per process.

    Otherwise, Accelerate looks up the LOMO optimizer's package twice in each optimizer step (accelerate
    #2695). Each lookup takes 33 us, because Python searches all folders in sys.path.
    """
    import functools

    from accelerate.utils import imports

    imports._is_package_available = functools.cache(imports._is_package_available)


def print_only_where(is_printing_process: Callable[[], bool]) -> None:
    """Make accelerator.print and trackers write only in processes where is_printing_process() returns True.

    Otherwise, every process whose LOCAL_RANK is 0 writes. If each process on a host sees only one GPU,
    LOCAL_RANK is 0 in all processes.
    """
    from accelerate import PartialState

    PartialState.is_local_main_process = property(lambda _: is_printing_process())


def skip_deepspeed_import() -> None:
    """Make Accelerate believe that DeepSpeed is not installed, for jobs that do not use DeepSpeed.

    Otherwise, Accelerate imports DeepSpeed to check whether an FSDP model is a DeepSpeed engine. This import
    takes 2 s in each process.
    """
    from accelerate.utils import other

    other.is_deepspeed_available = lambda: False


def skip_dtensor_import() -> None:
    """Make Accelerate assume that no parameter is a DTensor, for jobs without FSDP.

    Otherwise, Accelerator.prepare() imports DTensor, which takes 1 s in each process.
    """
    from accelerate import accelerator

    accelerator.model_has_dtensor = lambda model: False


def scale_loss_on_cpu(accelerator: Any) -> None:
    """Enable fp16 autocast and a loss scaler on the CPU.

    Otherwise, fp16 training on a CPU silently computes in fp32, because Accelerate enables fp16 autocast only
    on GPUs.
    """
    import torch

    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu")


def set_backend(backend: str, distributed_type: Any) -> None:
    """Make Accelerate use a specific torch.distributed backend and distributed type.

    Otherwise, Accelerate does not choose a backend on hosts without a GPU, so that each process becomes a
    separate job.
    """
    from accelerate import PartialState

    backend_and_type = (backend, distributed_type)
    PartialState._prepare_backend = lambda *_, **__: backend_and_type


def set_device_to_cpu() -> None:
    """Make Accelerate select the CPU as each process's device.

    Otherwise, Accelerate selects the GPU with index LOCAL_RANK after a process group has been created.
    """
    import torch
    from accelerate import PartialState

    def set_device(partial_state: Any) -> None:
        partial_state.device = torch.device("cpu")

    PartialState.set_device = set_device


def launch_arguments(launch_words: list[str]) -> tuple[Any, Any]:
    """Return the parsed arguments of `accelerate launch LAUNCH_WORDS`, and the content of the config file.

    The arguments include the settings in the config file. Accelerate has no public function that reads the
    config file without starting the job.
    """
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    parsed_arguments = launch_command_parser().parse_args(launch_words)
    launch_options, config_content, _ = _validate_launch_command(parsed_arguments)
    return launch_options, config_content


def block_names(model: Any) -> tuple[str, ...]:
    """Return the names of the classes that FSDP wraps individually, or () if the model lists no classes.

    Accelerate's wrap policy reads the model's attribute `_no_split_modules`, a convention of Transformers.
    Without this attribute, an FSDP config would have to list one model's classes, and would fail for all
    other models.
    """
    return tuple(getattr(model, "_no_split_modules", None) or ())
