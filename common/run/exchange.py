"""Messages between the processes of a run: signals, problems, telemetry, skipped images."""

from collections.abc import Callable
from typing import Any

from accelerate.utils import broadcast_object_list

from common.data import bad_images
from common.distributed.preemption import Poll, Preempted, wanted
from common.run.output import RunOutput
from common.run.state import RunState
from common.telemetry.collect import Telemetry

STOP, PROBLEM = 1, 2  # what a process tells the others at each step


class Exchange:
    """Messages over gloo, beside the training's collectives. All methods and the constructor are collective.

    output: of the main process, None elsewhere; it gets what the other processes have for it.
    """

    def __init__(self, timeout_s: float, state: RunState, telemetry: Telemetry, output: RunOutput | None):
        self.poll = Poll(timeout_s)
        self.state, self.telemetry, self.output = state, telemetry, output

    def listen(self) -> None:
        """Sends this process's signal or problem to the others, and receives theirs of the last call.

        Raises Preempted after a signal, ValueError with a problem's message, on all processes.
        """
        problem = self.problem()
        heard = self.poll(PROBLEM if problem else STOP if wanted() else 0)
        if heard == PROBLEM:
            raise ValueError(broadcast_object_list([problem])[0])
        if heard == STOP:
            raise Preempted

    def problem(self) -> str | None:
        """The main process's problem, if any; not collective."""
        return self.output.problem() if self.output else None

    def gather(self, own: Any) -> list[Any]:
        """The value of each process. The main process also gets the other hosts' telemetry and the ids of the
        images that any process skipped."""
        everyones = self.poll.gather((own, self.telemetry.take(), bad_images.seen()))
        if self.output:
            self.telemetry.append([piece for _, pieces, _ in everyones for piece in pieces])
            self.state.bad_images = sorted(
                {i for *_, ids in everyones for i in ids} | {*self.state.bad_images}
            )
        return [own for own, *_ in everyones]

    def wait_for_main(self, done: Callable[[float], bool]) -> None:
        """Waits until done(1.0) is true on the main process; done(seconds) itself waits so long."""
        self.poll.wait_for_main(self.output is not None, done)
