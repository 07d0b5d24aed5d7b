"""Reads tensors from files into memory of any device, several pieces at a time.

Owns threads that read, and a few buffers that pieces pass through on their way to another device or dtype; pinned, so
that copies to a GPU run at the bus's speed while the next pieces are read. Files are read, not mapped: a file that
shrinks meanwhile is an error and not the end of the process.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from gpu_worker.models.json_file import CheckpointError
from gpu_worker.models.tensor_file import StoredTensor, TensorFile

PIECE_BYTES = 16 << 20
NUM_BUFFERS = 4

# Of rows of which stretches are read: those that a thread reads at a time, and the least worth reading by itself.
_ROWS = 256
_LEAST_RUN_BYTES = 512

# Read-ahead asked of the kernel: the file is fetched in windows of this size.
_WINDOW_BYTES = 64 << 20
_NUM_WINDOWS_AHEAD = 6


@dataclass(slots=True)
class _Buffer:
    """Memory for one piece, and what tells that its last piece has left it."""

    memory: torch.Tensor
    copied: torch.cuda.Event | None = None


class TensorReader:
    """Reads one tensor after another, each whole when `read` returns. Close it to end its threads."""

    def __init__(self, device: torch.device, piece_bytes: int = PIECE_BYTES) -> None:
        """Read into memory of `device`, at most `piece_bytes`, whole numbers of any type, at a time and thread."""
        assert piece_bytes % 8 == 0
        self._device = device
        self._piece_bytes = piece_bytes
        self._pool = ThreadPoolExecutor(NUM_BUFFERS, thread_name_prefix="read-weights")
        self._buffers: deque[_Buffer] = deque()
        self._announced: set[tuple[int, int]] = set()

    def close(self) -> None:
        """Wait for reads that were begun, and end the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def read(self, file: TensorFile, stored: StoredTensor, out: torch.Tensor) -> None:
        """Read a tensor into `out`, contiguous, in its dtype; `CheckpointError` if the file ends early."""
        assert isinstance(stored.dtype, torch.dtype)
        assert out.is_contiguous()
        assert out.numel() == stored.num_elements
        self._announce(file, stored)
        flat = out.view(-1)
        if out.device.type == "cpu" and out.dtype == stored.dtype:
            self._read_directly(file, stored, flat.view(torch.uint8))
        else:
            self._read_staged(file, stored, flat)

    def read_box(self, file: TensorFile, stored: StoredTensor, box: Sequence[range], out: torch.Tensor) -> None:
        """Read a box of a tensor's first dimensions, as `read` does; all of the others.

        Only the first dimension of more than one entry and the one behind it may be cut.
        """
        assert isinstance(stored.dtype, torch.dtype)
        shape = stored.shape or (1,)
        box = [*box, *map(range, shape[len(box) :])]
        cut = max((axis for axis, entries in enumerate(box) if len(entries) < shape[axis]), default=0)
        entry_bytes = math.prod(shape[cut + 1 :]) * stored.dtype.itemsize
        run_bytes, row_bytes = len(box[cut]) * entry_bytes, shape[cut] * entry_bytes
        if all(shape[axis] == 1 for axis in range(cut)):
            first = stored.offset + box[cut].start * entry_bytes
            self.read(file, StoredTensor(stored.dtype, tuple(out.shape), first, run_bytes), out)
            return
        assert cut == 1, "only the first two dimensions are cut"
        skipped = box[1].start * entry_bytes
        if run_bytes < _LEAST_RUN_BYTES:
            # Asking for so few bytes takes longer than reading them with their neighbours.
            rows = torch.empty(len(box[0]), row_bytes, dtype=torch.uint8)
            first = stored.offset + box[0].start * row_bytes
            self.read(file, StoredTensor(torch.uint8, tuple(rows.shape), first, rows.numel()), rows)
            rows = rows[:, skipped : skipped + run_bytes].contiguous()
        else:
            rows = torch.empty(len(box[0]), run_bytes, dtype=torch.uint8)
            first = stored.offset + box[0].start * row_bytes + skipped
            reads = [
                self._pool.submit(_read_rows, file, first + start * row_bytes, row_bytes, rows[start : start + _ROWS])
                for start in range(0, len(rows), _ROWS)
            ]
            for read in reads:
                read.result()
        out.copy_(rows.view(stored.dtype).view(out.shape))

    def _read_directly(self, file: TensorFile, stored: StoredTensor, target: torch.Tensor) -> None:
        reads = [
            self._begin(file, stored.offset + first, target[first : first + size])
            for first, size in self._pieces(stored)
        ]
        for read in reads:
            read.result()

    def _read_staged(self, file: TensorFile, stored: StoredTensor, flat: torch.Tensor) -> None:
        """Keep all buffers busy: pieces leave, in order, as soon as they have been read."""
        assert isinstance(stored.dtype, torch.dtype)
        under_way: deque[tuple[Future[None], _Buffer, int, int]] = deque()
        for first, size in self._pieces(stored):
            if len(under_way) == NUM_BUFFERS:
                self._deliver(*under_way.popleft(), stored.dtype, flat)
            buffer = self._free_buffer()
            read = self._begin(file, stored.offset + first, buffer.memory[:size])
            under_way.append((read, buffer, first, size))
        while under_way:
            self._deliver(*under_way.popleft(), stored.dtype, flat)

    def _deliver(
        self, read: Future[None], buffer: _Buffer, first: int, size: int, dtype: torch.dtype, flat: torch.Tensor
    ) -> None:
        """Copy a piece to where it belongs, on another device without waiting for it, and hand its buffer on."""
        read.result()
        begin, end = first // dtype.itemsize, (first + size) // dtype.itemsize
        piece = buffer.memory[:size].view(dtype)
        if flat.device.type == "cuda":
            # Converted over there: here it would take longer than the copy.
            piece = piece if dtype == flat.dtype else piece.to(flat.device, non_blocking=True)
            flat[begin:end].copy_(piece, non_blocking=True)
            buffer.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            buffer.copied.record(torch.cuda.current_stream(flat.device))
        else:
            flat[begin:end].copy_(piece)
        self._buffers.append(buffer)

    def _free_buffer(self) -> _Buffer:
        if not self._buffers:
            self._buffers.extend(self._new_buffer() for _ in range(NUM_BUFFERS))
        buffer = self._buffers.popleft()
        if buffer.copied is not None:
            buffer.copied.synchronize()
        return buffer

    def _new_buffer(self) -> _Buffer:
        pinned = self._device.type == "cuda"
        return _Buffer(torch.empty(self._piece_bytes, dtype=torch.uint8, pin_memory=pinned))

    def _begin(self, file: TensorFile, offset: int, target: torch.Tensor) -> Future[None]:
        return self._pool.submit(_read_exactly, file, offset, _bytes_of(target))

    def _pieces(self, stored: StoredTensor) -> Iterator[tuple[int, int]]:
        for first in range(0, stored.num_bytes, self._piece_bytes):
            yield first, min(self._piece_bytes, stored.num_bytes - first)

    def _announce(self, file: TensorFile, stored: StoredTensor) -> None:
        """Let the kernel fetch what comes next in the file, so that a disk reads long runs in the file's own order."""
        if not hasattr(os, "posix_fadvise"):
            return
        last = (stored.offset + stored.num_bytes) // _WINDOW_BYTES + _NUM_WINDOWS_AHEAD
        for window in range(stored.offset // _WINDOW_BYTES, last + 1):
            if (file.fd, window) not in self._announced:
                self._announced.add((file.fd, window))
                os.posix_fadvise(file.fd, window * _WINDOW_BYTES, _WINDOW_BYTES, os.POSIX_FADV_WILLNEED)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy())  # type: ignore[arg-type]  # numpy does not say that arrays are buffers


def _read_rows(file: TensorFile, offset: int, row_bytes: int, target: torch.Tensor) -> None:
    """Read a stretch of each of several rows."""
    for number, row in enumerate(target):
        _read_exactly(file, offset + number * row_bytes, _bytes_of(row))


def _read_exactly(file: TensorFile, offset: int, target: memoryview) -> None:
    while target:
        try:
            count = os.preadv(file.fd, [target], offset)
        except OSError as error:
            raise CheckpointError(file.path, f"cannot be read ({error.strerror}); check the disk") from None
        if count == 0:
            raise CheckpointError(file.path, "ended while it was read; load again when it is complete")
        target, offset = target[count:], offset + count
