"""One process of doctor.py's all-reduce over all devices: tests their connections and their speed.

The backend is that of a job: nccl between GPUs, else gloo. Prints JSON lines. With --gpus the first has
torch's architectures and the GPU's capability, or why torch can't use the GPU (`unusable`), which ends the
process. The last has the seconds of a small all-reduce and GB/s of a large one (bytes of the tensor / s).
"""

import json
import os
import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

SMALL, LARGE = 1, 2**24  # fp32 numbers: 4 bytes, 64 MiB
ROUNDS = 5


def main() -> None:
    within_s, gpu = float(sys.argv[1]), "--gpus" in sys.argv[2:]
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        try:
            torch.cuda.init()
            torch.cuda.set_device(device)
        except (RuntimeError, AssertionError) as error:  # AssertionError: a torch without CUDA
            print(json.dumps({"unusable": str(error).splitlines()[0]}), flush=True)
            sys.exit(1)
        about = {
            "built_for": torch.cuda.get_arch_list(),
            "capability": torch.cuda.get_device_capability(),
        }
        print(json.dumps(about), flush=True)  # now, as the rest fails on a GPU that torch was not built for
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=within_s))
    found = {
        "latency_s": _seconds(torch.ones(SMALL, device=device)),
        "gb_per_s": LARGE * 4 / 1e9 / _seconds(torch.ones(LARGE, device=device)),
        "backend": dist.get_backend(),
    }
    dist.barrier()
    print(json.dumps(found), flush=True)
    os._exit(0)  # gloo's threads sometimes abort in their destructors


def _seconds(numbers: torch.Tensor) -> float:
    """The median of ROUNDS all-reduces, after one that opens the connections."""
    times = []
    for _ in range(ROUNDS + 1):
        began = time.perf_counter()
        dist.all_reduce(numbers)
        if numbers.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


if __name__ == "__main__":
    main()
