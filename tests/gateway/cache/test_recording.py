"""Deltas that are kept: counted, checked, and sent again as a cached answer."""

from __future__ import annotations

import pytest

from gateway.cache.recording import Recording, as_cached, is_complete, tokens_so_far
from gateway.errors import ApiError
from shared.messages import Delta, Finish, Usage
from tests.gateway.dispatch_bench import ListSink

END = Finish("stop", Usage(7, 3, 2, 1, 1))


def test_answer_is_complete_when_all_sequences_have_finished() -> None:
    kept: list[list[list[Delta]]] = []
    clients = [ListSink(), ListSink()]
    recording = Recording(clients, kept.append)
    first, second = [Delta("r", 0, 0, (1,), "a"), Delta("r", 0, 1, (), "", END)], [Delta("s", 0, 0, (2,), "b", END)]
    assert not recording.has_begun
    for sink, deltas in zip(recording.sinks, (first, second), strict=True):
        assert kept == []
        for delta in deltas:
            sink.deliver(delta)
    assert kept == [[first, second]]
    assert [client.text for client in clients] == ["a", "b"]


def test_answer_that_failed_is_not_complete() -> None:
    kept: list[list[list[Delta]]] = []
    client = ListSink()
    recording = Recording([client, ListSink()], kept.append)
    recording.sinks[0].fail(ApiError(503, "away"))
    assert (recording.has_begun, client.refusal) == (True, (503, None))
    recording.sinks[1].deliver(Delta("r", 0, 0, (1,), "a", END))
    assert kept == []


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
