"""--grad_compression: DDP exchanges gradients in bf16. With accumulation they are exchanged once a step."""

import gzip
import json

import pytest

from common.telemetry.profiler import FOLDER, TRACE
from tests.conftest import CNN, STRATEGIES, metrics, result, run

FLAGS = ["--data", "digits", "--batch_size", "96", "--max_steps", "12", "--log_every", "1"]
FLAGS += ["--trackers", "none"]
FLAGS += ["--mixed_precision", "no", "--telemetry_s", "0", "--profile", "8"]


def trained(folder, cache, *flags):
    run([*STRATEGIES["ddp"], *CNN, *FLAGS, *flags, *cache, "--output_dir", folder])
    trace = json.loads(gzip.decompress((folder / FOLDER / TRACE).read_bytes()))["traceEvents"]
    losses = [line["train/loss"] for line in metrics(folder) if "train/loss" in line]
    spans = [
        (e["ts"], e["ts"] + e["dur"]) for e in trace if e["name"].startswith("ProfilerStep") and "dur" in e
    ]
    begun = [e["ts"] for e in trace if e["name"] == "c10d::allreduce_"]
    return losses, [sum(start <= at < end for at in begun) for start, end in sorted(spans)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory, cache):
    return trained(tmp_path_factory.mktemp("plain") / "run", cache)


def test_gradients_in_bf16_round(plain, cache, tmp_path):
    """The first step has the same loss, as it knows no gradient; from then on it differs by rounding."""
    losses, _ = trained(tmp_path / "run", cache, "--grad_compression", "bf16")
    assert losses[0] == plain[0][0]
    assert losses[1:] != plain[0][1:]
    assert losses == pytest.approx(plain[0], abs=0.02)
    assert result(tmp_path / "run")["gradient_reduction"] == "bf16"


def test_accumulation_exchanges_no_gradients_in_between(plain, cache, tmp_path):
    """A step with 4 accumulations begins as many exchanges as a step with one."""
    _, exchanges = trained(tmp_path / "run", cache, "--per_device_batch_size", "12")
    assert exchanges == plain[1]
    assert len(exchanges) == 3
    assert min(exchanges) > 0
