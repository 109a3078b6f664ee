"""The snapshot's memory on a host with CUDA, which is simulated: cudaHostRegister notes what it is given."""

import gc
import mmap
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from onecurve.checkpoint.format import CHUNK_BYTES, Snapshot
from onecurve.checkpoint.gather import Gather
from onecurve.checkpoint.training import TrainingState
from onecurve.run.ending import is_out_of_memory

SPECS = {"odd": (torch.bfloat16, (3, 7, 5)), "large": (torch.float32, (100, 1001)), "step": (torch.int64, ())}


class Cudart:
    """CUDA's runtime, which page-locks whole pages and no page twice."""

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
    made = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


def test_a_pinned_snapshot_takes_its_own_pages_and_no_power_of_two(cudart, tmp_path):
    """torch's allocator would take 512 KiB for these 392 KiB, and 4 GiB for 2.1."""
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
    assert list(cudart.locked) == [kept.buffer.data_ptr()], "memory stays locked that others get"


def test_a_write_leaves_most_of_its_core_to_the_training(tmp_path):
    waits, gathering = [], Gather.__new__(Gather)
    gathering.hurry = SimpleNamespace(wait=waits.append)  # ends at once when the training waits
    Snapshot({"x": (torch.uint8, (2 * CHUNK_BYTES + 1,))}, False, gathering.pause).write(tmp_path / "file")
    assert [wait > 0 for wait in waits] == [True] * 3


def test_memory_is_locked_on_a_host_with_cuda_and_where_there_is_some(cudart):
    Snapshot(SPECS, pinned=False)
    Snapshot({}, pinned=True)  # of an optimizer without state
    assert cudart.calls == 0


@pytest.mark.parametrize(("device", "number"), [("cuda", 0), ("cuda:1", 1)])
def test_the_savers_thread_takes_the_gpu_of_its_process(device, number, monkeypatch):
    """Without an index, as Accelerate's on one process is, torch refuses the device."""
    chosen = []
    monkeypatch.setattr("torch.cuda.set_device", lambda d: chosen.append(torch.cuda._get_device_index(d)))
    accelerator = SimpleNamespace(device=torch.device(device))
    TrainingState.allocate(SimpleNamespace(accelerator=accelerator), {})
    assert chosen == [number]


def test_memory_that_can_not_be_locked_is_an_error(monkeypatch):
    made = Cudart(status=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    with pytest.raises(RuntimeError, match="for checkpoints can't be page-locked: CUDA's error 2") as error:
        Snapshot(SPECS, pinned=True)
    assert not is_out_of_memory(error.value), "a smaller batch would not help"
    gc.collect()
    assert not made.locked
