"""Processes below this one: found, adopted when their parent has ended, and ended with their parent."""

import os
import signal
import subprocess
import sys

import psutil

from common.distributed.preemption import is_alive
from common.system.processes import adopt_orphans, kill, running_descendants
from tests.conftest import ROOT, wait_until

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_an_orphan_is_adopted_and_its_zombie_reaped():
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    starter = f"import subprocess; print(subprocess.Popen({SLEEP!r}, stdout=subprocess.DEVNULL).pid)"
    adopt_orphans()
    try:
        orphan = int(subprocess.run([sys.executable, "-c", starter], stdout=subprocess.PIPE).stdout)
        assert [process.pid for process in running_descendants(before)] == [orphan]
        assert running_descendants({*before, orphan}) == []
        kill(running_descendants(before))
        wait_until(lambda: not running_descendants(before) and not psutil.pid_exists(orphan))
    finally:
        adopt_orphans(False)


def test_a_process_ends_with_its_parent():
    code = "from common.system.processes import end_with_parent; end_with_parent(); print(1, flush=True)"
    code += "; import time; time.sleep(60)"
    parent = f"import subprocess, time; c = subprocess.Popen([{sys.executable!r}, '-c', {code!r}]);"
    parent += " print(c.pid, flush=True); time.sleep(60)"
    words = [sys.executable, "-c", parent]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        lines = {process.stdout.readline().strip(), process.stdout.readline().strip()}
        (pid,) = (int(line) for line in lines - {"1"})
        child = psutil.Process(pid)
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(child), timeout_s=10)
