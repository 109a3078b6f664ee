"""Tests that the fire-drill table in cluster/virtual_cluster.py is correct."""

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
# Code changes that make a fault's table row wrong. MUTANTS lists the changes by fault, and the drill
# must detect each change.
WAIT_FOR_UPLOAD = "self.mirror.offer(step, best_step)\n                self.mirror.wait(1e9)\n"
NOT_WRITTEN = "        except OSError as error:\n"
REMOVE_ALL = "            for old in steps_in(checkpoints_folder):\n"
REMOVE_ALL += "                checkpoints.remove_checkpoint(checkpoints_folder / step_name(old))\n"
BATCH = "    batch = elastic_batch(job)\n"
WITHOUT_TIMEOUT = "    job = __import__('dataclasses').replace(job, timeout_s=9999)\n"
FILL = 'return broadcast_from_main(f"{parameter_name}/{state_name}", shape, dtype)'
MUTANTS = {
    "kill-rank": [
        ("onecurve/checkpoint/optimizer_state.py", FILL, FILL.replace("broadcast", "0 * broadcast"))
    ],
    "kill-agent": [("onecurve/system/processes.py", "SIG, signal.SIGTERM", "SIG, signal.SIGKILL")],
    "cut-cable": [
        (
            "tools/launch/elastic.py",
            "[host for host in responding_hosts if not self._is_excluded(host)]",
            "self.hosts",
        ),
        ("tools/launch/elastic.py", "MORE_HOSTS_WAIT_S if self.began_event else CONNECT_TIMEOUT_S", "9999"),
    ],
    "power-off": [
        ("onecurve/numerics/order.py", "samples.order(seed,", "samples.order(seed + batch.processes,")
    ],
    "stop-rank": [("onecurve/distributed/accelerator.py", BATCH, WITHOUT_TIMEOUT + BATCH)],
    "fill-disk": [
        ("onecurve/checkpoint/saver.py", NOT_WRITTEN, NOT_WRITTEN + REMOVE_ALL),
        # The log may be the first file that can't be written.
        ("onecurve/run/log.py", "self._record_write_error(file.name, error)", "pass"),
    ],
    "preempt": [("onecurve/run/ending.py", "        session.write_newest_snapshot()", "        pass")],
    "silence-s3": [
        ("onecurve/checkpoint/saver.py", "self.mirror.offer(step, best_step)\n", WAIT_FOR_UPLOAD),
        ("onecurve/system/s3.py", "READ_TIMEOUT_S = 15 ", "READ_TIMEOUT_S = 999 "),
    ],
}


def test_a_row_for_each_fault():
    survived = drill.Outcome("kill-rank", True, 1, 16, 8.4, 2e-7)
    lost = drill.Outcome("power-off", notes="the job ended before the fault")
    assert drill.table([survived, lost]).splitlines()[2:] == [
        "| kill-rank | yes | 1 | 16 | 8 | 2e-07 |",
        "| power-off | no (the job ended before the fault) | 1 | 0 | - | - |",
    ]
    assert math.isnan(lost.difference)


def test_repeated_steps_are_counted_from_the_log():
    before = "epoch 5/9  step 1,088/2,000  loss 0.1\nfailed after step 1,100: node2\n"
    log = f"{before}node1 | continuing at step 1,024 with /x\nepoch 5/9  step 1,104/2,000  loss 0.1\n"
    assert drill._repeated_steps(f"{log}continuing at step 1,024 and repeating 76 steps") == 76
    assert drill._repeated_steps(f"{log}node1 | continuing at step 1,088 with /x\n") == 76
    # A job without a checkpoint repeats all steps.
    assert drill._repeated_steps(f"{before}continuing at step 0 and repeating 1,100 steps") == 1100
    assert drill._repeated_steps(before) == 0


@pytest.mark.parametrize(("words", "message"), rows_of("wrong drills"))
def test_a_wrong_flag_is_reported(words, message, cluster_tools):
    status, output = Job([sys.executable, "cluster/virtual_cluster.py", "drill", *words.split()]).wait()
    assert status == 1
    assert message in output


def rows(project: Path, folder: Path, launcher: list[str], faults: str, train: list[str]) -> list[list[str]]:
    """Run a drill of the project's code, and return the rows of its table as lists of words."""
    command = ["launch.py", "--hostfile", "/etc/hostfile", "--log_dir", folder / "logs", *launcher, *train]
    flags = ["--hosts", "2", "--folder", folder / "runs", "--faults", faults]
    words = ["cluster/virtual_cluster.py", "drill", *flags, "--", sys.executable, *command]
    _, output = Job([sys.executable, *words], cwd=project).wait(1200)
    table_rows = [line.strip("| ").split(" | ") for line in output.splitlines() if line.startswith("| ")][1:]
    assert table_rows, output
    return table_rows


def is_expected(row: list[str], starts: int = 1) -> bool:
    """Return True if the row reports an unaided recovery and the same model as the uninterrupted job's.

    The job must resume from the last checkpoint or from the last step before the fault.
    """
    fault, survived, started, repeated, _, difference = row
    repeated_limit = 0 if fault in ("kill-agent", "preempt", "silence-s3") else 125 + 16
    is_same = difference != "-" and float(difference) < 1e-5
    return (survived, int(started)) == ("yes", starts) and int(repeated) <= repeated_limit and is_same


@pytest.mark.full
def test_an_elastic_job_survives_all_faults(cluster_tools, tmp_path):
    train = [*TRAIN, "--s3", "s3://drill/hello"]
    table_rows = rows(ROOT, tmp_path, ["--min_hosts", "1", *TO_S3], ",".join(drill.FAULTS), train)
    assert [row[0] for row in table_rows] == list(drill.FAULTS)
    for row in table_rows:
        assert is_expected(row, starts=2 if row[0] == "fill-disk" else 1), row
    assert (tmp_path / "runs" / "power-off" / "result.json").exists()
    assert not cluster_tools.STATE.exists()


@pytest.mark.full
def test_a_job_that_is_not_elastic_is_restarted(cluster_tools, tmp_path):
    for row in rows(ROOT, tmp_path, [], "kill-rank,power-off", TRAIN):
        assert is_expected(row, starts=2), row


def test_each_mutant_applies_to_the_code():
    for file, old, _ in (mutant for mutants in MUTANTS.values() for mutant in mutants):
        assert (ROOT / file).read_text().count(old) == 1, old


@pytest.mark.full
@pytest.mark.parametrize("fault", MUTANTS)
def test_a_mutant_fails_the_drill(fault, cluster_tools, project_copy, tmp_path):
    for file, old, new in MUTANTS[fault]:
        mutate(project_copy, file, old, new)
    launcher, train = ["--min_hosts", "1"], TRAIN
    if fault == "silence-s3":
        launcher, train = [*launcher, *TO_S3], [*TRAIN, "--s3", "s3://drill/hello"]
    [row] = rows(project_copy, tmp_path, launcher, fault, train)
    assert not is_expected(row, starts=2 if fault == "fill-disk" else 1), row
