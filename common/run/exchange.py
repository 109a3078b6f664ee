"""Messages between the processes of a run: signals, problems, telemetry, skipped images."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list

from common.distributed.preemption import Poll, Preempted, wanted

if TYPE_CHECKING:
    from common.run.run import Run
    from common.telemetry.sampling import Telemetry

STOP, PROBLEM = 1, 2  # messages of a process to the others
# A message costs the host some 0.1 ms, so several short steps share one. A signal then takes effect
# 2 * AGREEMENT_S later, or after 2 * MOST_STEPS steps if steps suddenly become slow.
SHORT_STEP_S = 0.005
AGREEMENT_S = 0.02
MOST_STEPS = 32
UNKNOWN_US = 2**31 - 1


class Exchange:
    """Messages over gloo, beside the training's collectives. All methods are collective, and so is the
    constructor.

    skipped: the ids of this process's skipped images.
    """

    def __init__(self, run: "Run", telemetry: "Telemetry", skipped: Callable[[], list[int]] = list):
        self.poll = Poll(run.recipe.timeout_s)
        self.run, self.telemetry, self.skipped = run, telemetry, skipped
        self.step_us = UNKNOWN_US  # of this process, between its last two messages after a step
        self.slowest_us = UNKNOWN_US  # of all processes, the same on each
        self.sent_at, self.sent_step, self.next_step = time.perf_counter(), -1, 0

    def listen_after(self, step: int) -> None:
        """Calls listen() after the step, or if steps are short, only after every few of them.

        All processes use the same number of steps, because each sends the others its time per step.
        """
        if step < self.next_step:
            wanted()  # resets the watchdog: a step has ended
            return
        now = time.perf_counter()
        if self.sent_step >= 0:
            mean_us = (now - self.sent_at) / max(1, step - self.sent_step) * 1e6
            self.step_us = min(int(mean_us), UNKNOWN_US)
        self.sent_at, self.sent_step = now, step
        self.listen()
        step_s = max(self.slowest_us / 1e6, 1e-6)
        is_alone = self.poll.group is None  # then it costs nothing
        few = min(MOST_STEPS, int(AGREEMENT_S / step_s))
        self.next_step = step + (1 if is_alone or step_s >= SHORT_STEP_S else few)

    def listen(self) -> None:
        """Sends this process's signal or problem to the others, and receives theirs from the last call.

        On all processes it raises Preempted after a signal, or ValueError with a problem's message.
        """
        problem = self.run.problem()
        answer = self.poll(PROBLEM if problem else STOP if wanted() else 0, self.step_us)
        received, self.slowest_us = answer or (0, UNKNOWN_US)
        if received == PROBLEM:
            raise ValueError(broadcast_object_list([problem])[0])
        if received == STOP:
            raise Preempted

    def of_main(self, own: Any) -> Any:
        return self.poll.gather(own)[0]

    def gather(self, own: Any) -> list[Any]:
        """The value of each process. Also gathers the other hosts' telemetry and the ids of skipped images
        on the main process."""
        everyones = self.poll.gather((own, self.telemetry.take(), self.skipped()))
        if self.run.log:
            self.telemetry.append([piece for _, pieces, _ in everyones for piece in pieces])
            ids = {i for *_, ids in everyones for i in ids}
            self.run.state.bad_images = sorted(ids | {*self.run.state.bad_images})
        return [own for own, *_ in everyones]

    def wait_for_main(self, done: Callable[[float], bool]) -> None:
        """Waits until done(1.0) is true on the main process. done(seconds) may wait that long."""
        self.poll.wait_for_main(self.run.log is not None, done)
