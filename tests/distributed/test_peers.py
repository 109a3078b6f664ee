"""A rank that fails ends the others, also those that hang in a collective, as all do under NCCL.

NCCL is simulated on CPUs: a child process of the rank that fails keeps its connections open, so that gloo's
collectives never learn that it has ended.
"""

import pytest

from common.system.env import EVENTS_FILE, EventReader
from tests.conftest import Job, full, mutate, result, torchrun

HOLD_CONNECTIONS = """
            import os, signal, time
            launcher = os.getppid()
            if os.fork() == 0:
                os.closerange(0, 3)  # or who reads the job's output would wait for this process
                while os.path.exists(f"/proc/{launcher}"):
                    time.sleep(0.1)
                os._exit(0)
"""
CALL = "            run.checkpoint(step)\n"


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("raise ValueError('no more of this')", "no more of this"),
        full("raise RuntimeError('no kernel')", "failed: RuntimeError: no kernel"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "died without a message: it was killed"),
    ],
)
def test_others_end_that_hang_in_a_collective(failure, message, tmp_path, project_copy):
    block = "            if step == 5 and accelerator.process_index == 1:"
    block += HOLD_CONNECTIONS.replace("\n", "\n    ").rstrip(" ") + f"                {failure}\n"
    mutate(project_copy, "train_hello.py", CALL, block + CALL)
    events = tmp_path / "events"
    words = [*torchrun(2), "train_hello.py", "--trackers", "none", "--output_dir", tmp_path / "run"]
    status, output = Job(words, cwd=project_copy, env={EVENTS_FILE: str(events)}).wait(60)
    assert status == 1
    assert "error: " in output
    assert message in output
    # Rank 0 ended by itself: a launcher would have killed it, and it would have reported nothing.
    statuses = [event["status"] for event in EventReader(events).new() if event["event"] == "exit"]
    assert statuses == [1] * (1 if "SIGKILL" in failure else 2), output
    assert result(tmp_path / "run")["status"] == "failed"
    assert message in result(tmp_path / "run")["error"]
