"""Tests that forked processes look like newly started processes, to themselves and to other processes."""

import signal
import sys

import psutil
import pytest

from tests.conftest import BIN, Job

SCRIPT = """
import atexit, os, signal, sys, threading, time

import psutil

me = psutil.Process()
print(__name__, __file__, sys.argv, os.path.samefile(sys.executable, me.exe()), sys.path[0], os.getcwd())
print(me.cmdline()[1:], me.ppid(), os.getsid(0) == os.getpid(), os.environ["MARK"], me.environ()["MARK"])
print(me.cpu_affinity(), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), oct(os.umask(0)))
files = [number for number in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{number}")]
print(sorted(files), "wandb" in sys.modules, file=sys.stderr)  # its import makes folders for one process
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.1), print("a thread has ended"))).start()
"""
ENDS = {
    "at the end": ("", 0),
    "status": ("sys.exit(75)", 75),
    "message": ("sys.exit('error: no such thing')", 1),
    "exception": ("raise ValueError('wrong')", 1),
    "Ctrl-C": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(9)", -signal.SIGINT),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)", -signal.SIGTERM),
    "at once": ("os._exit(3)", 3),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_fork_equals_a_started_process(end, tmp_path):
    last, status = ENDS[end]
    # This script starts no process by the name of Python and therefore needs no server
    script = tmp_path / "train_probe.py"
    script.write_text(f"{SCRIPT}\n{last}\n")
    outcomes = []
    for warm in (False, True):
        job = Job([sys.executable, script, "--flag"], cwd=tmp_path, env={"MARK": "7"}, warm=warm)
        outcomes.append(job.wait(60))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] == status


def test_forked_ranks_have_torch_and_belong_to_their_launcher(tmp_path):
    """Check that torchrun's processes are its children and end when torchrun is killed."""
    script = tmp_path / "script.py"
    script.write_text("import sys, time\nprint('torch' in sys.modules, flush=True)\ntime.sleep(100)\n")
    job = Job([BIN / "torchrun", "--standalone", "--nproc_per_node=2", script])
    try:
        seen = [job.process.stdout.readline() for _ in range(2)]
        while not all("True" in line for line in seen[-2:]):
            seen.append(job.process.stdout.readline())
            assert seen[-1], seen
        launcher = psutil.Process(job.process.pid)
        ranks = [child for child in launcher.children() if str(script) in child.cmdline()]
        assert sorted(rank.environ()["RANK"] for rank in ranks) == ["0", "1"]
        ranks[0].kill()
        assert job.process.wait(60) == 1
        assert not psutil.wait_procs(ranks, timeout=20)[1]
    finally:
        job.kill()


@pytest.mark.parametrize("words", [["-c", "import sys; print('torch' in sys.modules)"], ["SCRIPT"]])
def test_commands_that_can_not_be_forked_are_started(words, tmp_path):
    """Check that `python -c`, and a process whose environment affects an import, are started normally."""
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('torch' in sys.modules)")
    words = [script if word == "SCRIPT" else word for word in words]
    assert Job([sys.executable, *words], env={"HF_HOME": str(tmp_path)}).wait(60) == (0, "False\n")


def test_a_closed_output_stops_nothing(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('x' * 100_000)")
    statuses = []
    for warm in (False, True):
        job = Job([sys.executable, script], warm=warm)
        job.process.stdout.close()
        statuses.append(job.process.wait(60))
    assert statuses[0] == statuses[1] != 0
