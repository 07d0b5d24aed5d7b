"""What one key may hold of what all keys have in common, and places that keys take in turn."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from gateway.shares import Refusal, Shares, Turns


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


async def test_keys_that_wait_take_turns_and_one_never_has_all_places() -> None:
    turns, served = Turns(3, 2), []

    async def ask(key: str, number: int) -> None:
        await turns.take(key)
        served.append(f"{key}{number}")

    asking = [asyncio.create_task(ask("a", number)) for number in range(5)]
    await asyncio.sleep(0)
    asking += [asyncio.create_task(ask("b", number)) for number in range(2)]
    for _ in range(2):
        await asyncio.sleep(0)
    assert served == ["a0", "a1", "b0"]
    for key in ("b", "a", "a", "b", "a"):
        turns.give_back(key)
        for _ in range(2):
            await asyncio.sleep(0)
    await asyncio.wait_for(asyncio.gather(*asking), 60)
    assert served == ["a0", "a1", "b0", "b1", "a2", "a3", "a4"]


async def test_turn_that_comes_as_its_caller_gives_up_is_free_again() -> None:
    turns = Turns(1, 1)
    await turns.take("t")
    waiting = asyncio.create_task(turns.take("t"))
    await asyncio.sleep(0)
    turns.give_back("t")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.wait_for(turns.take("other"), 60)
