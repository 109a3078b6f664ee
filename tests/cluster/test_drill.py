"""The fire drill of cluster/virtual_cluster.py: what its table says is so."""

import math
import sys

import pytest

from cluster import drill
from tests.conftest import ROOT, Job

TRAIN = ["train_hello.py", "--trackers", "none", "--mixed_precision", "no", "--epochs", "1000"]
TRAIN += ["--max_steps", "3000", "--log_every", "16", "--checkpoint_every", "64", "--timeout_s", "20"]


def test_a_row_for_each_fault():
    survived = drill.Outcome("kill-rank", True, 1, 16, 8.4, 2e-7)
    lost = drill.Outcome("power-off", notes="ended before the fault")
    assert drill.table([survived, lost]).splitlines()[2:] == [
        "| kill-rank | yes | 1 | 16 | 8 | 2e-07 |",
        "| power-off | no ended before the fault | 1 | 0 | - | - |",
    ]
    assert math.isnan(lost.difference)


def test_repeated_steps_are_counted_from_the_log():
    log = "node1 | continuing at step 1,024 with /x\nnode1 | continuing at step 1,088 with /x\n"
    assert drill._repeated(log, 1100) == 76
    assert drill._repeated("", 1100) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give the command after --"),
        (["--faults", "fire", "--", "true"], "--faults fire: choose among kill-rank, kill-agent"),
        (["--hosts", "1", "--", "true"], "--hosts: at least 2"),
    ],
)
def test_mistakes(words, said, cluster_tools):
    status, output = Job([sys.executable, "cluster/virtual_cluster.py", "drill", *words], cwd=ROOT).wait()
    assert status == 1
    assert said in output


@pytest.mark.full
@pytest.mark.parametrize(
    ("launcher", "starts"), [(["--min_hosts", "1"], 1), ([], 2)], ids=["elastic", "started again"]
)
def test_a_drill(launcher, starts, cluster_tools, tmp_path):
    """An elastic job goes on by itself; another one is started again, and its losses stay the same."""
    command = ["launch.py", "--hostfile", "/etc/hostfile", "--log_dir", tmp_path / "logs", *launcher, *TRAIN]
    flags = ["--hosts", "2", "--folder", tmp_path / "runs", "--faults", "kill-rank,power-off"]
    words = ["cluster/virtual_cluster.py", "drill", *flags, "--", sys.executable, *command]
    status, output = Job([sys.executable, *words], cwd=ROOT).wait(400)
    assert status == 0, output
    rows = [line.strip("| ").split(" | ") for line in output.splitlines() if line.startswith("| ")][1:]
    assert [row[0] for row in rows] == ["kill-rank", "power-off"]
    for _, survived, started, repeated, seconds, difference in rows:
        assert (survived, int(started)) == ("yes", starts)
        assert 0 <= int(repeated) <= 64 + 16
        assert 0 < float(seconds) < 120
        assert float(difference) < 1e-5
    assert (tmp_path / "runs" / "power-off" / "result.json").exists()
    assert not cluster_tools.STATE.exists()
