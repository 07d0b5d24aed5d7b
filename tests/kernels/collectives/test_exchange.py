"""Sums and gathers through shared memory; threads stand for the processes, which the kernel does not tell apart."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kernels.collectives import Exchange, ExchangeEndedError, exchange_bytes
from kernels.cpu_library import cpu_library

SLOT_FLOATS = (4 << 20) // 4


class Meeting:
    """Memory of a few exchanges, at the beginning of a line."""

    def __init__(self, size: int) -> None:
        library = cpu_library()
        if library is None:
            pytest.skip("no compiled kernels")
        self.size = size
        self._memory = torch.zeros(128 + exchange_bytes(size), dtype=torch.uint8)
        start = -(-self._memory.data_ptr() // 64) * 64
        self._ended = start - self._memory.data_ptr()
        self.exchanges = [Exchange(library, start, start + 64, rank, size, self._memory) for rank in range(size)]

    def end(self) -> None:
        self._memory[self._ended] = 1

    def together(self, work: Callable[[int, Exchange], torch.Tensor | None]) -> list[torch.Tensor | None]:
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(work, range(self.size), self.exchanges))


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.float32), (3, torch.bfloat16), (4, torch.float16)])
def test_sums_are_those_in_the_order_of_ranks_on_each(size: int, dtype: torch.dtype) -> None:
    meeting, generator = Meeting(size), torch.Generator().manual_seed(size)
    # The last is larger than a slot, and no multiple of anything.
    for shape in ((1, 1), (3, 512), (2, SLOT_FLOATS + 7)):
        parts = [torch.randn(shape, generator=generator).to(dtype) for _ in range(size)]
        expected = parts[0].float()
        for part in parts[1:]:
            expected = expected + part.float()
        own = [part.clone() for part in parts]
        for found in meeting.together(lambda rank, exchange, own=own: exchange.sum(own[rank])):
            assert found is not None
            assert torch.equal(found, expected.to(dtype))


def test_many_small_sums_one_after_another() -> None:
    meeting = Meeting(2)

    def work(rank: int, exchange: Exchange) -> torch.Tensor:
        x = torch.full((1, 64), float(rank + 1))
        for _ in range(100):
            # Every sum is three times what either had, of which the next begins anew.
            total = exchange.sum(x.clone())
            x = total / 3 * (rank + 1)
        return total

    for found in meeting.together(work):
        assert found is not None
        torch.testing.assert_close(found, torch.full((1, 64), 3.0))


@pytest.mark.parametrize("columns", [1, 31, 2 * SLOT_FLOATS + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_columns_stand_side_by_side(columns: int, dtype: torch.dtype) -> None:
    meeting = Meeting(2)
    rows = 5 if columns < SLOT_FLOATS else 2
    parts = [torch.randint(1000, (rows, columns), generator=torch.Generator().manual_seed(s)).to(dtype) for s in (1, 2)]
    for found in meeting.together(lambda rank, exchange: exchange.gather(parts[rank])):
        assert found is not None
        assert torch.equal(found, torch.cat(parts, dim=1))


def test_who_waits_is_told_of_the_end() -> None:
    meeting = Meeting(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(meeting.exchanges[0].sum, torch.ones(1, 4))
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.1)
        meeting.end()
        with pytest.raises(ExchangeEndedError):
            waiting.result(timeout=5)
