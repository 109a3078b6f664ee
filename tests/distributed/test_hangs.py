"""Tests that a hanging job reports the awaited rank and each rank's position.

If a rank fails, the other ranks must end even while they are waiting in a collective, as they do under NCCL.
"""

import json
import re
import time
from types import SimpleNamespace

import pytest

from onecurve.distributed.hang import hang_table, recorded_collectives
from onecurve.system.env import EVENTS_FILE_VARIABLE, EventReader
from onecurve.system.phase import Replay, now
from tests.conftest import CNN, Job, full, mutate, result, torchrun
from tools.launch.hosts import Host
from tools.launch.job import JobRunner, LaunchPlan

HELLO, RUN = "train_hello.py", "onecurve/run/run.py"
CALL, READ = "            run.checkpoint(step)\n", "            if isinstance(batches, Generator):\n"
ON_RANK_1 = "            if step == 5 and accelerator.process_index == 1:\n                "
# Code that stops rank 1 and kills it after 12 s, because torchrun would wait 30 s for the process to end
STOP_ON_RANK_1 = f"""{ON_RANK_1}import os, signal, subprocess
                subprocess.Popen(["sh", "-c", f"sleep 12; kill -9 {{os.getpid()}}"], start_new_session=True)
                os.kill(os.getpid(), signal.SIGSTOP)
{CALL}"""
STOP_ON_RANK_0 = STOP_ON_RANK_1.replace("process_index == 1", "process_index == 0")
WAIT = f"{ON_RANK_1}import time; time.sleep(60)\n            else:\n    {CALL}"
SKIP = f"{ON_RANK_1}accelerator.wait_for_everyone()\n{CALL}"
SLEEP = f"            if self.accelerator.process_index == 1: __import__('time').sleep(60)\n{READ}"
AWAITED = "rank 1 (node1) has not reached gloo:all_reduce, where other ranks wait"
RANK_1_AWAITED = r"rank 1 \(.*\) has not reached gloo:"
DIFFER = "the ranks are waiting in different collectives"
WAITS = ("training", "all_reduce", 7, False)


def evidence(rank, phase, op, number, is_done):
    latest = {"op": f"gloo:{op}", "group": "0", "number": number, "age_s": 4.0, "is_done": is_done}
    report = {"rank": rank, "host": "node1", "hosts": ["node1", "node1", "node2"], "where": "train.py:7 main"}
    collective = {"waits": [] if is_done else [latest], "last": latest, "sequence": {"0": number}}
    return report | collective | {"phase": phase, "step": 1200, "silent_s": {"2": 9.2}}


@pytest.mark.parametrize(
    ("second", "third", "message"),
    [
        (WAITS, None, "rank 2 (node2) is silent"),
        (("saving", "broadcast", 6, False), WAITS, f"{AWAITED}: saving at train.py:7"),
        (("reading data", "all_reduce", 7, True), WAITS, f"{AWAITED}: reading data"),
        (("saving", "barrier", 7, False), WAITS, f"{DIFFER}: rank 0 in gloo:all_reduce 7, rank 1 in"),
        (WAITS, WAITS, "all ranks are waiting in the same collective"),
    ],
)
def test_the_table_names_the_awaited_rank(second, third, message):
    ranks = [row for row in (WAITS, second, third) if row]
    first, *lines = hang_table([evidence(rank, *row) for rank, row in enumerate(ranks)])
    assert message in first
    assert len(lines) == 4  # The table contains a header and one row per rank
    assert "gloo:all_reduce 7 of group 0, waits for 4 s" in lines[1]
    if third is None:
        assert lines[3].startswith("2     node2  silent")
        assert lines[3].endswith("9 s ago")


