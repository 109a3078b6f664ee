"""Brings what each process has of a snapshot to the main process, in threads, beside the training.

The pieces go straight to their places in the main process's snapshot, over a gloo group of their own.
The main process asks the others in turn for a message each, so that none of them waits long.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onecurve.checkpoint.snapshot import Snapshot, Specs
from onecurve.distributed.layout import Layout, Piece

MESSAGE_BYTES = 4 * 2**20  # some milliseconds on a network of 10 Gb/s: a step's own messages wait no longer
# Of the time, of the link in the gather and of a core in the write: at a quarter of the link the ten steps
# beside it took 1.12 times as long on two cores, at a tenth 0.99 (benchmarks/checkpoint_saves.py, FSDP2).
SHARE = 0.1


class NotGathered(Exception):
    """Raised when a process that takes part has died, or stays silent for --timeout_s."""


class Gather:
    """What each process holds and sends. Create it before the first forward. Collective.

    Of a piece that several processes have, as under DDP, the first one's counts. Buffers, and state of
    another shape than its parameter's, are the main process's.
    """

    def __init__(self, layout: Layout):
        self.shapes = layout.frozen_shapes() | layout.shapes()
        self.rank, everyones = 0, [layout.pieces]
        if dist.is_initialized():
            self.rank, everyones = dist.get_rank(), everyones * dist.get_world_size()
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup)
            self.group = group
            dist.all_gather_object(everyones, layout.pieces, group=self.group)
        found: set[tuple[str, int]] = set()
        self.shares: list[dict[str, Piece]] = []
        for pieces in everyones:
            first = {n: p for n, p in pieces.items() if p.length and (n, p.start) not in found}
            found |= {(name, piece.start) for name, piece in first.items()}
            self.shares.append(first)
        for name, shape in self.shapes.items():
            lengths = [share[name].length for share in self.shares if name in share]
            assert sum(lengths) == torch.Size(shape).numel(), name
        self.hurry = threading.Event()  # set while the training waits for the checkpoint: no pauses

    def held(self, specs: Specs) -> Specs:
        """Type and shape of what this process holds of a file: all of it on the main process."""
        if self.rank == 0:
            return specs
        return {n: (specs[n][0], (piece.length,)) for n, piece in self._pieces(specs, self.rank)}

    def own(self, snapshot: Snapshot) -> dict[str, Tensor]:
        """Flat views of what this process itself copies into its snapshot."""
        return snapshot.views if self.rank else dict(self._views(snapshot, 0))

    def run(self, snapshots: dict[str, Snapshot]) -> None:
        """Completes the main process's snapshots. All processes call it, in a thread.

        NotGathered names a process that does not answer.
        """
        if self.rank:
            if self.shares[self.rank]:
                self._transfer(dist.send, torch.zeros(1), 0)  # its copy is complete
            for snapshot in snapshots.values():
                for name in snapshot.specs:
                    for part in _messages(snapshot.views[name]):
                        self._transfer(dist.send, part, 0)
            return
        senders = [rank for rank, share in enumerate(self.shares) if share and rank]
        for rank in senders:
            self._transfer(dist.recv, torch.zeros(1), rank)
        messages = {rank: self._incoming(snapshots, rank) for rank in senders}
        while messages:
            for rank in [*messages]:
                message = next(messages[rank], None)
                if message is None:
                    del messages[rank]
                    continue
                began = time.perf_counter()
                self._transfer(dist.recv, message, rank)
                self.pause(time.perf_counter() - began)

    def pause(self, busy_s: float) -> None:
        """Waits so long that busy_s is the SHARE of the time. Not while the training waits."""
        self.hurry.wait(busy_s * (1 / SHARE - 1))

    def _incoming(self, snapshots: dict[str, Snapshot], rank: int) -> Iterator[Tensor]:
        for snapshot in snapshots.values():
            for _, piece in self._views(snapshot, rank):
                yield from _messages(piece)

    def _views(self, snapshot: Snapshot, rank: int) -> Iterator[tuple[str, Tensor]]:
        """Flat views of a process's pieces in the main process's snapshot."""
        for name, piece in self._pieces(snapshot.specs, rank):
            yield name, snapshot.views[name].view(-1)[piece.start : piece.start + piece.length]

    def _pieces(self, specs: Specs, rank: int) -> Iterator[tuple[str, Piece]]:
        """The pieces that come from a process, by their names in the file."""
        for name, (_, shape) in specs.items():
            parameter = name if name in self.shapes else name.rpartition("/")[0]  # `<parameter>/<state>`
            if self.shapes.get(parameter) != shape:
                piece = None if rank else Piece(0, torch.Size(shape).numel())
            else:
                piece = self.shares[rank].get(parameter)
            if piece:
                yield name, piece

    def _transfer(self, transfer: Callable[..., Any], message: Tensor, rank: int) -> None:
        began = time.monotonic()
        try:
            transfer(message, rank, group=self.group)
        except RuntimeError as error:  # its text names lines of gloo's sources, and addresses
            silent_s = time.monotonic() - began
            is_silent = "imed out" in str(error)
            reason = f"did not answer for {silent_s:.0f} s" if is_silent else "closed its connection"
            raise NotGathered(f"rank {rank} {reason}") from error


def _messages(piece: Tensor) -> tuple[Tensor, ...]:
    return piece.view(torch.uint8).split(MESSAGE_BYTES)
