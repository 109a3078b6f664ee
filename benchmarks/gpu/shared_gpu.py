"""Starts a train script whose ranks share the first GPU, over gloo: NCCL refuses two ranks on one GPU.

    torchrun --nproc_per_node=2 -m benchmarks.gpu.shared_gpu train_cnn_a.py [its flags]

It takes the place of several GPUs for a check of the strategies; it says nothing about speed.
"""

import os
import runpy
import sys
from collections.abc import Callable
from functools import partial

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType

from common.distributed import rendezvous
from common.system.env import LOCAL_NUMBER

COLLECTIVES = torch.library.Library("_c10d_functional", "IMPL")


def main() -> None:
    processes = int(os.environ["WORLD_SIZE"])
    # LOCAL_RANK is the GPU's; ranks keep their RANK, and their number on the host
    os.environ[LOCAL_NUMBER], os.environ["LOCAL_RANK"] = os.environ["LOCAL_RANK"], "0"
    if torch.cuda.is_available():  # its start asks for the properties of each GPU that torch counts
        torch.cuda.init()
    torch.cuda.device_count = lambda: processes

    def backend(self: PartialState, *_: object, **__: object) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_GPU

    def device(self: PartialState) -> None:
        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(0)

    gather_on_the_host()
    rendezvous.backend = lambda: "gloo"
    PartialState._prepare_backend, PartialState.set_device = backend, device
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


def gather_on_the_host() -> None:
    """Takes DTensor's collectives through the host: gloo's crash on GPU memory (pytorch issue 152645)."""

    def through_host(collective: Callable, tensor: torch.Tensor, *words: object) -> torch.Tensor:
        return torch.ops._c10d_functional.wait_tensor(collective(tensor.cpu(), *words)).to(tensor.device)

    for name in ("all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor", "broadcast"):
        COLLECTIVES.impl(name, partial(through_host, getattr(torch.ops._c10d_functional, name)), "CUDA")


if __name__ == "__main__":
    main()
