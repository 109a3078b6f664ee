"""Starts a train script whose ranks share the first GPU, over gloo: NCCL refuses two ranks on one GPU.

    torchrun --nproc_per_node=2 -m benchmarks.gpu.shared_gpu train_cnn_a.py [its flags]

It takes the place of several GPUs for a check of the strategies; it says nothing about speed.
"""

import os
import runpy
import sys

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType

from common.distributed import rendezvous
from common.system.env import LOCAL_NUMBER


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

    rendezvous.backend = lambda: "gloo"
    PartialState._prepare_backend, PartialState.set_device = backend, device
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