@pytest.mark.parametrize(
    ("file", "code", "message"),
    [
        full(HELLO, STOP_ON_RANK_1, r"rank 1 \(.*\) is silent: a signal stopped"),
        full(HELLO, STOP_ON_RANK_0, r"rank 0 \(.*\) is silent: a signal stopped"),
        (HELLO, WAIT, rf"{RANK_1_AWAITED}.*: training at train_hello.py:"),
        full(HELLO, SKIP, rf"({RANK_1_AWAITED}|{DIFFER}.*rank 1 in gloo:barrier)"),
        full(RUN, SLEEP, rf"{RANK_1_AWAITED}.*: reading data at onecurve/run/"),
    ],
)
def test_a_job_that_hangs_names_the_rank(file, code, message, tmp_path, project_copy, cache):
    mutate(project_copy, file, CALL if file == HELLO else READ, code)
    script = HELLO if file == HELLO else CNN[0]
    flags = [*CNN[1:], "--data", "digits", *cache] if script == CNN[0] else []
    words = [*torchrun(2), script, *flags, "--trackers", "none", "--timeout_s", "10"]
    # Rank 0 hosts the store, as in a job on several hosts. A stopped rank 0 does not respond.
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    status, output = Job([*words, "--output_dir", tmp_path / "run"], cwd=project_copy, env=env).wait(90)
    assert status != 0
    assert re.search(rf"^the job hangs: {message}", output, re.MULTILINE), output
    waiting = 1 if "rank 0" in message else 0
    row = rf"^{waiting} +\S+ +\w[\w ]+ +\d+ .*gloo:\w+ \d+ of group \S+, waits for ([789]|10) s"
    assert re.search(row, output, re.MULTILINE), output


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((7, 7), "all ranks are waiting in the same collective"),
        (
            (9, 7),
            "all ranks are waiting in the same collective",
        ),  # Rank 0's CPU has launched more replays
        ((7, None), "rank 1 (node1) has not reached replay, where other ranks wait: training at train.py:7"),
    ],
)
def test_the_table_names_replays(numbers, message, monkeypatch):
    rows = []
    for rank, number in enumerate(numbers):
        monkeypatch.setattr(now, "replay", Replay(number or 6, launched=number or 6))
        if number is None:
            now.replay.ended = lambda: True
        waits = [call for call in recorded_collectives() if not call["is_done"]]
        replay = {"waits": waits, "last": recorded_collectives()[-1], "sequence": {"graph": number or 6}}
        rows.append(evidence(rank, *WAITS) | {"hosts": ["node1", "node1"]} | replay)
    first, _, *lines = hang_table(rows)
    assert message in first
    assert f"replay {numbers[0]} of group graph, waits for 0 s" in lines[0]


# In the third replay, rank 1 stops or dies, and rank 0 waits forever, as if it were waiting for a device.
REPLAYS = "        if not self.on_gpu:\n            return run_step\n"
HANGING = """        if not self.on_gpu:
            return lambda: hang() if self.replay_count == 3 else run_step()
"""
HANG = f"""def hang() -> None:
    import signal, subprocess, time
    if os.environ["RANK"] == "1":
        subprocess.Popen(["sh", "-c", f"sleep 25; kill -9 {{os.getpid()}}"], start_new_session=True)
        os.kill(os.getpid(), signal.SIGNUMBER)
    time.sleep(1000)


{(SHAPE := "@dataclass" + chr(10) + "class ShapeGraphs:")}"""


