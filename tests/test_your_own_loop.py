"""docs/your_own_loop.md as written: its loop, killed at random and continued elsewhere, has the same bits."""

import random
import re
from pathlib import Path

import psutil
import pytest

from onecurve.checkpoint.mirror import committed
from onecurve.system.processes import kill
from onecurve.system.s3 import ObjectStore
from tests.conftest import ROOT, Job, full, mutate, python, run, torchrun, wait_until
from tests.support.s3 import BUCKET, s3, use_s3  # noqa: F401 (a fixture)

TEXT = (ROOT / "docs" / "your_own_loop.md").read_text()
(LOOP,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
EXACT = [("EVERY = 0, 10, 64, 32,", "EVERY = 0, 10, 64, 16,")]  # four micro-batches
for change in re.findall(r"```diff\n(.*?)```", TEXT, re.DOTALL):
    EXACT.append(tuple("\n".join(re.findall(rf"^[{sign}](.*)$", change, re.MULTILINE)) for sign in "-+"))
# Layers that are left out of half of the micro-batches: in some steps of all, or of those of a process.
DROP = """class Layers(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x) if torch.rand(()) < 0.5 else x

torch.manual_seed(SEED)
"""
LAYERS = "nn.Dropout(0.2), Layers(nn.Linear(128, 128), nn.GELU()), Layers(nn.Linear(128, 128), nn.GELU()),"
LAYER_DROP = [*EXACT, ("torch.manual_seed(SEED)\n", DROP), ("nn.Dropout(0.2),", LAYERS)]
ENV = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
STEPS = 280  # 28 in an epoch


def weights(folder: Path) -> list[bytes]:
    """The last checkpoint's model and optimizer."""
    return [file.read_bytes() for file in sorted(folder.glob(f"checkpoints/*{STEPS}/*.safetensors"))]


CASES = [([], (1, 2, 1)), full(LAYER_DROP, (4, 1)), full(EXACT, (4, 1, 2, 4)), full(LAYER_DROP, (2, 1, 4))]


@pytest.mark.parametrize(("changes", "processes"), CASES)
def test_it_is_killed_at_random_and_ends_with_the_same_bits(changes, processes, tmp_path, s3, monkeypatch):  # noqa: F811
    """What a killed one leaves is in S3 alone, as on another machine."""
    use_s3(monkeypatch, s3)
    url, script = f"s3://{BUCKET}/{tmp_path.name}", tmp_path / "my_loop.py"
    script.write_text(LOOP)
    for old, new in changes:
        mutate(tmp_path, script.name, old, new)
    run([*python(), script, "--folder", tmp_path / "alone"], env=ENV)
    store, outputs = ObjectStore(url), []
    for count in processes:
        folder = tmp_path / f"run{len(outputs)}"  # of another disk
        words = [*(torchrun(count) if count > 1 else python()), script, "--folder", folder, "--s3", url]
        job = Job(words, env=ENV)
        if len(outputs) < len(processes) - 1:
            step = max(committed(store), default=0) + random.randint(1, STEPS // 5)
            wait_until(lambda: max(committed(store), default=0) >= step or job.process.poll() is not None)  # noqa: B023
            if job.process.poll() is None:  # a busy machine may see the store's last step first
                kill(psutil.Process(job.process.pid).children(recursive=True))
                job.process.kill()
        outputs.append(job.wait()[1])
    begun = [int(step) for output in outputs for step in re.findall(r"continuing at step (\d+)", output)]
    assert 0 < begun[0] <= STEPS, outputs
    assert sorted(begun) == begun, outputs
    assert weights(folder) == weights(tmp_path / "alone") != []
