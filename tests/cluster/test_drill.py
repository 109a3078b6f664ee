"""The fire drill of cluster/virtual_cluster.py: what its table says is so."""

import math
import sys
from pathlib import Path

import pytest

from cluster import drill
from tests.conftest import ROOT, Job, mutate, rows_of

TRAIN = ["train_hello.py", "--trackers", "none", "--mixed_precision", "no", "--epochs", "1000"]
TRAIN += ["--max_steps", "1000", "--log_every", "16", "--checkpoint_every", "125", "--timeout_s", "20"]
TO_S3 = ["--env", "AWS_ENDPOINT_URL", "--env", "AWS_ACCESS_KEY_ID", "--env", "AWS_SECRET_ACCESS_KEY"]
TO_S3 += ["--env", "NO_PROXY"]
# What each fault finds out: a mistake in the code, by which its row is not as it should be
WAIT_FOR_UPLOAD = "self.mirror.offer(step, best)\n                self.mirror.wait(1e9)\n"
NOT_WRITTEN = "        except OSError as error:\n"
REMOVE_ALL = "            for old in steps_in(parent):\n"
REMOVE_ALL += "                checkpoints.remove(parent / step_name(old))\n"
BATCH = "    batch = elastic_batch(job)\n"
WITHOUT_TIMEOUT = "    job = __import__('dataclasses').replace(job, timeout_s=9999)\n"
FILL = 'return send(f"{parameter}/{name}", shape, dtype)'
MUTANTS = {
    "kill-rank": [("onecurve/checkpoint/optimizer_state.py", FILL, FILL.replace("send", "0 * send"))],
    "kill-agent": [("onecurve/system/processes.py", "SIG, signal.SIGTERM", "SIG, signal.SIGKILL")],
    "cut-cable": [
        ("tools/launch/elastic.py", "if h.name not in self.away and not self._leaves(h)]", "]"),
        ("tools/launch/elastic.py", "SETTLE_S if self.began else CONNECT_S", "9999"),
    ],
    "power-off": [
        ("onecurve/numerics/order.py", "samples.order(seed,", "samples.order(seed + batch.processes,")
    ],
    "stop-rank": [("onecurve/distributed/accelerator.py", BATCH, WITHOUT_TIMEOUT + BATCH)],
    "fill-disk": [
        ("onecurve/checkpoint/saver.py", NOT_WRITTEN, NOT_WRITTEN + REMOVE_ALL),
        ("onecurve/run/log.py", "self._set_problem(file.name, error)", "pass"),  # that may fail first
    ],
    "preempt": [("onecurve/run/ending.py", "        ranks.flush()", "        pass")],
    "silence-s3": [
        ("onecurve/checkpoint/saver.py", "self.mirror.offer(step, best)\n", WAIT_FOR_UPLOAD),
        ("onecurve/system/s3.py", "READ_S = 15 ", "READ_S = 999 "),
    ],
}


def test_a_row_for_each_fault():
    survived = drill.Outcome("kill-rank", True, 1, 16, 8.4, 2e-7)
    lost = drill.Outcome("power-off", notes="ended before the fault")
    assert drill.table([survived, lost]).splitlines()[2:] == [
        "| kill-rank | yes | 1 | 16 | 8 | 2e-07 |",
        "| power-off | no ended before the fault | 1 | 0 | - | - |",
    ]
    assert math.isnan(lost.difference)


def test_repeated_steps_are_counted_from_the_log():
    before = "epoch 5/9  step 1,088/2,000  loss 0.1\nfailed after step 1,100: node2\n"
    log = f"{before}node1 | continuing at step 1,024 with /x\nepoch 5/9  step 1,104/2,000  loss 0.1\n"
    assert drill._repeated(f"{log}continuing at step 1,024; 76 steps to repeat") == 76
    assert drill._repeated(f"{log}node1 | continuing at step 1,088 with /x\n") == 76
    assert drill._repeated(f"{before}continuing at step 0; 1,100 steps to repeat") == 1100  # no checkpoint
    assert drill._repeated(before) == 0


@pytest.mark.parametrize(("words", "said"), rows_of("wrong drills"))
def test_mistakes(words, said, cluster_tools):
    status, output = Job([sys.executable, "cluster/virtual_cluster.py", "drill", *words.split()]).wait()
    assert status == 1
    assert said in output


def rows(project: Path, folder: Path, launcher: list[str], faults: str, train: list[str]) -> list[list[str]]:
    """The rows of the table of a drill of the project's code, as words."""
    command = ["launch.py", "--hostfile", "/etc/hostfile", "--log_dir", folder / "logs", *launcher, *train]
    flags = ["--hosts", "2", "--folder", folder / "runs", "--faults", faults]
    words = ["cluster/virtual_cluster.py", "drill", *flags, "--", sys.executable, *command]
    _, output = Job([sys.executable, *words], cwd=project).wait(1200)
    found = [line.strip("| ").split(" | ") for line in output.splitlines() if line.startswith("| ")][1:]
    assert found, output
    return found


def is_as_it_should_be(row: list[str], starts: int = 1) -> bool:
    """The job goes on by itself, from the last checkpoint or from where it was, and stays the same."""
    fault, survived, started, repeated, _, difference = row
    most = 0 if fault in ("kill-agent", "preempt", "silence-s3") else 125 + 16
    is_same = difference != "-" and float(difference) < 1e-5
    return (survived, int(started)) == ("yes", starts) and int(repeated) <= most and is_same


@pytest.mark.full
def test_an_elastic_job_survives_all_faults(cluster_tools, tmp_path):
    train = [*TRAIN, "--s3", "s3://drill/hello"]
    found = rows(ROOT, tmp_path, ["--min_hosts", "1", *TO_S3], ",".join(drill.FAULTS), train)
    assert [row[0] for row in found] == list(drill.FAULTS)
    for row in found:
        assert is_as_it_should_be(row, starts=2 if row[0] == "fill-disk" else 1), row
    assert (tmp_path / "runs" / "power-off" / "result.json").exists()
    assert not cluster_tools.STATE.exists()


@pytest.mark.full
def test_another_job_is_started_again(cluster_tools, tmp_path):
    for row in rows(ROOT, tmp_path, [], "kill-rank,power-off", TRAIN):
        assert is_as_it_should_be(row, starts=2), row


def test_each_mistake_can_be_made():
    for file, old, _ in (mutant for mutants in MUTANTS.values() for mutant in mutants):
        assert (ROOT / file).read_text().count(old) == 1, old


@pytest.mark.full
@pytest.mark.parametrize("fault", MUTANTS)
def test_a_mistake_fails_the_drill(fault, cluster_tools, project_copy, tmp_path):
    for file, old, new in MUTANTS[fault]:
        mutate(project_copy, file, old, new)
    launcher, train = ["--min_hosts", "1"], TRAIN
    if fault == "silence-s3":
        launcher, train = [*launcher, *TO_S3], [*TRAIN, "--s3", "s3://drill/hello"]
    [row] = rows(project_copy, tmp_path, launcher, fault, train)
    assert not is_as_it_should_be(row, starts=2 if fault == "fill-disk" else 1), row
