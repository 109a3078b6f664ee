"""Tests of the page-locked memory of snapshots, with a simulated CUDA runtime."""

import gc
import mmap
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from onecurve.checkpoint.gather import PieceGatherer
from onecurve.checkpoint.snapshot import CHUNK_BYTES, Snapshot
from onecurve.checkpoint.training import TrainingState
from onecurve.run.ending import is_out_of_memory

SPECS = {"odd": (torch.bfloat16, (3, 7, 5)), "large": (torch.float32, (100, 1001)), "step": (torch.int64, ())}


class Cudart:
    """Simulated CUDA runtime that locks only whole pages, and locks no page more than once."""

    def __init__(self, status: int = 0):
        self.status, self.locked, self.calls = status, {}, 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls += 1
        assert address % mmap.PAGESIZE == 0
        assert size > 0
        assert size % mmap.PAGESIZE == 0
        assert all(start + n <= address or address + size <= start for start, n in self.locked.items())
        if self.status == 0:
            self.locked[address] = size
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.fixture
def cudart(monkeypatch):
    runtime = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


def test_a_pinned_snapshot_uses_whole_pages_instead_of_a_power_of_two(cudart, tmp_path):
    """Check the size of the pinned memory.

    torch's allocator would allocate 512 KiB for 392 KiB, and 4 GiB for 2.1 GiB.
    """
    snapshots = [Snapshot(SPECS, pinned=True) for _ in range(3)]
    for snapshot in snapshots:
        start, size = snapshot.buffer.data_ptr(), cudart.locked[snapshot.buffer.data_ptr()]
        assert snapshot.buffer.nbytes == 100 * 1001 * 4 + 3 * 7 * 5 * 2 + 8
        assert snapshot.buffer.nbytes <= size < snapshot.buffer.nbytes + mmap.PAGESIZE
        for view in snapshot.views.values():
            assert start <= view.data_ptr() <= view.data_ptr() + view.nbytes <= start + size
            view.fill_(3)
    snapshots[0].write(tmp_path / "file")
    assert all((tensor == 3).all() for tensor in load_file(tmp_path / "file").values())
    kept = snapshots.pop()
    del snapshot, view, snapshots
    gc.collect()
    assert list(cudart.locked) == [kept.buffer.data_ptr()], "freed memory stays locked"


def test_a_write_leaves_most_of_its_core_to_the_training(tmp_path):
    waits, gatherer = [], PieceGatherer.__new__(PieceGatherer)
    # Return immediately while a training step is waiting
    gatherer.pauses_disabled = SimpleNamespace(wait=waits.append)
    Snapshot({"x": (torch.uint8, (2 * CHUNK_BYTES + 1,))}, False, gatherer.pause).write(tmp_path / "file")
    assert [wait > 0 for wait in waits] == [True] * 3


def test_memory_is_not_locked_without_cuda_or_without_state(cudart):
    Snapshot(SPECS, pinned=False)
    Snapshot({}, pinned=True)  # A snapshot of an optimizer without state
    assert cudart.calls == 0


@pytest.mark.parametrize(("device", "number"), [("cuda", 0), ("cuda:1", 1)])
def test_the_saver_thread_uses_its_processs_gpu(device, number, monkeypatch):
    """Check devices without an index, which one-process Accelerate jobs use but torch.cuda refuses."""
    chosen = []
    monkeypatch.setattr("torch.cuda.set_device", lambda d: chosen.append(torch.cuda._get_device_index(d)))
    accelerator = SimpleNamespace(device=torch.device(device))
    TrainingState.allocate(SimpleNamespace(accelerator=accelerator), {})
    assert chosen == [number]


def test_memory_that_cannot_be_locked_is_an_error(monkeypatch):
    runtime = Cudart(status=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with pytest.raises(
        RuntimeError, match=r"could not page-lock .* for checkpoints \(CUDA error 2\)"
    ) as error:
        Snapshot(SPECS, pinned=True)
    assert not is_out_of_memory(error.value), "the error would advise a smaller batch"
    gc.collect()
    assert not runtime.locked
