"""Carries arrays to the device and results back, in one copy each way, and never waits for the device to do so.

On a CPU nothing is copied: the same calls hand the memory on.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Values
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

# Kernels are compiled anew for a pointer that is aligned otherwise: all are aligned alike.
_ALIGNMENT = 64

DTYPES = MappingProxyType(
    {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64, np.dtype(np.float32): torch.float32}
)
"""What can be carried."""


class StagedArray:
    """An array on its way to the device."""

    __slots__ = ("array", "offset", "tensor")
    tensor: torch.Tensor

    def __init__(self, array: npt.NDArray[np.generic], offset: int) -> None:
        self.array = array
        self.offset = offset

    def bind(self, buffer: torch.Tensor) -> None:
        """Find the tensor in the upload's bytes."""
        part = buffer[self.offset : self.offset + self.array.nbytes]
        self.tensor = part.view(DTYPES[self.array.dtype]).view(self.array.shape)


class Upload:
    """Collects arrays, and what to do with them on the device; sends all of them at once.

    Attributes:
        is_copied: Whether arrays are copied; else their tensors are the arrays themselves.
        num_bytes: To send.
    """

    def __init__(self, device: torch.device, *, is_copied: bool | None = None) -> None:
        self._device = device
        self.is_copied = device.type != "cpu" if is_copied is None else is_copied
        self._staged: list[StagedArray] = []
        self._arrivals: list[Callable[[], object]] = []
        self.num_bytes = 0

    def add(self, array: npt.NDArray[np.generic]) -> StagedArray:
        """Send this array too. Its contents are read when it is sent, or later where nothing is copied."""
        staged = StagedArray(np.ascontiguousarray(array), self.num_bytes)
        if not self.is_copied:
            staged.tensor = torch.from_numpy(staged.array)
            return staged
        self._staged.append(staged)
        self.num_bytes += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        return staged

    def on_arrival(self, action: Callable[[], object]) -> None:
        """Call this, in order, when the tensors are there."""
        self._arrivals.append(action)

    def send(self) -> None:
        """Send everything, set the tensors, and act on them."""
        if self._staged:
            self.bind(self._packed().to(self._device, non_blocking=True))
        for action in self._arrivals:
            action()

    def send_into(self, buffer: torch.Tensor) -> None:
        """Send everything to the start of `buffer`, whose tensors somebody has bound already."""
        buffer[: self.num_bytes].copy_(self._packed(), non_blocking=True)

    def bind(self, buffer: torch.Tensor) -> None:
        """Set the tensors to where they are, or will be, in `buffer`."""
        for staged in self._staged:
            staged.bind(buffer)

    def _packed(self) -> torch.Tensor:
        # Pinned memory comes from torch's cache, which hands it out again only when the copy has read it.
        packed = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        packed_bytes = packed.numpy()
        for staged in self._staged:
            if staged.array.size:
                packed_bytes[staged.offset : staged.offset + staged.array.nbytes] = staged.array.reshape(-1).view(
                    np.uint8
                )
        return packed


def uploaded(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Return a single array on the device, which nothing waits for."""
    upload = Upload(device)
    staged = upload.add(array)
    upload.send()
    return staged.tensor


class Download:
    """Tensors on their way to the host."""

    __slots__ = ("_done", "_hosts", "_sources")

    def __init__(self, hosts: list[torch.Tensor], sources: Values[torch.Tensor], done: torch.cuda.Event | None) -> None:
        """Hold `sources` until `done`: their memory must not be used again before it was read."""
        self._hosts = hosts
        self._sources = sources
        self._done = done

    def wait(self) -> list[torch.Tensor]:
        """Wait until they are there."""
        if self._done is not None:
            self._done.synchronize()
            self._sources = ()
        return self._hosts


class Downloads:
    """Copies to the host on a stream of its own, so that the next step does not wait for them."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def start(self, tensors: Values[torch.Tensor]) -> Download:
        """Copy when all that was launched so far is done; with no tensors, only wait for that."""
        if self._stream is None:
            return Download(list(tensors), (), None)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            hosts = [
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                for tensor in tensors
            ]
            # Waiting sleeps: the cores belong to the gateway and to the other threads.
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record()
        return Download(hosts, tensors, done)
