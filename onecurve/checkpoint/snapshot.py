"""Stores a checkpoint file's tensors in a CPU buffer, and writes the file from this buffer."""

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

CHUNK_BYTES = 16 * 2**20  # number of bytes written and hashed at a time
# Size of the header length at the start of a safetensors file, and alignment of the header
HEADER_LENGTH_BYTES = HEADER_ALIGNMENT_BYTES = 8
DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
DTYPE_NAMES |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"}
DTYPE_NAMES |= {torch.uint8: "U8", torch.bool: "BOOL"}
DTYPE_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}

Specs = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # tensor name -> dtype and shape


class Snapshot:
    """CPU buffer for the tensors of one safetensors file. Every save reuses the buffer.

    The buffer has the same layout as the file, so a write needs no further copy.

    Args:
        specs: Each tensor's dtype and shape, by tensor name.
        pinned: True to page-lock the buffer, which requires CUDA.
        pause: Function that may sleep, called after each chunk of a write with the chunk's CPU time in
            seconds.
    """

    def __init__(self, specs: Specs, pinned: bool, pause: Callable[[float], None] = lambda _: None):
        self.specs, self.pause = specs, pause
        bytes_by_tensor: dict[str, int] = {}
        for tensor_name, (dtype, shape) in specs.items():
            bytes_by_tensor[tensor_name] = dtype.itemsize * torch.Size(shape).numel()
        self.buffer = _allocate_pages(sum(bytes_by_tensor.values()))
        if pinned and len(self.buffer):
            _lock_pages(self.buffer)
            # finalize() keeps the buffer alive until it is unpinned. At process exit, the driver unpins the
            # buffer.
            weakref.finalize(self, _unlock_pages, self.buffer).atexit = False
        self.views: dict[str, Tensor] = {}  # each tensor as a view of the buffer
        file_header: dict[str, Any] = {}
        tensor_start_byte = 0
        item_bytes_by_tensor = {tensor_name: dtype.itemsize for tensor_name, (dtype, _) in specs.items()}
        # Sorting by item size aligns each tensor to its item size.
        for tensor_name in sorted(specs, key=item_bytes_by_tensor.__getitem__, reverse=True):
            dtype, shape = specs[tensor_name]
            tensor_end_byte = tensor_start_byte + bytes_by_tensor[tensor_name]
            self.views[tensor_name] = self.buffer[tensor_start_byte:tensor_end_byte].view(dtype).view(shape)
            file_header[tensor_name] = {
                "dtype": DTYPE_NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [tensor_start_byte, tensor_end_byte],
            }
            tensor_start_byte = tensor_end_byte
        file_header_json = json.dumps(file_header, separators=(",", ":")).encode()
        file_header_json += b" " * (-len(file_header_json) % HEADER_ALIGNMENT_BYTES)
        self.header_bytes = len(file_header_json).to_bytes(HEADER_LENGTH_BYTES, "little") + file_header_json

    def write(self, path: Path) -> dict[str, Any]:
        """Write the safetensors file and sync it to disk. Return the file's size in bytes and its SHA-256."""
        return write_chunks(path, self._chunks())

    def _chunks(self) -> Iterator[bytes | memoryview]:
        """Yield the file's header and the buffer's chunks, and call pause() after each written chunk."""
        yield self.header_bytes
        buffer_bytes = self.buffer.numpy().data
        for chunk_start in range(0, len(buffer_bytes), CHUNK_BYTES):
            chunk_began_s = time.thread_time()
            yield buffer_bytes[chunk_start : chunk_start + CHUNK_BYTES]
            # CPU time in which the caller has written and hashed the chunk
            self.pause(time.thread_time() - chunk_began_s)


def _allocate_pages(byte_count: int) -> Tensor:
    """Allocate a uint8 tensor of `byte_count` bytes in memory pages that contain nothing else.

    One additional page allows for the alignment of the start, and the other for the rest of the last page.
    """
    unaligned_buffer = torch.empty(byte_count + 2 * mmap.PAGESIZE, dtype=torch.uint8)
    first_page_start = -unaligned_buffer.data_ptr() % mmap.PAGESIZE
    return unaligned_buffer[first_page_start : first_page_start + byte_count]


def _lock_pages(buffer: Tensor) -> None:
    """Page-lock the buffer. torch's pinned allocator would round the size up to a power of two."""
    page_count = -(-buffer.nbytes // mmap.PAGESIZE)  # rounded up
    locked_bytes = page_count * mmap.PAGESIZE
    for_all_contexts = 1  # value of cudaHostRegisterPortable
    error_code = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), locked_bytes, for_all_contexts))
    if error_code:
        raise RuntimeError(
            f"CUDA could not page-lock {locked_bytes:,} bytes of CPU memory for checkpoints"
            f" (CUDA error {error_code})"
        )


def _unlock_pages(buffer: Tensor) -> None:
    """Undo _lock_pages(), so that the buffer's memory can be freed."""
    torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())


def write_chunks(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write and sync a file. Return the file's size in bytes and its SHA-256, for the manifest."""
    file_digest = hashlib.sha256()
    written_bytes = 0
    with open(path, "wb") as output_file:
        for chunk in chunks:
            output_file.write(chunk)
            file_digest.update(chunk)
            written_bytes += len(chunk)
        output_file.flush()
        os.fsync(output_file.fileno())
    return {"size": written_bytes, "sha256": file_digest.hexdigest()}
