"""The contents of blocks as rows of bytes: copied from the device's memory to the host's, and back.

A row has what all layers of a group keep in a block, one tensor after the other, as it lies in memory. On a CPU both
sides are the same memory, and a copy is made where it is asked for, without the threads of torch: those belong to the
engine. On a GPU copies go through streams of their own: rows to read were gathered in the order of the steps, so that
these need not wait for the copy; rows are written after the steps that were launched before.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence as Values
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.execution.memory.kv_cache import KVCache, StatePool

_log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

_SMALL_ROW_BYTES = 1 << 18
"""Rows up to this size are written without letting other threads run: beside an engine that computes, the thread would
wait for its next turn much longer than the copy takes."""


class _Done:
    """Rows that are there."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor of all blocks, `[num_layers, num_blocks, num_bytes]`, and where its bytes are in a row."""

    memory: torch.Tensor
    begin: int

    @property
    def end(self) -> int:
        return self.begin + self.memory.shape[0] * self.memory.shape[2]


class _HostBlockBytes:
    """The blocks of one group, or the slots of states, in the memory of a CPU.

    Attributes:
        layout: What a row consists of, in words: rows of equal layouts can be exchanged.
    """

    def __init__(self, tensors: Values[tuple[torch.Tensor, int]], num_blocks: int, layout: str) -> None:
        parts, self.row_bytes = _parts(tensors, num_blocks)
        self.num_blocks = num_blocks
        self.layout = layout
        self._parts: list[tuple[npt.NDArray[Any], slice]] = [
            (part.memory.numpy(), slice(part.begin, part.end)) for part in parts
        ]
        self._layers = [memory[layer].reshape(-1).data for memory, _ in self._parts for layer in range(len(memory))]

    def make_rows(self, count: int, memory: Bytes | None = None) -> Bytes:
        """Return host memory, `[count, row_bytes]`, that copies are fast to and from: `memory`, or new."""
        if memory is None:
            return np.empty((count, self.row_bytes), dtype=np.uint8)
        return memory.reshape(count, self.row_bytes)

    def read(self, blocks: Values[int], rows: Bytes, places: Values[int]) -> Copy:
        """Begin to copy blocks to rows, behind the steps that were launched. The engine's thread calls it."""
        for memory, part in self._parts:
            num_layers, _, num_bytes = memory.shape
            for block, place in zip(blocks, places, strict=True):
                np.copyto(rows[place, part].reshape(num_layers, num_bytes), memory[:, block])
        return _Done()

    def mark(self) -> object:
        """Return the point behind which blocks may be written to. The engine's thread calls it."""
        return None

    def write(self, block: int, row: Bytes, mark: object) -> None:
        """Copy a row, `[row_bytes]`, to a block behind a mark, and wait until it is there. Any thread may call it."""
        if self.row_bytes <= _SMALL_ROW_BYTES:
            source, begin = row.data, 0
            for layer in self._layers:
                size = len(layer) // self.num_blocks
                layer[block * size : (block + 1) * size] = source[begin : begin + size]
                begin += size
            return
        for memory, part in self._parts:
            num_layers, _, num_bytes = memory.shape
            np.copyto(memory[:, block], row[part].reshape(num_layers, num_bytes))


class _DeviceBlockBytes:
    """The same in the memory of a GPU."""

    def __init__(
        self, tensors: Values[tuple[torch.Tensor, int]], num_blocks: int, layout: str, device: torch.device
    ) -> None:
        self._parts, self.row_bytes = _parts(tensors, num_blocks)
        self.num_blocks = num_blocks
        self.layout = layout
        self._device = device
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def make_rows(self, count: int, memory: Bytes | None = None) -> Bytes:
        if memory is None:
            return torch.empty(count, self.row_bytes, dtype=torch.uint8, pin_memory=True).numpy()
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
        if int(status):
            # Copies are slower, and right.
            _log.warning("memory that is shared with other processes cannot be pinned (CUDA error %d)", int(status))
        return memory.reshape(count, self.row_bytes)

    def read(self, blocks: Values[int], rows: Bytes, places: Values[int]) -> Copy:
        with torch.cuda.device(self._device):
            index = torch.tensor(blocks).pin_memory().to(self._device, non_blocking=True)
            parts = [part.memory.index_select(1, index).transpose(0, 1).flatten(1) for part in self._parts]
            gathered = torch.cat(parts, dim=1)
            self._out.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._out):
                for number, place in enumerate(places):
                    torch.from_numpy(rows[place]).copy_(gathered[number], non_blocking=True)
                # Waiting sleeps: the cores belong to the gateway and to the other threads.
                done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                done.record()
            gathered.record_stream(self._out)
        return _DeviceCopy(done)

    def mark(self) -> object:
        with torch.cuda.device(self._device):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return event

    def write(self, block: int, row: Bytes, mark: object) -> None:
        assert isinstance(mark, torch.cuda.Event)
        with torch.cuda.device(self._device), torch.cuda.stream(self._in):
            self._in.wait_event(mark)
            staged = torch.from_numpy(row).to(self._device, non_blocking=True)
            for part in self._parts:
                num_layers, _, num_bytes = part.memory.shape
                part.memory[:, block].copy_(staged[part.begin : part.end].view(num_layers, num_bytes))
            self._in.synchronize()


@dataclass(frozen=True, slots=True)
class _DeviceCopy:
    event: torch.cuda.Event

    def is_done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()


Copy = _Done | _DeviceCopy
"""Rows on their way to the host."""
BlockBytes = _HostBlockBytes | _DeviceBlockBytes


def cache_bytes(cache: KVCache) -> list[BlockBytes]:
    """Return the contents of each group of a cache."""
    groups: list[BlockBytes] = []
    for described, group in zip(cache.layout.groups, cache.groups, strict=True):
        tensors, words = [], [f"window={described.window} block_size={cache.block_size} {cache.device.type}"]
        for stack in group.stacks:
            own = [stack.keys] if stack.is_latent else [stack.keys, stack.values]
            for tensor in own if stack.scales is None else [*own, stack.scales]:
                tensors.append((tensor, len(tensor)))
                words.append(f"{tensor.dtype} {len(tensor)} {tuple(tensor.shape[2:])} {tensor.stride()[2:]}")
        words.append(f"layers={described.layers}")
        groups.append(_of(tensors, group.num_blocks, "; ".join(words), cache.device))
    return groups


def state_bytes(states: StatePool, device: torch.device) -> BlockBytes:
    """Return the contents of the slots of states."""
    parts = [part for layer in states.layers if layer is not None for part in layer.parts]
    words = [f"states {device.type}", *(f"{part.dtype} {tuple(part.shape[1:])}" for part in parts)]
    return _of([(part, 1) for part in parts], len(parts[0]), "; ".join(words), device)


def _of(tensors: Values[tuple[torch.Tensor, int]], num_blocks: int, layout: str, device: torch.device) -> BlockBytes:
    if device.type == "cpu":
        return _HostBlockBytes(tensors, num_blocks, layout)
    return _DeviceBlockBytes(tensors, num_blocks, layout, device)


def _parts(tensors: Values[tuple[torch.Tensor, int]], num_blocks: int) -> tuple[list[_Part], int]:
    """Return the tensors as bytes, in the order in which they lie in memory, and the size of a row."""
    parts, begin = [], 0
    for tensor, num_layers in tensors:
        storage = tensor.untyped_storage()
        assert tensor.storage_offset() == 0
        assert storage.nbytes() == math.prod(tensor.shape) * tensor.itemsize
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        part = _Part(memory.view(num_layers, num_blocks, -1), begin)
        parts.append(part)
        begin = part.end
    return parts, begin
