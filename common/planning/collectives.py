"""One of two processes of this machine that time gloo's collectives: what they cost the hosts themselves.

`python -m common.planning.collectives STORE RANK` (STORE: a file that both name); rank 0 prints
{kind: [seconds of a small one, seconds for each byte of the tensor]} as JSON. The network is the loopback
interface, so that copies, sums and TCP are all that takes time.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

SMALL, LARGE = 2, 2**22  # fp32 numbers: 8 bytes, 16 MiB
ROUNDS = 7


def main() -> None:
    store, rank = sys.argv[1], int(sys.argv[2])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    found = {kind: (_median(call(kind, SMALL)), _median(call(kind, LARGE)) / (LARGE * 4)) for kind in kinds}
    if rank == 0:
        print(json.dumps(found), flush=True)
    os._exit(0)  # gloo's threads sometimes abort in their destructors


def call(kind: str, numbers: int) -> Callable[[], object]:
    """A collective on a tensor of so many fp32 numbers."""
    whole, half = torch.zeros(numbers), torch.zeros(numbers // 2)
    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, half),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(half, whole),
    }[kind]


def _median(exchange: Callable[[], object]) -> float:
    """The median of the seconds of ROUNDS calls, after one that warms up."""
    exchange()
    seconds = []
    for _ in range(ROUNDS):
        dist.barrier()
        began = time.perf_counter()
        exchange()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
