"""The bound in bytes holds, whatever comes in; what was wanted most recently stays."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.cache.answer_memory import ENTRY_BYTES, AnswerMemory
from shared.messages import Delta

TOLD = [[Delta("", 0, 0, (5,), "told")]]


def test_least_recently_used_answer_makes_room() -> None:
    memory = AnswerMemory(3 * (ENTRY_BYTES + 10))
    for digest in (b"a", b"b", b"c"):
        memory.put(digest, digest * 10, 100.0)
    assert memory.get(b"a", 0.0) == b"a" * 10
    memory.put(b"d", b"d" * 10, 100.0)
    assert memory.get(b"b", 0.0) is None
    assert [memory.get(digest, 0.0) for digest in (b"a", b"c", b"d")] == [b"a" * 10, b"c" * 10, b"d" * 10]


def test_answer_ends_with_its_time() -> None:
    memory = AnswerMemory(10_000)
    memory.put(b"a", b"x", 10.0)
    memory.keep_told(b"a", TOLD, 100)
    assert (memory.get(b"a", 9.9), memory.told(b"a", 9.9)) == (b"x", TOLD)
    assert memory.get(b"a", 10.0) is None
    assert memory.num_bytes == 0


def test_answer_as_it_is_told_counts_and_goes_with_the_answer() -> None:
    memory = AnswerMemory(2 * (ENTRY_BYTES + 10) + 100)
    memory.put(b"a", b"a" * 10, 10.0)
    memory.put(b"b", b"b" * 10, 10.0)
    memory.keep_told(b"a", TOLD, 100)
    assert memory.num_bytes == 2 * (ENTRY_BYTES + 10) + 100
    memory.keep_told(b"a", [], 100)
    assert memory.told(b"a", 0.0) == TOLD
    # The least recently used one makes room; one that would not fit beside its value is not kept.
    memory.keep_told(b"b", TOLD, 50)
    assert [memory.get(digest, 0.0) for digest in (b"a", b"b")] == [None, b"b" * 10]
    memory.put(b"c", b"", 10.0)
    memory.keep_told(b"c", TOLD, 1000)
    memory.keep_told(b"nobody", TOLD, 1)
    assert (memory.told(b"c", 0.0), memory.told(b"nobody", 0.0)) == (None, None)


def test_without_bytes_nothing_is_kept() -> None:
    memory = AnswerMemory(0)
    memory.put(b"a", b"", 10.0)
    assert memory.get(b"a", 0.0) is None


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c", b"d", b"e"]), st.integers(0, 900), st.booleans())))
def test_count_of_bytes_is_right_and_bounded(actions: list[tuple[bytes, int, bool]]) -> None:
    memory = AnswerMemory(2000)
    kept: dict[bytes, int] = {}
    for digest, size, is_put in actions:
        if is_put:
            memory.put(digest, bytes(size), 10.0)
            kept[digest] = size
        else:
            memory.drop(digest)
        found = {name: memory.get(name, 0.0) for name in kept}
        sizes = [len(value) for value in found.values() if value is not None]
        assert memory.num_bytes == sum(sizes) + ENTRY_BYTES * len(sizes) <= 2000
