"""Tests of the loop in docs/your_own_loop.md, run unchanged with the installed package.

A killed loop must end with bitwise identical results.
"""

import random
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import psutil
import pytest

from onecurve.checkpoint.mirror import committed_steps
from onecurve.system.processes import kill
from onecurve.system.s3 import ObjectStore
from tests.conftest import ROOT, Job, full, mutate, run, wait_until
from tests.support.s3 import BUCKET, s3, use_s3  # noqa: F401 (a fixture)
from tests.test_house import statements_of

TEXT = (ROOT / "docs" / "your_own_loop.md").read_text()
(LOOP,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
# Replacement that makes each step use four micro-batches
EXACT = [("EVERY = 0, 10, 64, 32,", "EVERY = 0, 10, 64, 16,")]
for change in re.findall(r"```diff\n(.*?)```", TEXT, re.DOTALL):
    EXACT.append(tuple("\n".join(re.findall(rf"^[{sign}](.*)$", change, re.MULTILINE)) for sign in "-+"))
# Layers that half of the micro-batches skip: all micro-batches of some steps, or all micro-batches of one
# process
DROP = """class Layers(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x) if torch.rand(()) < 0.5 else x

torch.manual_seed(SEED)
"""
LAYERS = "nn.Dropout(0.2), Layers(nn.Linear(128, 128), nn.GELU()), Layers(nn.Linear(128, 128), nn.GELU()),"
LAYER_DROP = [*EXACT, ("torch.manual_seed(SEED)\n", DROP), ("nn.Dropout(0.2),", LAYERS)]
ENV = {"OMP_NUM_THREADS": "1"}
STEPS = 280  # Number of steps, in ten epochs of 28 steps
MAX_STATEMENTS = 2_500  # Maximum in the part of the core that the loop loads, as counted for the budgets


def weights(folder: Path) -> list[bytes]:
    """Return the bytes of the last checkpoint's model and optimizer files."""
    return [file.read_bytes() for file in sorted(folder.glob(f"checkpoints/*{STEPS}/*.safetensors"))]


@pytest.fixture(scope="session")
def python(tmp_path_factory) -> Path:
    """Return the Python of a new environment with the built wheel, but without scripts and tools.

    Other packages come from the tests' environment, so the test needs no network.
    """
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"  # setuptools leaves files next to its input
    shutil.copytree(ROOT / "onecurve", source / "onecurve", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source]
    subprocess.run([*pip, *build], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    [wheel] = folder.glob("onecurve-*.whl")
    subprocess.run([*pip, "--python", python, "install", "--no-deps", wheel], check=True)
    [site_packages] = folder.glob("venv/lib/python*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return python


def test_the_package_contains_only_the_core(python, tmp_path):
    """Check that the loop runs without scripts and tools, and loads no flags and no communication between
    ranks.
    """
    imports = re.findall("^from onecurve.*$", LOOP, re.MULTILINE)
    shown = "import importlib.util, sys\n"
    shown += "print(*(m.__file__ for name, m in sys.modules.items() if name.startswith('onecurve')))"
    absent = "assert not importlib.util.find_spec('tools')\nassert 'timm' not in sys.modules"
    output = run([python, "-c", "\n".join([*imports, shown, absent])], env=ENV, cwd=tmp_path)
    files = [Path(file) for file in output.split()]
    assert all(file.is_relative_to(python.parents[1]) for file in files)
    names = {file.name for file in files}
    assert "training.py" in names
    assert not names & {"watch.py", "channel.py", "agreement.py", "recipe.py", "fields.py", "timm_models.py"}
    assert sum(map(statements_of, files)) < MAX_STATEMENTS


CASES = [([], (1, 2, 1)), (LAYER_DROP, (4, 1)), full(EXACT, (4, 1, 2, 4)), full(LAYER_DROP, (2, 1, 4))]


@pytest.mark.parametrize(("changes", "processes"), CASES)
def test_a_loop_that_is_killed_at_random_ends_with_the_same_bits(
    changes,
    processes,
    python,
    tmp_path,
    s3,  # noqa: F811
    monkeypatch,
):
    """Keep a killed loop's state only in S3, as if another machine continued the loop."""
    use_s3(monkeypatch, s3)
    url, script = f"s3://{BUCKET}/{tmp_path.name}", tmp_path / "my_loop.py"
    script.write_text(LOOP)
    for old, new in changes:
        mutate(tmp_path, script.name, old, new)
    run([python, script, "--folder", tmp_path / "alone"], env=ENV, cwd=tmp_path)
    store, outputs = ObjectStore(url), []
    for count in processes:
        folder = tmp_path / f"run{len(outputs)}"  # A new folder simulates another machine's disk
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
        words = [python, *torchrun[: 4 * (count > 1)], script, "--folder", folder, "--s3", url]
        job = Job(words, env=ENV, cwd=tmp_path)
        if len(outputs) < len(processes) - 1:
            step = max(committed_steps(store), default=0) + random.randint(1, STEPS // 5)
            wait_until(
                lambda: max(committed_steps(store), default=0) >= step or job.process.poll() is not None  # noqa: B023
            )
            # On a busy machine, the loop may end before the test sees the store's last step.
            if job.process.poll() is None:
                kill(psutil.Process(job.process.pid).children(recursive=True))
                job.process.kill()
        outputs.append(job.wait()[1])
    begun = [int(step) for output in outputs for step in re.findall(r"continuing at step (\d+)", output)]
    assert 0 < begun[0] <= STEPS, outputs
    assert sorted(begun) == begun, outputs
    assert weights(folder) == weights(tmp_path / "alone") != []
    model_files = (tmp_path / "alone").glob("checkpoints/*/model.safetensors")
    assert len({file.read_bytes() for file in model_files}) > 1  # the weights change
