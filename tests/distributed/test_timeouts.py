"""A process that falls silent ends the job within --timeout_s, whatever made the process group."""

import re

import pytest

from tests.conftest import STRATEGIES, Job, accelerate, full

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn, optim
from common.distributed.accelerator import prepare, start
from common.distributed.process import run_process
from common.recipe import Recipe, parse

class Net(nn.Sequential):
    _no_split_modules = ("Linear",)

def main():
    accelerator, _ = start(parse(Recipe))
    model = Net(nn.Linear(4, 8), nn.Linear(8, 4))
    model, optimizer = prepare(accelerator, model, optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    for group, (backend, _) in dist.distributed_c10d._world.pg_map.items():
        if backend == "gloo":
            timeout = group._get_backend(accelerator.device).options._timeout
            print(f"a group waits {timeout.total_seconds():g} s", flush=True)

if __name__ == "__main__":
    run_process(main)
"""
# Two hosts' hybrid sharding on one: two copies of the model, each in two parts.
HYBRID = accelerate(
    "fsdp_2x4gpu",
    *("--num_machines", "1", "--main_process_port", "0", "--num_processes", "4"),
    *("--parallelism_config_dp_shard_size", "2"),
)


@pytest.mark.parametrize(("launcher", "groups"), [(STRATEGIES["zero2"], 2 * 2), full(HYBRID, 4 * 3)])
def test_every_group_has_the_timeout(launcher, groups, project_copy):
    (project_copy / "groups.py").write_text(SCRIPT)
    words = [*launcher, "groups.py", "--batch_size", "8", "--timeout_s", "77", "--mixed_precision", "no"]
    status, output = Job(words, cwd=project_copy).wait()
    assert status == 0, output
    timeouts = re.findall(r"a group waits (\d+) s", output)
    assert len(timeouts) >= groups, output  # the world and those of DeepSpeed, or of the mesh
    assert set(timeouts) == {"77"}, output
