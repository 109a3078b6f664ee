"""SIGKILL, SIGTERM and SIGHUP at random moments of one run: it ends bit-equal to the uninterrupted run.

Each start trains one epoch more (--max_steps), so that ends of runs are interrupted too. The signal, its
phase and its delay are drawn from FUZZ_SEED (0); the moment itself depends on the machine. FUZZ_HITS (100)
and FUZZ_S (90) bound the number of signals and the seconds. `pytest -s` shows what was hit.
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
LEG = 14  # steps, an epoch
# The longest delay of the signal after the beginning of a phase, in seconds.
PHASES = {"start-up": 0.8, "training": 0.1, "saving": 0.05, "evaluating": 0.05, "end": 0.5}
CNN = ["train_cnn_a.py", "--widths", "4,8,32", "--data", "digits", "--batch_size", "96", "--epochs", "400"]
CNN += ["--mixed_precision", "no", "--log_every", "3", "--checkpoint_every", "5", "--trackers", "none"]
# SIGTERM and SIGHUP kill a process that has no handler yet; one that is done exits as usual.
ALLOWED = {signal.SIGKILL: {-9, 0}, signal.SIGTERM: {75, -15, 0}, signal.SIGHUP: {75, -1, 0}}


def mark_phases(file: str) -> None:
    """Makes the run write its current phase into the file. Called in its process, before its script."""
    from onecurve.checkpoint import saver
    from onecurve.run import evaluation
    from onecurve.run import run as tracking

    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    doing = {"main": "start-up", "thread": ""}

    def within(place, name: str, who: str, phase: str, after: str | None = None) -> None:
        function = getattr(place, name)

        def wrapped(*args, **options):
            before, doing[who] = doing[who], phase
            os.pwrite(descriptor, f"{doing['thread'] or doing['main']:20}".encode(), 0)
            try:
                return function(*args, **options)
            finally:
                doing[who] = before if after is None else after
                os.pwrite(descriptor, f"{doing['thread'] or doing['main']:20}".encode(), 0)

        setattr(place, name, wrapped)

    within(tracking.Run, "begin", "main", "opening", after="training")
    within(evaluation, "evaluate", "main", "evaluating")
    within(tracking.Run, "finish", "main", "end", after="end")
    within(saver.Saver, "_write", "thread", "saving")


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
        found = result(folder) if (folder / "result.json").exists() else {}
        is_finished = (found.get("status"), found.get("steps")) == ("finished", steps)
        assert is_finished or status != 0
        steps += LEG * is_finished  # also where SIGKILL came after the end
    for (kind, doing), count in sorted(hits.items()):
        print(f"{kind:8} {doing:12} {count}")
    print(f"{hits.total()} hits, {steps} steps")
    assert {kind for kind, _ in hits} == {number.name for number in ALLOWED}
    run([*words, steps])
    run([*CNN, *cache, "--output_dir", tmp_path / "straight", "--max_steps", steps])
    assert_same_end(folder, tmp_path / "straight")
    states = [json.loads((latest(f) / "state.json").read_text()) for f in (folder, tmp_path / "straight")]
    for name in ("losses", "logged_step", "optimizer", "loss_scale"):
        assert states[0][name] == states[1][name], name
