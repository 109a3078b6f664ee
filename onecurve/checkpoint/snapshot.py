"""The tensors of one file of a checkpoint on the CPU, and the file written from them."""

import hashlib
import json
import mmap
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 16 * 2**20  # unit of writing and hashing
DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
DTYPE_NAMES |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"}
DTYPE_NAMES |= {torch.uint8: "U8", torch.bool: "BOOL"}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

Specs = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # name -> dtype and shape


class Snapshot:
    """The tensors of one safetensors file on the CPU, in one buffer that every save reuses.

    The buffer has the file's layout, so writing needs no further copy. specs: name -> (dtype, shape). pinned:
    page-locked, on a host with CUDA. pause(): called in a write with the processor time of each chunk.
    """

    def __init__(self, specs: Specs, pinned: bool, pause: Callable[[float], None] = lambda _: None):
        self.specs, self.pause = specs, pause
        sizes = {name: dtype.itemsize * torch.Size(shape).numel() for name, (dtype, shape) in specs.items()}
        self.buffer = _empty(sum(sizes.values()))
        if pinned and len(self.buffer):
            _pin(self.buffer)
            # finalize keeps the buffer until it is unpinned. At the process's end the driver does that.
            weakref.finalize(self, _unpin, self.buffer).atexit = False
        self.views: dict[str, Tensor] = {}
        header, start = {}, 0
        by_size = sorted(specs, key=lambda name: -specs[name][0].itemsize)  # aligns each to its item size
        for name in by_size:
            dtype, shape = specs[name]
            end = start + sizes[name]
            self.views[name] = self.buffer[start:end].view(dtype).view(shape)
            header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
            start = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text

    def write(self, path: Path) -> dict[str, Any]:
        """Writes the file and syncs it. Returns its size in bytes and SHA-256."""
        return write_chunks(path, self._chunks())

    def _chunks(self) -> Iterator[bytes | memoryview]:
        yield self.header
        data = self.buffer.numpy().data
        for start in range(0, len(data), CHUNK_BYTES):
            began = time.thread_time()
            yield data[start : start + CHUNK_BYTES]
            self.pause(time.thread_time() - began)


def _empty(size: int) -> Tensor:
    """Allocates uint8 [size] in memory pages of its own."""
    whole = torch.empty(size + 2 * mmap.PAGESIZE, dtype=torch.uint8)
    start = -whole.data_ptr() % mmap.PAGESIZE
    return whole[start : start + size]


def _pin(buffer: Tensor) -> None:
    """Page-locks the buffer's pages. (torch's allocator would round the size up to a power of two.)"""
    size = -(-buffer.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    for_all_contexts = 1  # cudaHostRegisterPortable
    status = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size, for_all_contexts))
    if status:
        raise RuntimeError(f"{size:,} bytes for checkpoints can't be page-locked: CUDA's error {status}")


def _unpin(buffer: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())


def write_chunks(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    with open(path, "wb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"size": size, "sha256": digest.hexdigest()}
