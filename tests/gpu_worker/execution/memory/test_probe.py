"""Each part of the memory is found where it was taken, by a runner that takes known amounts."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.execution.memory.budget import MemoryUse
from gpu_worker.execution.memory.probe import MemoryProbe
from tests.gpu_worker.execution.fake_memory import MB, FakeMemory

amounts = st.integers(0, 500 * MB)


class FakeRunner:
    """Takes memory as a real one does; gives its tensors back when it is dropped."""

    def __init__(self, memory: FakeMemory, use: MemoryUse, cache_bytes: int) -> None:
        self._memory, self._use = memory, use
        memory.allocate("cache", cache_bytes)
        memory.allocate("rows", use.rows)

    def warm_up(self) -> None:
        # A smaller step after the largest one must not hide it; kernels stay when the runner goes.
        for size in (self._use.activations, self._use.activations // 3):
            self._memory.allocate("step", size)
            self._memory.drop("step")
        self._memory.elsewhere += self._use.other

    def capture_graphs(self, progress: Callable[[int, int], None] | None = None) -> None:
        self._memory.allocate("graphs", self._use.graphs)
        assert progress is not None
        progress(1, 1)

    def __del__(self) -> None:
        for name in ("cache", "rows", "graphs"):
            self._memory.drop(name)


@given(amounts, amounts, amounts, amounts, amounts, amounts, amounts)
def test_every_part_is_measured(
    weights: int, rows: int, activations: int, graphs: int, other: int, cache_bytes: int, used_before: int
) -> None:
    use = MemoryUse(weights, rows, activations, graphs, other)
    memory = FakeMemory(10_000 * MB, elsewhere=used_before)
    probe = MemoryProbe(memory)
    assert (probe.device_bytes, probe.used_before) == (10_000 * MB, used_before)
    memory.allocate("weights", weights)
    # Scratch memory of loading is no use that lasts.
    memory.allocate("scratch", 7 * MB)
    memory.drop("scratch")
    calls: list[tuple[int, int]] = []
    measured = probe.measure(
        lambda: FakeRunner(memory, use, cache_bytes), cache_bytes, lambda *counts: calls.append(counts)
    )
    assert measured == use
    assert calls == [(1, 1)]
    assert memory.tensors == {"weights": weights}


def test_memory_that_others_take_meanwhile_is_counted_and_what_they_return_is_not() -> None:
    for change, expected in ((300 * MB, 300 * MB), (-300 * MB, 0)):
        memory = FakeMemory(10_000 * MB, elsewhere=400 * MB)
        probe = MemoryProbe(memory)
        memory.elsewhere += change
        use = probe.measure(lambda memory=memory: FakeRunner(memory, MemoryUse(), 0), 0, lambda *_: None)  # type: ignore[misc]
        assert use.other == expected
