"""All ranks train rank 0's initial weights, also where their CPUs draw others from the same seed."""

import re

import pytest

from tests.conftest import STRATEGIES, Job, full

# On rank 1 the change stands for a CPU with another instruction set.
SCRIPT = """
import torch
from torch import nn
from common.distributed.accelerator import prepare, start
from common.distributed.process import run_process
from common.distributed.layout import layout_of
from common.recipe import Recipe, parse

class Net(nn.Sequential):
    _no_split_modules = ("Linear",)

def main():
    accelerator, _ = start(parse(Recipe))
    torch.manual_seed(0)
    model = Net(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    if accelerator.process_index == 1:
        with torch.no_grad():
            {change}
    drawn = [p.detach().clone() for p in model.parameters()]
    layout = layout_of(*prepare(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1)))
    whole = [tensor.cpu().clone() for _, tensor in layout.whole(layout.local)]
    same = all(map(torch.equal, whole, drawn))
    print(f"rank {{accelerator.process_index}} trains what it drew: {{same}}", flush=True)

if __name__ == "__main__":
    run_process(main)
"""
LAST_DIGITS = "for p in model.parameters(): p.mul_(1 + 2e-7)"


def start(strategy: str, change: str, project) -> tuple[int, str]:
    (project / "initial.py").write_text(SCRIPT.format(change=change))
    words = [*STRATEGIES[strategy], "initial.py", "--mixed_precision", "no", "--batch_size", "64"]
    return Job(words, cwd=project).wait()


@pytest.mark.parametrize("strategy", ["fsdp", "zero2", full("ddp"), full("zero1"), full("zero3")])
def test_last_digits_that_another_cpu_draws(strategy, project_copy):
    status, output = start(strategy, LAST_DIGITS, project_copy)
    assert status == 0, output
    said = dict(re.findall(r"rank (\d) trains what it drew: (True|False)", output))
    assert said == {"0": "True", "1": "False"}, output
    assert output.count("the ranks drew different initial weights") == 1, output


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ("model[2] = nn.Linear(8, 3)", "2.bias=[[3]"),
        full("model[0].register_buffer('extra', torch.zeros(5))", "0.extra=[[5]"),
    ],
)
def test_another_model(change, difference, project_copy):
    status, output = start("ddp", change, project_copy)
    assert status != 0
    assert output.count(f"error: the processes do not agree: the model is {difference}") == 1, output
