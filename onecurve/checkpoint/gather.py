"""Gathers snapshots on the main process in background threads.

The main process receives each tensor piece directly into the snapshot buffer, over a separate gloo group.
Ranks take turns, each sending one message, so no rank waits long.
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

# Message size in bytes. On a 10 Gb/s network, one message delays a training step's messages by at most a few
# milliseconds.
MESSAGE_BYTES = 4 * 2**20
# Maximum fraction of the network (during a gather) and of one core (during a write) that a save uses. On two
# cores, the ten steps during a save took 1.12 times as long as usual with 0.25, and 0.99 times as long with
# 0.1 (benchmarks/checkpoint_saves.py, FSDP2).
BUSY_SHARE = 0.1


class NotGathered(Exception):
    """Error raised when a rank dies during a gather or does not answer within --timeout_s."""


class Gather:
    """Collector that assigns tensor pieces to ranks and gathers them on the main process.

    The constructor is collective and must be called before the model's first forward pass. If several ranks
    store the same piece, as they do under DDP, the lowest of these ranks sends it. The main process provides
    the model's buffers and any optimizer state whose shape differs from its parameter's shape.
    """

    def __init__(self, layout: Layout):
        self.shapes = layout.frozen_shapes() | layout.shapes()
        self.rank, pieces_by_rank = 0, [layout.piece_of]
        if dist.is_initialized():
            self.rank, pieces_by_rank = dist.get_rank(), pieces_by_rank * dist.get_world_size()
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup)
            self.group = group
            dist.all_gather_object(pieces_by_rank, layout.piece_of, group=self.group)
        assigned_pieces: set[tuple[str, int]] = set()
        self.outgoing: list[dict[str, Piece]] = []  # pieces sent by each rank, by tensor name
        for pieces in pieces_by_rank:
            rank_pieces = {
                name: piece
                for name, piece in pieces.items()
                if piece.length and (name, piece.start) not in assigned_pieces
            }
            assigned_pieces |= {(name, piece.start) for name, piece in rank_pieces.items()}
            self.outgoing.append(rank_pieces)
        for name, shape in self.shapes.items():
            lengths = [rank_pieces[name].length for rank_pieces in self.outgoing if name in rank_pieces]
            assert sum(lengths) == torch.Size(shape).numel(), name
        self.hurry = threading.Event()  # set while training waits for the checkpoint, to disable pauses

    def local_specs(self, specs: Specs) -> Specs:
        """Return the dtype and shape of this rank's piece of each tensor.

        For rank 0, the result always describes the whole tensors.
        """
        if self.rank == 0:
            return specs
        return {
            name: (specs[name][0], (piece.length,)) for name, piece in self._pieces_of_rank(specs, self.rank)
        }

    def local_views(self, snapshot: Snapshot) -> dict[str, Tensor]:
        """Return a flat view of each piece that this rank copies into its snapshot, by tensor name."""
        return snapshot.views if self.rank else dict(self._piece_views(snapshot, 0))

    def run(self, snapshots: dict[str, Snapshot]) -> None:
        """Complete the main process's snapshots with the other ranks' pieces.

        All ranks call this method, each in a background thread.

        Raises:
            NotGathered: If a rank does not answer. The error message names the rank.
        """
        if self.rank:
            if self.outgoing[self.rank]:
                # Tell the main process that this rank has copied its pieces into its snapshots
                self._transfer(dist.send, torch.zeros(1), 0)
            for snapshot in snapshots.values():
                for name in snapshot.specs:
                    for sent_message in _split_into_messages(snapshot.views[name]):
                        self._transfer(dist.send, sent_message, 0)
            return
        senders = [rank for rank, rank_pieces in enumerate(self.outgoing) if rank_pieces and rank]
        for rank in senders:
            self._transfer(dist.recv, torch.zeros(1), rank)
        message_iterators = {rank: self._incoming_messages(snapshots, rank) for rank in senders}
        while message_iterators:
            for rank in [*message_iterators]:
                message = next(message_iterators[rank], None)
                if message is None:
                    del message_iterators[rank]
                    continue
                began_s = time.perf_counter()
                self._transfer(dist.recv, message, rank)
                self.pause(time.perf_counter() - began_s)

    def pause(self, busy_s: float) -> None:
        """Sleep until busy_s is only the fraction BUSY_SHARE of the elapsed time.

        While training waits for the save, return immediately.
        """
        self.hurry.wait(busy_s * (1 / BUSY_SHARE - 1))

    def _incoming_messages(self, snapshots: dict[str, Snapshot], rank: int) -> Iterator[Tensor]:
        for snapshot in snapshots.values():
            for _, piece in self._piece_views(snapshot, rank):
                yield from _split_into_messages(piece)

    def _piece_views(self, snapshot: Snapshot, rank: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and flat views of a rank's pieces in the main process's snapshot."""
        for name, piece in self._pieces_of_rank(snapshot.specs, rank):
            yield name, snapshot.views[name].view(-1)[piece.start : piece.start + piece.length]

    def _pieces_of_rank(self, specs: Specs, rank: int) -> Iterator[tuple[str, Piece]]:
        """Yield the name of each tensor in the file and the piece that the rank provides."""
        for name, (_, shape) in specs.items():
            # Split `<parameter>/<state>`
            parameter = name if name in self.shapes else name.rpartition("/")[0]
            if self.shapes.get(parameter) == shape:
                piece = self.outgoing[rank].get(parameter)
            elif rank == 0:
                piece = Piece(0, torch.Size(shape).numel())
            else:
                piece = None
            if piece:
                yield name, piece

    def _transfer(self, send_or_receive: Callable[..., Any], message: Tensor, rank: int) -> None:
        began_s = time.monotonic()
        try:
            send_or_receive(message, rank, group=self.group)
        except RuntimeError as error:  # gloo's message contains only source locations and addresses
            silent_s = time.monotonic() - began_s
            has_timed_out = "imed out" in str(error)
            if has_timed_out:
                raise NotGathered(f"rank {rank} did not answer for {silent_s:.0f} s") from error
            raise NotGathered(f"rank {rank} closed its connection") from error


def _split_into_messages(piece: Tensor) -> tuple[Tensor, ...]:
    return piece.view(torch.uint8).split(MESSAGE_BYTES)
