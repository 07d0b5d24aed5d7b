"""Deltas that are kept: joined, counted, checked, and sent again as a cached answer."""

from __future__ import annotations

import pytest

from gateway.cache.recording import as_cached, is_complete, merge, tokens_so_far
from shared.messages import Delta, Finish, TokenLogprob, Usage

ENTRY = TokenLogprob(1, "a", b"a", -0.5)
END = Finish("stop", Usage(7, 3, 2, 1, 1))


def test_joined_deltas_are_one_with_all_that_they_had() -> None:
    first = Delta("r", 1, 0, (1,), "a", None, (ENTRY,), None, 7, True, None)
    second = Delta("r", 1, 1, (), "", None, None, (None, ENTRY), None, False, (5, 6))
    last = Delta("r", 1, 1, (2, 3), "bc", END, (ENTRY, ENTRY))
    assert merge([first, second, last]) == Delta(
        "r", 1, 0, (1, 2, 3), "abc", END, (ENTRY, ENTRY, ENTRY), (None, ENTRY), 7, True, (5, 6)
    )
    assert merge([first]) is first


def test_joined_deltas_without_details_have_none() -> None:
    joined = merge([Delta("r", 0, 0, (1,), "a"), Delta("r", 0, 1, (2,), "b")])
    assert joined == Delta("r", 0, 0, (1, 2), "ab")


def test_tokens_are_those_of_the_prompt_once_and_all_that_came() -> None:
    assert tokens_so_far([]) == (0, 0)
    assert tokens_so_far([Delta("r", 0, 0, (1,)), Delta("r", 0, 1, (2, 3))]) == (0, 3)
    deltas = [Delta("r", 0, 0), Delta("r", 0, 0, (1,), prompt_tokens=7), Delta("r", 1, 1, (2,), prompt_tokens=9)]
    assert tokens_so_far(deltas) == (7, 2)
    assert tokens_so_far([Delta("r", 0, 0, (1,), prompt_tokens=0), Delta("r", 0, 1, (), prompt_tokens=9)]) == (0, 1)


@pytest.mark.parametrize(
    ("deltas", "is_whole"),
    [
        ([], False),
        ([Delta("r", 0, 0, (1,), "a", END)], True),
        ([Delta("r", 0, 0, (1, 2)), Delta("r", 0, 2, (3,)), Delta("r", 0, 3, (), "", END)], True),
        ([Delta("r", 0, 0, (1, 2)), Delta("r", 0, 2, (3,))], False),
        ([Delta("r", 0, 1, (1,), "a", END)], False),
        ([Delta("r", 0, 0, (1, 2)), Delta("r", 0, 1, (3,), "", END)], False),
        ([Delta("r", 0, 0, (1, 2)), Delta("r", 0, 3, (3,), "", END)], False),
        ([Delta("r", 0, 0, (1,), "", END), Delta("r", 0, 1, (3,), "", END)], False),
        ([Delta("r", 0, 0, (1,), "", END), Delta("r", 0, 1, (3,))], False),
    ],
)
def test_sequence_is_whole_from_its_first_token_to_its_end(deltas: list[Delta], is_whole: bool) -> None:
    assert is_complete(deltas) is is_whole


def test_cached_answer_was_all_cached_and_drafted_nothing() -> None:
    told = as_cached(Delta("r", 0, 0, (1,), "a", END))
    assert told.finish == Finish("stop", Usage(7, 3, 7))
    assert (told.text, told.token_ids) == ("a", (1,))
    for delta in (Delta("r", 0, 0, (1,), "a"), Delta("r", 0, 0, (), "", Finish("stop"))):
        assert as_cached(delta) is delta
