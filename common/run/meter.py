"""Loss, samples and time of this process since the last line of the log."""

import time

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from common.recipe import Batch
from common.run.state import RunState


class Meter:
    """Sums losses on the device, without waiting for it before mean_loss()."""

    def __init__(self, device: torch.device, batch: Batch, keeps_ids: bool):
        self.batch, self.keeps_ids = batch, keeps_ids
        self.loss = torch.zeros((), device=device)  # over the micro-batches of all steps since the last line
        self.step_loss = torch.zeros_like(self.loss)  # over those of the current step
        self.ids: list[int] = []  # of the samples since the last line, for --log_samples
        self.micro_batches = 0  # since this process started
        self.started = time.perf_counter()

    def resume(self, state: RunState, rank: int) -> None:
        """Restores the sum of losses, scaled to the current number of micro-batches to keep the mean."""
        losses = state.losses
        if not losses:
            return
        own = losses[rank] if len(losses) == self.batch.processes else sum(losses) / len(losses)
        self.loss.fill_(own * self.batch.accumulations / state.accumulations)

    def add(self, loss: Tensor, ids: np.ndarray) -> None:
        self.step_loss += loss.detach()
        self.micro_batches += 1
        if self.keeps_ids:
            self.ids.extend(ids.tolist())

    def end_step(self) -> None:
        self.loss += self.step_loss
        self.step_loss.zero_()

    def mean_loss(self, accelerator: Accelerator, steps: int) -> float:
        """The mean loss of the last `steps` steps over all processes. Collective; waits for the device."""
        mean = (accelerator.reduce(self.loss, "mean") / (steps * self.batch.accumulations)).item()
        self.loss.zero_()
        return mean

    def start_clock(self) -> float:
        """Restarts the clock. Returns the seconds since its last start."""
        elapsed_s = self.elapsed_s()
        self.started += elapsed_s
        return elapsed_s

    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started

    def take_ids(self) -> list[int]:
        ids, self.ids = self.ids, []
        return ids
