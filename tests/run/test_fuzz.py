"""Test that a run's results stay bitwise identical despite SIGKILL, SIGTERM and SIGHUP at random moments.

Each start trains one more epoch (--max_steps), so that signals also interrupt the end of a run. FUZZ_SEED
(default 0) determines the signal, the phase and the delay, but the exact moment depends on the machine.
FUZZ_HITS (default 100) limits the number of signals, and FUZZ_S (default 90) limits the time in seconds.
`pytest -s` shows the interrupted phases.
"""

import json
import os
import random
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import Job, latest, result, run
from tests.support.compare import assert_same_end
from tests.support.faults import called_first

DEFAULTS = {"FUZZ_SEED": 0, "FUZZ_HITS": 100, "FUZZ_S": 90}
SEED, HITS, BOUND_S = (int(os.environ.get(name, number)) for name, number in DEFAULTS.items())
LEG = 14  # Number of steps per epoch
# Maximum delay of the signal after the start of each phase, in seconds
PHASES = {"start-up": 0.8, "training": 0.1, "saving": 0.05, "evaluating": 0.05, "end": 0.5}
CNN = ["train_cnn_a.py", "--widths", "4,8,32", "--data", "digits", "--batch_size", "96", "--epochs", "400"]
CNN += ["--mixed_precision", "no", "--log_every", "3", "--checkpoint_every", "5", "--trackers", "none"]
# Allowed exit statuses after each signal. SIGTERM and SIGHUP kill a process that has no handler yet. A
# finished process exits normally.
ALLOWED = {signal.SIGKILL: {-9, 0}, signal.SIGTERM: {75, -15, 0}, signal.SIGHUP: {75, -1, 0}}


def mark_phases(file: str) -> None:
    """Make the run write its current phase to a file.

    The run's process calls this function before its script.
    """
    from onecurve.checkpoint import saver
    from onecurve.run import evaluation
    from onecurve.run import run as tracking

    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    phase_of = {"main": "start-up", "thread": ""}

    def track(owner, name: str, thread_name: str, phase: str, after: str | None = None) -> None:
        function = getattr(owner, name)

        def wrapped(*args, **options):
            before, phase_of[thread_name] = phase_of[thread_name], phase
            os.pwrite(descriptor, f"{phase_of['thread'] or phase_of['main']:20}".encode(), 0)
            try:
                return function(*args, **options)
            finally:
                phase_of[thread_name] = before if after is None else after
                os.pwrite(descriptor, f"{phase_of['thread'] or phase_of['main']:20}".encode(), 0)

        setattr(owner, name, wrapped)

    track(tracking.Run, "begin", "main", "opening", after="training")
    track(evaluation, "evaluate", "main", "evaluating")
    track(tracking.Run, "finish", "main", "end", after="end")
    track(saver.Saver, "_write_checkpoint", "thread", "saving")


def phase_in(file: Path) -> str:
    return (file.read_text().strip() if file.exists() else "") or "start-up"


@pytest.mark.full
def test_a_run_that_is_interrupted_again_and_again_is_bit_equal(tmp_path, cache):
    draw, hits, steps, folder = random.Random(SEED), Counter(), LEG, tmp_path / "run"
    words, phase = [*CNN, *cache, "--output_dir", folder, "--max_steps"], tmp_path / "phase"
    run([*CNN, *cache, "--output_dir", tmp_path / "first", "--max_steps", "1"])
    end = time.monotonic() + BOUND_S
    while hits.total() < HITS and time.monotonic() < end:
        number, target, delay = draw.choice(list(ALLOWED)), draw.choice(list(PHASES)), draw.random()
        env = called_first(tmp_path, partial(mark_phases, str(phase)))
        job = Job([*words, steps], env=env)
        while job.process.poll() is None and phase_in(phase) != target:
            time.sleep(0.002)
        time.sleep(delay * PHASES[target])
        if job.process.poll() is None:
            hits[number.name, phase_in(phase)] += 1
            job.process.send_signal(number)
            status, output = job.wait()
            assert status in ALLOWED[number], output
        else:
            status, output = job.wait()
            assert status == 0, output
        phase.unlink(missing_ok=True)
        facts = result(folder) if (folder / "result.json").exists() else {}
        is_finished = (facts.get("status"), facts.get("steps")) == ("finished", steps)
        assert is_finished or status != 0
        steps += LEG * is_finished  # A run that SIGKILL hits after its end also counts as finished
    for (signal_name, phase_name), count in sorted(hits.items()):
        print(f"{signal_name:8} {phase_name:12} {count}")
    print(f"{hits.total()} hits, {steps} steps")
    assert {signal_name for signal_name, _ in hits} == {number.name for number in ALLOWED}
    run([*words, steps])
    run([*CNN, *cache, "--output_dir", tmp_path / "straight", "--max_steps", steps])
    assert_same_end(folder, tmp_path / "straight")
    states = [json.loads((latest(f) / "state.json").read_text()) for f in (folder, tmp_path / "straight")]
    for name in ("losses", "logged_step", "optimizer", "loss_scale"):
        assert states[0][name] == states[1][name], name
