"""Which adapters stay in memory: few enough, the least recently used go, and none that is in use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.adapters.slots import AdapterSlots

NAMES = [letter * 64 for letter in "abcdef"]


def _slots(num_slots: int, max_bytes: int = 100, **sizes: int) -> AdapterSlots:
    slots = AdapterSlots(num_slots, max_bytes)
    for name, num_bytes in sizes.items():
        slot = slots.take(num_bytes, ())
        assert slot is not None
        slots.add(name, slot)
    return slots


def test_least_recently_used_goes() -> None:
    slots = _slots(2, a=1, b=1)
    slots.use("a")
    slot = slots.take(1, ())
    assert slot is not None
    assert (slots.residents, slots.slot("a"), slot) == (("a",), 0, 1)


def test_adapter_in_use_is_never_taken_out() -> None:
    slots = _slots(2, a=1, b=1)
    assert slots.take(1, {"a"}) == 1
    assert slots.residents == ("a",)
    # The other slot is taken for what is being placed.
    assert slots.take(1, {"a"}) is None
    assert slots.residents == ("a",)


def test_adapter_too_large_beside_those_in_use_takes_none_out() -> None:
    slots = _slots(4, 10, a=6, b=3)
    assert slots.take(5, {"a"}) is None
    assert slots.residents == ("a", "b")


def test_slot_whose_adapter_was_not_placed_is_free_again() -> None:
    slots = _slots(1)
    slot = slots.take(100, ())
    assert slot == 0
    slots.release(slot)
    assert (slots.num_bytes, slots.take(100, ())) == (0, 0)


@given(
    st.integers(1, 4), st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 60), st.sets(st.sampled_from(NAMES))))
)
def test_slots_and_bytes_are_bounded_whatever_comes(num_slots: int, wanted: list[tuple[str, int, set[str]]]) -> None:
    slots = AdapterSlots(num_slots, 100)
    for name, num_bytes, used in wanted:
        before = set(slots.residents)
        if slots.slot(name) is not None:
            slots.use(name)
            continue
        slot = slots.take(num_bytes, used)
        assert before & used <= set(slots.residents)
        if slot is not None:
            slots.add(name, slot)
        places = [slots.slot(each) for each in slots.residents]
        assert len(set(places)) == len(places) <= num_slots
        assert slots.num_bytes <= 100
