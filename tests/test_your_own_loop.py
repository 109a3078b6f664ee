"""docs/your_own_loop.md as written: its loop, killed at random and continued elsewhere, has the same bits."""

import random
import re
import shutil

import psutil
import pytest

from common.checkpoint.format import steps_in
from common.checkpoint.mirror import committed
from common.system.s3 import ObjectStore
from tests.conftest import ROOT, Job, full, mutate, python, run, torchrun, wait_until
from tests.support.s3 import BUCKET, s3, use_s3  # noqa: F401 (a fixture)

TEXT = (ROOT / "docs" / "your_own_loop.md").read_text()
(LOOP,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
ENV = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
PER_EPOCH, STEPS = 28, 280


def weights(folder) -> list[bytes]:
    """The last checkpoint's model and optimizer."""
    last = folder / "checkpoints" / f"step_{STEPS:08d}"
    return [(last / f"{name}.safetensors").read_bytes() for name in ("model", "optimizer")]


@pytest.mark.parametrize(("exact", "processes"), [(False, (1, 2, 1, 2)), full(True, (4, 1, 2, 4))])
def test_it_is_killed_at_random_and_ends_with_the_same_bits(exact, processes, tmp_path, s3, monkeypatch):  # noqa: F811
    use_s3(monkeypatch, s3)
    (tmp_path / "my_loop.py").write_text(LOOP)
    changes = [("MICRO_BATCH, SAVE_EVERY = 0, 10, 64, 32,", "MICRO_BATCH, SAVE_EVERY = 0, 10, 64, 16,")]
    for change in re.findall(r"```diff\n(.*?)```", TEXT, re.DOTALL):
        removed, added = (re.findall(rf"^[{sign}](.*)$", change, re.MULTILINE) for sign in "-+")
        changes.append(("\n".join(removed), "\n".join(added)))
    for old, new in changes if exact else ():
        mutate(tmp_path, "my_loop.py", old, new)
    script, url, seed = tmp_path / "my_loop.py", f"s3://{BUCKET}/{tmp_path.name}", random.randrange(10**6)
    run([*python(), script, "--folder", tmp_path / "alone"], env=ENV)
    draw, store, folder, reached = random.Random(seed), ObjectStore(url), tmp_path / "run", 0
    for number, count in enumerate(processes, 1):
        launcher = torchrun(count) if count > 1 else python()
        job = Job([*launcher, script, "--folder", folder, "--s3", url], env=ENV)
        if number == len(processes):
            status, output = job.wait()
            assert status == 0, output
            break
        goal = reached + draw.randint(1, STEPS // 5)
        wait_until(lambda goal=goal: max(committed(store), default=0) >= goal, job)
        for process in (*psutil.Process(job.process.pid).children(recursive=True), job.process):
            process.kill()
        output = job.wait()[1]
        assert ("continuing" in output) == (reached > 0), f"seed {seed}: {output}"
        reached = max(steps_in(folder / "checkpoints"))
        shutil.rmtree(folder)  # the next one has what is in S3
    (begun,) = re.findall(r"continuing at step (\d+)", output)
    assert 0 < int(begun) < STEPS, seed
    assert weights(folder) == weights(tmp_path / "alone"), seed
