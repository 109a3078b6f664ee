"""Start a train script whose ranks share the first GPU, over NCCL 2.30 or newer, or else over gloo.

    torchrun --nproc_per_node=2 -m benchmarks.gpu.shared_gpu train_cnn_a.py [SCRIPT_FLAGS ...]

With this command, one GPU is sufficient to check the collectives of all strategies and their order. The
command can't measure speed, because the ranks take turns, and it does not test links between GPUs or hosts.
"""

import os
import runpy
import sys
from collections.abc import Callable
from functools import partial

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType

from onecurve.distributed import accelerator, rendezvous, step_graph
from onecurve.system.env import LOCAL_NUMBER_VARIABLE

COLLECTIVES = torch.library.Library("_c10d_functional", "IMPL")
LEAST_NCCL = (2, 30)  # first NCCL version that accepts several ranks on one GPU
NCCL = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}


def main() -> None:
    processes = int(os.environ["WORLD_SIZE"])
    # LOCAL_RANK selects the GPU. RANK stays unchanged, and LOCAL_NUMBER stores the rank's index on the host.
    os.environ[LOCAL_NUMBER_VARIABLE], os.environ["LOCAL_RANK"] = os.environ["LOCAL_RANK"], "0"
    if torch.cuda.is_available():  # init() reads the properties of device_count() GPUs
        torch.cuda.init()
    torch.cuda.device_count = lambda: processes
    if has_new_nccl():
        use_nccl()
    else:
        use_gloo()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


def has_new_nccl() -> bool:
    return torch.cuda.is_available() and torch.cuda.nccl.version()[:2] >= LEAST_NCCL


def use_nccl() -> None:
    """Let the ranks share the GPU over NCCL.

    The project's check that each rank uses a different GPU is disabled.
    """
    os.environ |= NCCL
    accelerator.refuse_shared_gpu = lambda *_: None
    if os.environ["RANK"] == "0":
        print(
            f"{os.environ['WORLD_SIZE']} ranks share one GPU over NCCL {torch.cuda.nccl.version()}",
            flush=True,
        )


def use_gloo() -> None:
    """Let the ranks share the GPU over gloo."""

    def backend(self: PartialState, *_: object, **__: object) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_GPU

    def device(self: PartialState) -> None:
        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(0)

    gather_on_the_host()
    rendezvous.backend = accelerator.backend = step_graph.backend = lambda: "gloo"
    PartialState._prepare_backend, PartialState.set_device = backend, device


def gather_on_the_host() -> None:
    """Run DTensor's collectives in CPU memory, because gloo crashes with GPU memory (pytorch #152645)."""

    def through_host(collective: Callable, tensor: torch.Tensor, *words: object) -> torch.Tensor:
        return torch.ops._c10d_functional.wait_tensor(collective(tensor.cpu(), *words)).to(tensor.device)

    for name in ("all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor", "broadcast"):
        COLLECTIVES.impl(name, partial(through_host, getattr(torch.ops._c10d_functional, name)), "CUDA")


if __name__ == "__main__":
    main()
