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

from onecurve.checkpoint.format import parameter_of
from onecurve.checkpoint.snapshot import Snapshot, Specs
from onecurve.distributed.layout import ParameterLayout, Piece

# Message size in bytes. On a 10 Gb/s network, one message delays a training step's messages by at most a few
# milliseconds.
MESSAGE_BYTES = 4 * 2**20
# Maximum fraction of the network (during a gather) and of one core (during a write) that a save uses. On two
# cores, the ten steps during a save took 1.12 times as long as usual with 0.25, and 0.99 times as long with
# 0.1 (benchmarks/checkpoint_saves.py, FSDP2).
MAX_BUSY_FRACTION = 0.1
MAIN_RANK = 0  # rank of the main process, which gathers the pieces


class GatherError(Exception):
    """Error raised when a rank dies during a gather or does not answer within --timeout_s."""


class PieceGatherer:
    """Collector that assigns tensor pieces to ranks and gathers them on the main process.

    The constructor is collective and must be called before the model's first forward pass. If several ranks
    store the same piece, as they do under DDP, the lowest of these ranks sends it. The main process provides
    the model's buffers and any optimizer state whose shape differs from its parameter's shape.
    """

    def __init__(self, layout: ParameterLayout):
        self.shapes = layout.frozen_shapes() | layout.shapes()  # all parameters' shapes, by name
        self.rank = MAIN_RANK
        stored_pieces_by_rank = [layout.piece_of]
        if dist.is_initialized():
            self.rank = dist.get_rank()
            stored_pieces_by_rank *= dist.get_world_size()  # placeholders for all_gather_object()
            gloo_group = dist.new_group(backend="gloo")
            assert isinstance(gloo_group, dist.ProcessGroup)
            self.gloo_group = gloo_group
            dist.all_gather_object(stored_pieces_by_rank, layout.piece_of, group=self.gloo_group)
        assigned_starts: set[tuple[str, int]] = set()  # tensor name and first element of each assigned piece
        self.outgoing_pieces: list[dict[str, Piece]] = []  # pieces sent by each rank, by tensor name
        for stored_pieces in stored_pieces_by_rank:
            sent_pieces = {
                parameter_name: piece
                for parameter_name, piece in stored_pieces.items()
                if piece.length and (parameter_name, piece.start) not in assigned_starts
            }
            assigned_starts |= {(name, piece.start) for name, piece in sent_pieces.items()}
            self.outgoing_pieces.append(sent_pieces)
        # The pieces sent by all ranks must contain each parameter's elements exactly once
        for parameter_name, parameter_shape in self.shapes.items():
            sent_lengths = [
                pieces[parameter_name].length for pieces in self.outgoing_pieces if parameter_name in pieces
            ]
            assert sum(sent_lengths) == torch.Size(parameter_shape).numel(), parameter_name
        self.pauses_disabled = threading.Event()  # set while training waits for the checkpoint

    def local_specs(self, specs: Specs) -> Specs:
        """Return the dtype and shape of this rank's piece of each tensor.

        For rank 0, the result always describes the whole tensors.
        """
        if self.rank == MAIN_RANK:
            return specs
        piece_specs: Specs = {}
        for tensor_name, piece in self._pieces_of_rank(specs, self.rank):
            dtype, _ = specs[tensor_name]
            piece_specs[tensor_name] = dtype, (piece.length,)
        return piece_specs

    def local_views(self, snapshot: Snapshot) -> dict[str, Tensor]:
        """Return a flat view of each piece that this rank copies into its snapshot, by tensor name."""
        is_main = self.rank == MAIN_RANK
        return dict(self._piece_views(snapshot, MAIN_RANK)) if is_main else snapshot.views

    def complete_snapshots(self, snapshots: dict[str, Snapshot]) -> None:
        """Complete the main process's snapshots with the other ranks' pieces.

        All ranks call this method, each in a background thread.

        Raises:
            GatherError: If a rank does not answer. The error message names the rank.
        """
        if self.rank == MAIN_RANK:
            self._receive_pieces(snapshots)
        else:
            self._send_pieces(snapshots)

    def _send_pieces(self, snapshots: dict[str, Snapshot]) -> None:
        """Send this rank's snapshots, which contain only the pieces assigned to it, to the main process."""
        if self.outgoing_pieces[self.rank]:
            # Tell the main process that this rank has copied its pieces into its snapshots
            self._transfer(dist.send, torch.zeros(1), MAIN_RANK)
        for snapshot in snapshots.values():
            for tensor_name in snapshot.specs:
                for sent_message in _split_into_messages(snapshot.views[tensor_name]):
                    self._transfer(dist.send, sent_message, MAIN_RANK)

    def _receive_pieces(self, snapshots: dict[str, Snapshot]) -> None:
        """Receive the other ranks' pieces into the main process's snapshots."""
        sender_ranks = [
            rank for rank, pieces in enumerate(self.outgoing_pieces) if pieces and rank != MAIN_RANK
        ]
        for rank in sender_ranks:
            self._transfer(dist.recv, torch.zeros(1), rank)  # wait until the rank has copied its pieces
        buffers_by_rank = {rank: self._message_buffers(snapshots, rank) for rank in sender_ranks}
        while buffers_by_rank:
            for rank in [*buffers_by_rank]:  # receive one message from each rank in turn
                message_buffer = next(buffers_by_rank[rank], None)
                if message_buffer is None:  # the rank has sent all messages
                    del buffers_by_rank[rank]
                    continue
                transfer_began_s = time.perf_counter()
                self._transfer(dist.recv, message_buffer, rank)
                self.pause(time.perf_counter() - transfer_began_s)

    def pause(self, busy_s: float) -> None:
        """Sleep until busy_s is only the fraction MAX_BUSY_FRACTION of the elapsed time.

        While training waits for the save, return immediately.
        """
        pause_s = busy_s * (1 / MAX_BUSY_FRACTION - 1)
        self.pauses_disabled.wait(pause_s)

    def _message_buffers(self, snapshots: dict[str, Snapshot], sender_rank: int) -> Iterator[Tensor]:
        """Yield views of the main process's snapshots that receive a rank's messages, in sending order."""
        for snapshot in snapshots.values():
            for _, piece_view in self._piece_views(snapshot, sender_rank):
                yield from _split_into_messages(piece_view)

    def _piece_views(self, snapshot: Snapshot, rank: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and flat views of a rank's pieces in the main process's snapshot."""
        for tensor_name, piece in self._pieces_of_rank(snapshot.specs, rank):
            yield tensor_name, snapshot.views[tensor_name].view(-1)[piece.start : piece.start + piece.length]

    def _pieces_of_rank(self, specs: Specs, rank: int) -> Iterator[tuple[str, Piece]]:
        """Yield the name of each tensor in the file to which the rank contributes, and the rank's piece."""
        for tensor_name, (_, tensor_shape) in specs.items():
            # A tensor is a parameter, a buffer, or optimizer state with a name `<parameter>/<state>`
            parameter_name = tensor_name if tensor_name in self.shapes else parameter_of(tensor_name)
            if self.shapes.get(parameter_name) == tensor_shape:
                piece = self.outgoing_pieces[rank].get(parameter_name)
            elif rank == MAIN_RANK:  # a buffer, or state with a different shape than its parameter
                piece = Piece(start=0, length=torch.Size(tensor_shape).numel())
            else:
                piece = None
            if piece is not None:  # the rank provides a piece of this tensor
                yield tensor_name, piece

    def _transfer(self, send_or_receive: Callable[..., Any], message_tensor: Tensor, other_rank: int) -> None:
        """Send or receive one message, and wait for it.

        Raises:
            GatherError: If the other rank does not answer, or closes its connection.
        """
        transfer_began_s = time.monotonic()
        try:
            send_or_receive(message_tensor, other_rank, group=self.gloo_group)
        except RuntimeError as error:  # gloo's message contains only source locations and addresses
            silent_s = time.monotonic() - transfer_began_s
            has_timed_out = "imed out" in str(error)  # "Timed out" or "timed out"
            if has_timed_out:
                raise GatherError(f"rank {other_rank} did not answer for {silent_s:.0f} s") from error
            raise GatherError(f"rank {other_rank} closed its connection") from error


def _split_into_messages(piece_view: Tensor) -> tuple[Tensor, ...]:
    """Split a flat view into uint8 views of at most MESSAGE_BYTES bytes. Sender and receiver split alike."""
    return piece_view.view(torch.uint8).split(MESSAGE_BYTES)
