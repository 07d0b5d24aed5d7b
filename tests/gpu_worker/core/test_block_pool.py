import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpu_worker.core.block_pool import BlockPool


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_blank_blocks_are_used_before_cached_ones() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.label(block, digest(1))
    pool.release([block])
    assert block not in pool.allocate(2)
    assert pool.find(digest(1)) == block


def test_least_recently_released_content_is_reused_first_and_a_prefix_last() -> None:
    pool = BlockPool(4)
    older, newer = pool.allocate(2), pool.allocate(2)
    for block in (*older, *newer):
        pool.label(block, digest(block))
    pool.release(older)
    pool.release(newer)
    assert [pool.allocate(1)[0] for _ in range(4)] == [older[1], older[0], newer[1], newer[0]]


def test_double_release_is_refused() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_allocating_more_than_available_is_refused_and_changes_nothing() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError):
        pool.allocate(3)
    assert pool.num_available == 2


class PoolMachine(RuleBasedStateMachine):
    """Random holders against a model that only remembers who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[tuple[int, bytes]] = []
        self.pool = BlockPool(8, lambda block, digest: self.evicted.append((block, digest)))
        self.held: list[list[int]] = []
        self.labels: dict[bytes, int] = {}

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        if count > self.pool.num_available:
            return
        blocks = self.pool.allocate(count)
        holders = {block for table in self.held for block in table}
        assert len(set(blocks)) == count
        assert not holders & set(blocks)
        self._forget(blocks)
        self.held.append(blocks)

    def _forget(self, blocks: list[int]) -> None:
        """What was in these blocks was told when it was evicted, each once, and cannot be found any more."""
        gone = {(block, name) for name, block in self.labels.items() if block in blocks}
        assert sorted(self.evicted) == sorted(gone)
        self.evicted.clear()
        self.labels = {name: block for name, block in self.labels.items() if block not in blocks}

    @rule(number=st.integers(0, 9))
    def admit(self, number: int) -> None:
        is_known, num_available = digest(number) in self.labels, self.pool.num_available
        block = self.pool.admit(digest(number))
        assert (block is None) == (is_known or num_available == 0)
        if block is not None:
            self._forget([block])
            self.labels[digest(number)] = block
            self.held.append([block])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: any(self.held))
    @rule(data=st.data(), number=st.integers(0, 5))
    def label(self, data: st.DataObject, number: int) -> None:
        block = data.draw(st.sampled_from([block for table in self.held for block in table]))
        if block not in self.labels.values():
            self.pool.label(block, digest(number))
            self.labels.setdefault(digest(number), block)

    @rule(number=st.integers(0, 5))
    def share(self, number: int) -> None:
        block = self.pool.find(digest(number))
        if block is not None:
            self.pool.share([block])
            self.held.append([block])

    @invariant()
    def agrees_with_model(self) -> None:
        self.pool.check_integrity()
        counts: dict[int, int] = {}
        for table in self.held:
            for block in table:
                counts[block] = counts.get(block, 0) + 1
        assert self.pool.ref_counts() == counts
        assert self.pool.num_available == 8 - len(counts)
        for number in range(6):
            assert self.pool.find(digest(number)) == self.labels.get(digest(number))


class TestPoolMachine(PoolMachine.TestCase):
    settings = settings(max_examples=60, stateful_step_count=40)


@pytest.mark.slow
class TestPoolMachineAtLength(PoolMachine.TestCase):
    settings = settings(max_examples=600, stateful_step_count=40)


def test_block_without_its_label_is_not_found_and_becomes_blank() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.label(blocks[0], b"a")
    pool.share([blocks[0]])
    pool.unlabel(blocks)
    assert pool.find(b"a") is None
    pool.check_integrity()
    pool.release(blocks)
    pool.release(blocks[:1])
    assert pool.find(b"a") is None
    assert pool.num_available == 3
    pool.check_integrity()
