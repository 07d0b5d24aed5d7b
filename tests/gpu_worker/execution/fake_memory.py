"""A device's memory that exists on paper: what an allocator would take of it, and what others take."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpu_worker.execution.memory.probe import DeviceMemory

MB = 10**6


@dataclass
class FakeMemory(DeviceMemory):
    """Counts bytes. Freed tensors stay in the allocator's cache until that is released, as on CUDA.

    Attributes:
        elsewhere: Taken by others, and by libraries of this process.
    """

    size: int
    elsewhere: int = 0
    tensors: dict[str, int] = field(default_factory=dict)
    cached: int = 0
    peak: int = 0

    def allocate(self, name: str, num_bytes: int) -> None:
        self.tensors[name] = num_bytes
        self.cached = max(0, self.cached - num_bytes)
        self.peak = max(self.peak, self.reserved())

    def drop(self, name: str) -> None:
        self.cached += self.tensors.pop(name)

    def total(self) -> int:
        return self.size

    def free(self) -> int:
        return self.size - self.elsewhere - self.reserved()

    def reserved(self) -> int:
        return sum(self.tensors.values()) + self.cached

    def peak_reserved(self) -> int:
        return self.peak

    def reset_peak(self) -> None:
        self.peak = self.reserved()

    def release_cached(self) -> None:
        self.cached = 0
