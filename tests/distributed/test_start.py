"""Tests of the state that ranks share after startup: rank 0's weights and every process group's timeout.

A silent process ends the job within --timeout_s, regardless of the process group in which other ranks wait.
"""

import re

import pytest

from tests.checkpoint.test_resume import LAUNCHERS
from tests.conftest import STRATEGIES, Job, full

# Program that changes the state of rank 1, which simulates a CPU with a different instruction set
SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from onecurve.distributed.accelerator import prepare, start
from onecurve.distributed.strategy_layouts import layout_of
from onecurve.distributed.process import run_process
from onecurve.flags.recipe import Recipe, parse

class Net(nn.Sequential):
    _no_split_modules = ("Linear",)

def main():
    accelerator, _ = start(parse(Recipe))
    torch.manual_seed(0)
    model = Net(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    if accelerator.process_index == 1:
        with torch.no_grad():
            CHANGE
    drawn = {name: p.detach().flatten().clone() for name, p in model.named_parameters()}
    model, optimizer = prepare(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1))
    layout = layout_of(model, optimizer)
    same = all(
        torch.equal(mine.cpu().flatten(), drawn[name][piece.start : piece.start + piece.length])
        for name, mine in layout.named_pieces(layout.local_tensors) for piece in [layout.piece_of[name]]
    )
    print(f"rank {accelerator.process_index} trains what it drew: {same}", flush=True)
    accelerator.backward(model(torch.randn(2, 4)).sum())
    optimizer.step()
    for group, (backend, _) in dist.distributed_c10d._world.pg_map.items():
        if backend == "gloo":
            timeout = group._get_backend(accelerator.device).options._timeout
            print(f"a group waits {timeout.total_seconds():g} s", flush=True)

if __name__ == "__main__":
    run_process(main)
"""
LAST_DIGITS = "for p in model.parameters(): p.mul_(1 + 2e-7)"
HYBRID = LAUNCHERS["hybrid"]  # Hybrid sharding uses four processes


def start(launcher: list, change: str, project) -> tuple[int, str]:
    (project / "begin.py").write_text(SCRIPT.replace("CHANGE", change))
    words = [*launcher, "begin.py", "--mixed_precision", "no", "--batch_size", "64", "--timeout_s", "77"]
    return Job(words, cwd=project).wait()


@pytest.mark.parametrize(
    # `groups` is the total number of process groups on all ranks: the world groups, and the groups that
    # DeepSpeed or the mesh creates.
    ("launcher", "groups"),
    [
        (STRATEGIES["ddp"], 2),
        full(HYBRID, 4 * 3),
        full(STRATEGIES["zero2"], 2 * 2),
        *(full(STRATEGIES[name], 2) for name in ("fsdp", "zero1", "zero3")),
    ],
)
def test_all_ranks_start_with_the_same_weights_and_timeout(launcher, groups, project_copy):
    status, output = start(launcher, LAST_DIGITS, project_copy)
    assert status == 0, output
    kept_weights = dict(re.findall(r"rank (\d) trains what it drew: (True|False)", output))
    assert kept_weights == {rank: str(rank != "1") for rank in kept_weights}, output
    assert len(kept_weights) == (4 if launcher is HYBRID else 2), output
    assert output.count("the ranks' initial weights differ") == 1, output
    timeouts = re.findall(r"a group waits (\d+) s", output)
    assert len(timeouts) >= groups, output
    assert set(timeouts) == {"77"}, output


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ("model[2] = nn.Linear(8, 3)", "2.bias=[[3]"),
        full("model[0].register_buffer('extra', torch.zeros(5))", "0.extra=[[5]"),
    ],
)
def test_a_different_model_on_one_rank_is_refused(change, difference, project_copy):
    status, output = start(STRATEGIES["ddp"], change, project_copy)
    assert status != 0
    assert output.count(f"error: the processes do not agree: the model is {difference}") == 1, output


COMPRESSED = ("--grad_compression", "bf16")


@pytest.mark.parametrize(
    ("strategy", "flags", "refusal"),
    [
        ("fsdp", COMPRESSED, "--grad_compression bf16 works only with DDP, but the strategy is fsdp"),
        *(full(s, COMPRESSED, f"with DDP, but the strategy is {s}") for s in ("zero1", "zero2", "zero3")),
        full("zero2", ("--deterministic",), "--deterministic does not work with ZeRO, because ZeRO adds"),
        full("zero3", ("--compile", "default"), "config) does not work with ZeRO-3, which gathers"),
    ],
)
def test_flags_that_a_strategy_refuses(strategy, flags, refusal, tmp_path):
    words = [*STRATEGIES[strategy], "train_hello.py", *flags, "--output_dir", tmp_path / "run"]
    status, output = Job(words).wait()
    assert status != 0
    (message,) = {line for line in output.splitlines() if line.startswith("error: ")}
    assert refusal in message