@pytest.mark.parametrize(
    ("signal_name", "message", "error"),
    [
        ("STOP", r"rank 1 \(.*\) is silent", "replay 3 of the step's CUDA graph, at step 13, has waited"),
        ("KILL", "", r"rank 1 \(host .*\) died without an error message"),
    ],
)
@pytest.mark.full
def test_a_replay_that_does_not_end(signal_name, message, error, tmp_path, project_copy, cache):
    mutate(project_copy, "onecurve/distributed/step_graph.py", REPLAYS, HANGING)
    mutate(project_copy, "onecurve/distributed/step_graph.py", SHAPE, HANG.replace("NUMBER", signal_name))
    words = [*torchrun(2), *CNN, "--data", "digits", *cache, "--trackers", "none", "--step_graph"]
    words += ["--timeout_s", "10", "--batch_size", "96", "--output_dir", tmp_path / "run"]
    started = time.monotonic()
    status, output = Job(words, cwd=project_copy).wait(90)
    assert status == 1
    assert re.search(f"^error: {error}", output, re.MULTILINE), output
    assert error in result(tmp_path / "run")["error"] or signal_name == "KILL"
    assert time.monotonic() - started < 70
    if message:
        assert re.search(rf"^the job hangs: {message}", output, re.MULTILINE), output
        row = r"^0 +\S+ +training +13 .*replay 3 of group graph, waits for ([789]|10) s"
        assert re.search(row, output, re.MULTILINE), output


@pytest.mark.full
def test_launch_py_shows_the_table(tmp_path, project_copy):
    mutate(project_copy, HELLO, CALL, WAIT)
    words = ["launch.py", "--mode", "single-node", "--gpus", "2", "--log_dir", tmp_path / "logs", HELLO]
    words += ["--trackers", "none", "--timeout_s", "3", "--output_dir", tmp_path / "run"]
    status, output = Job(words, cwd=project_copy).wait(60)
    assert status == 1
    assert len(re.findall(r"^the job hangs: rank 1 \(.*\) has not reached", output, re.MULTILINE)) == 1, (
        output
    )
    assert re.search(r"^1 +\S+ +training +5 +train_hello.py:", output, re.MULTILINE), output
    assert 'train_hello.py", line' in (tmp_path / "logs" / "hang_rank_1.txt").read_text()


def test_launch_py_waits_for_reports(tmp_path, capsys):
    launcher = JobRunner(LaunchPlan([], [], [], {}, None, 0, tmp_path))
    event = {"event": "hang", "stacks": "main"} | json.loads(json.dumps(evidence(0, *WAITS)))
    launcher.on_event(SimpleNamespace(host=Host("a", (0,))), event)
    launcher.handle_event()
    assert not capsys.readouterr().out  # Other ranks may still report their positions
    launcher.close()
    launcher.close()
    assert capsys.readouterr().out.count("rank 1 (node1), rank 2 (node2) are silent") == 1
    assert (tmp_path / "hang_rank_0.txt").read_text() == "main"


# --- Failure of one rank

# Code that simulates NCCL. A child process keeps rank 1's connections open, so that gloo's collectives wait
# forever.
HOLD_CONNECTIONS = f"""{ON_RANK_1}import os, signal, time
                launcher = os.getppid()
                if os.fork() == 0:
                    os.closerange(0, 3)  # or the reader of the job's output would wait for this process
                    while os.path.exists(f"/proc/{{launcher}}"):
                        time.sleep(0.1)
                    os._exit(0)
                """


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("raise ValueError('no more of this')", "no more of this"),
        full("raise RuntimeError('no kernel')", "failed: RuntimeError: no kernel"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "died without an error message"),
    ],
)
def test_ranks_that_hang_in_a_collective_end(failure, message, tmp_path, project_copy):
    mutate(project_copy, HELLO, CALL, f"{HOLD_CONNECTIONS}{failure}\n{CALL}")
    events = tmp_path / "events"
    words = [*torchrun(2), HELLO, "--trackers", "none", "--output_dir", tmp_path / "run"]
    status, output = Job(words, cwd=project_copy, env={EVENTS_FILE_VARIABLE: str(events)}).wait(60)
    assert status == 1
    assert "error: " in output
    assert message in output
    # Rank 0 must exit without being killed. A kill by the launcher would leave no exit event.
    statuses = [
        event["status"] for event in EventReader(events).read_new_events() if event["event"] == "exit"
    ]
    assert statuses == [1] * (1 if "SIGKILL" in failure else 2), output
    assert result(tmp_path / "run")["status"] == "failed"
    assert message in result(tmp_path / "run")["error"]
