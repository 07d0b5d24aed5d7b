"""What one key may hold of what all keys have in common."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.shares import Refusal, Shares


def test_key_alone_gets_the_multiple_of_what_it_leaves() -> None:
    shares = Shares(16, 7)
    assert [shares.take("a") for _ in range(15)] == [None] * 14 + [Refusal.KEY_HAS_ITS_SHARE]
    assert shares.take("b") is None


def test_two_greedy_keys_leave_a_place_for_a_third() -> None:
    shares = Shares(30, 1)
    for key in "ab":
        while shares.take(key) is None:
            pass
    assert (shares.held("a"), shares.held("b")) == (15, 7)
    assert shares.take("c") is None


def test_last_unit_goes_to_a_key_without_any_and_then_all_are_taken() -> None:
    shares = Shares(1, 1)
    assert shares.take("a") is None
    assert shares.take("b") is Refusal.ALL_TAKEN
    shares.give_back("a")
    assert shares.take("b") is None


@given(
    total=st.integers(1, 20),
    multiple=st.integers(1, 8),
    steps=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5), st.booleans())),
)
def test_counts_add_up_and_a_greedy_key_never_empties_what_is_free(
    total: int, multiple: int, steps: list[tuple[str, int, bool]]
) -> None:
    shares = Shares(total, multiple)
    held = dict.fromkeys("abc", 0)
    for key, num, is_taking in steps:
        if is_taking:
            before = held[key]
            if shares.take(key, num) is None:
                held[key] += num
                assert before == 0 or held[key] <= multiple * (total - sum(held.values()))
        else:
            num = min(num, held[key])
            shares.give_back(key, num)
            held[key] -= num
        assert [shares.held(name) for name in "abc"] == list(held.values())
        assert shares.used == sum(held.values()) <= total
