"""Tests of when --checkpoint_s writes checkpoints if epochs are short, and of the work lost to a kill."""

import itertools
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from onecurve.checkpoint import saver as saver_module
from onecurve.checkpoint.saver import Saver
from onecurve.numerics.order import Steps
from onecurve.run import session as session_module
from onecurve.run.run import Run
from onecurve.run.session import RunSession
from onecurve.run.state import RunState


class Simulation:
    """Simulation of Run.checkpoint without tensors.

    The Saver is replaced by one that appends to a list immediately, and the clock is simulated.
    """

    def __init__(self, monkeypatch, per_epoch: int, epochs: int, **recipe):
        self.now_s, self.lost_s = 1000.0, 0.0
        for module in (session_module, saver_module):
            monkeypatch.setattr(module.time, "monotonic", lambda: self.now_s)
        self.written: list[tuple[int, float]] = []  # Step of each checkpoint and time at which it was written
        gatherer = SimpleNamespace(pauses_disabled=threading.Event())
        training = SimpleNamespace(take_snapshots=dict, allocate=list, expected_specs=list, gatherer=gatherer)
        training.scalars = dict
        saver = Saver(training, Path("nowhere"), {})

        def submit(work, step, *to_write) -> Future:
            if to_write:
                self.written.append((step, self.now_s))
            future = Future()
            future.set_result(None)
            return future

        saver.executor = SimpleNamespace(submit=submit)
        recipe = {
            "checkpoint_every": "epoch",
            "checkpoint_s": 60.0,
            "patience": None,
            "keep_every": None,
        } | recipe
        poll = SimpleNamespace(gather=lambda value: [value], wait_for_main=lambda *_: None)
        exchange = SimpleNamespace(poll=poll, gather=poll.gather, exchange_signals_if_due=int)
        self.run = run = Run.__new__(Run)
        steps = Steps(per_epoch, per_epoch * epochs, per_epoch * epochs)
        meter = SimpleNamespace(loss_sum=np.zeros(()), keeps_ids=False, elapsed_s=lambda: 0.0)
        meter.check_gradients = int
        meter.batch = SimpleNamespace(accumulations=1)
        parts = SimpleNamespace(**recipe), steps, RunState(), meter, None, saver, exchange
        run.batch_generator, run.has_training_ended = None, False
        run.opened_session = RunSession(*parts, main_record=None, newest_saved_step=0)

    def train(self, step_s: float, accuracy=lambda epoch: epoch) -> None:
        run, state, steps = self.run, self.run.session.state, self.run.session.steps
        for step in range(steps.last + 1):
            if run.should_evaluate(step):
                value = accuracy(step // steps.per_epoch)
                state.add_evaluation(step, {"loss": 0.0, "accuracy": value})
            run.checkpoint(step)
            # A kill at this moment would leave only this checkpoint.
            newest = max((s for s, _ in self.written), default=0)
            self.lost_s = max(self.lost_s, (step - newest) * step_s)
            if step < steps.last:
                self.now_s += step_s
                state.end_step(step + 1)


@pytest.mark.parametrize("improves", [True, False])
@pytest.mark.parametrize("epoch_s", [2.0, 7.0, 25.0, 45.0, 100.0])
def test_a_killed_run_loses_at_most_the_stated_time_or_an_epoch(epoch_s, improves, monkeypatch):
    simulation = Simulation(monkeypatch, per_epoch=10, epochs=60)
    simulation.train(epoch_s / 10, accuracy=lambda epoch: epoch if improves else -epoch)
    steps, times = zip(*simulation.written, strict=True)
    assert steps[0] == 10, "the first epoch shows early that the disk can be written to"
    assert steps[-1] == 600
    assert simulation.run.session.state.best_step in steps
    assert simulation.lost_s <= max(60.0, epoch_s) + 1e-6
    if epoch_s < 30:
        gaps = [b - a for a, b in itertools.pairwise(times)][:-1]
        assert min(gaps) > 60 - 2 * epoch_s
        assert len(times) <= 60 * epoch_s / (60 - epoch_s) + 3


@pytest.mark.parametrize(
    ("flags", "step_s", "written"),
    [
        ({"checkpoint_s": 0}, 1, [(10, 10), (20, 20), (30, 30), (40, 40)]),
        # The best checkpoint of step 10 is written immediately. The best checkpoint of step 20 is written
        # before the checkpoint of step 25. The best checkpoint of step 40, the last step, replaces the best
        # checkpoint of step 30.
        ({"checkpoint_every": "25"}, 1, [(10, 10), (20, 25), (25, 25), (40, 40)]),
        # The best checkpoint of step 20 is held until 60 s after the first checkpoint, in the middle of an
        # epoch.
        ({"checkpoint_every": "1000000"}, 4, [(10, 40), (20, 100), (40, 160)]),
        # Multiples of --keep_every are due inside and at the end of epochs, even if the epochs are short.
        ({"keep_every": 15}, 1, [(10, 10), (15, 15), (30, 30), (40, 40)]),
        # The best checkpoint of step 30 is held until the next checkpoint is due.
        (
            {"keep_every": 12, "checkpoint_every": "20"},
            1,
            [(10, 10), (12, 12), (20, 20), (24, 24), (30, 36), (36, 36), (40, 40)],
        ),
    ],
)
def test_when_checkpoints_are_written(flags, step_s, written, monkeypatch):
    simulation = Simulation(monkeypatch, per_epoch=10, epochs=4, **flags)
    simulation.train(step_s)
    assert [(step, at_s - 1000) for step, at_s in simulation.written] == written
