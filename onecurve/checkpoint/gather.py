"""Gathers snapshots on the main process, in background threads.

The main process receives each piece directly into the snapshot buffer, over a separate gloo group. It
receives one message at a time from each rank in turn, so no rank waits long.
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

# Size of one message. Sending it takes a few milliseconds on a 10 Gb/s network, the longest time that a
# training step's messages have to wait.
MESSAGE_BYTES = 4 * 2**20
# Fraction of the network (during a gather) and of one core (during a write) that a save may use. On two
# cores, the ten steps during a save took 1.12 times as long at 0.25 and 0.99 times as long at 0.1
# (benchmarks/checkpoint_saves.py, FSDP2).
SHARE = 0.1


class NotGathered(Exception):
    """Raised when a rank died during a gather or did not answer within --timeout_s."""


class Gather:
    """Assignment of tensor pieces to ranks, and the transfer to the main process. Collective.

    Create this object before the first forward pass. If several ranks store the same piece, as they do under
    DDP, the lowest rank sends it. The main process provides buffers, and also optimizer state whose shape
    differs from its parameter's shape.
    """

    def __init__(self, layout: Layout):
        self.shapes = layout.frozen_shapes() | layout.shapes()
        self.rank, pieces_by_rank = 0, [layout.pieces]
        if dist.is_initialized():
            self.rank, pieces_by_rank = dist.get_rank(), pieces_by_rank * dist.get_world_size()
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup)
            self.group = group
            dist.all_gather_object(pieces_by_rank, layout.pieces, group=self.group)
        assigned: set[tuple[str, int]] = set()
        self.shares: list[dict[str, Piece]] = []  # one item per rank
        for pieces in pieces_by_rank:
            share = {n: p for n, p in pieces.items() if p.length and (n, p.start) not in assigned}
            assigned |= {(name, piece.start) for name, piece in share.items()}
            self.shares.append(share)
        for name, shape in self.shapes.items():
            lengths = [share[name].length for share in self.shares if name in share]
            assert sum(lengths) == torch.Size(shape).numel(), name
        self.hurry = threading.Event()  # set while training waits for the checkpoint; disables pauses

    def local_specs(self, specs: Specs) -> Specs:
        """Return the dtype and shape of this rank's part of each tensor, or of the whole tensor on rank 0."""
        if self.rank == 0:
            return specs
        return {n: (specs[n][0], (piece.length,)) for n, piece in self._pieces(specs, self.rank)}

    def local_views(self, snapshot: Snapshot) -> dict[str, Tensor]:
        """Return flat views of the pieces that this rank copies into its snapshot."""
        return snapshot.views if self.rank else dict(self._views(snapshot, 0))

    def run(self, snapshots: dict[str, Snapshot]) -> None:
        """Complete the main process's snapshots. All ranks call this method, each in a thread.

        Raises:
            NotGathered: If a rank does not answer. The message names the rank.
        """
        if self.rank:
            if self.shares[self.rank]:
                self._transfer(dist.send, torch.zeros(1), 0)  # this rank's copy is complete
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
                began_s = time.perf_counter()
                self._transfer(dist.recv, message, rank)
                self.pause(time.perf_counter() - began_s)

    def pause(self, busy_s: float) -> None:
        """Sleep until busy_s is SHARE of the elapsed time. Return at once if training waits for the save."""
        self.hurry.wait(busy_s * (1 / SHARE - 1))

    def _incoming(self, snapshots: dict[str, Snapshot], rank: int) -> Iterator[Tensor]:
        for snapshot in snapshots.values():
            for _, piece in self._views(snapshot, rank):
                yield from _messages(piece)

    def _views(self, snapshot: Snapshot, rank: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and flat views of a rank's pieces in the main process's snapshot."""
        for name, piece in self._pieces(snapshot.specs, rank):
            yield name, snapshot.views[name].view(-1)[piece.start : piece.start + piece.length]

    def _pieces(self, specs: Specs, rank: int) -> Iterator[tuple[str, Piece]]:
        """Yield the pieces that a rank provides, with the tensor names used in the file."""
        for name, (_, shape) in specs.items():
            parameter = name if name in self.shapes else name.rpartition("/")[0]  # `<parameter>/<state>`
            if self.shapes.get(parameter) != shape:
                piece = None if rank else Piece(0, torch.Size(shape).numel())
            else:
                piece = self.shares[rank].get(parameter)
            if piece:
                yield name, piece

    def _transfer(self, transfer: Callable[..., Any], message: Tensor, rank: int) -> None:
        began_s = time.monotonic()
        try:
            transfer(message, rank, group=self.group)
        except RuntimeError as error:  # gloo's message contains only source lines and addresses
            silent_s = time.monotonic() - began_s
            has_timed_out = "imed out" in str(error)
            reason = f"did not answer for {silent_s:.0f} s" if has_timed_out else "closed its connection"
            raise NotGathered(f"rank {rank} {reason}") from error


def _messages(piece: Tensor) -> tuple[Tensor, ...]:
    return piece.view(torch.uint8).split(MESSAGE_BYTES)
