"""The judge of a scenario: each way in which an answer can be wrong is seen, and what a worker could have made."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from ops.chaos.ledger import Choice, Entry, Ledger, Reference, Verdict
from ops.chaos.outcome import Outcome
from ops.chaos.scenarios.clients import Goodput, possible_per_s, tokens_within
from ops.chaos.system import Seen
from tests.gateway.fleet.test_fleet import BEAT

EXPECTED = Reference(("ab",), (("a", "b"),), ("length",), 2)


def _entry(**changes: Any) -> Entry:
    choice = Choice(["a", "b"], ["a", "b"], ["length"])
    entry = Entry(0, "gateway-0", 1.0, status=200, choices={0: choice}, completion_tokens=2, num_done=1, ended_at=2.0)
    return dataclasses.replace(entry, **changes)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, Verdict.OK),
        ({"is_aborted": True, "ended_at": None}, Verdict.ABORTED),
        ({"is_aborted": True, "status": 503}, Verdict.ABORTED),
        ({"status": 503, "retry_after_s": 1.0}, Verdict.REFUSED),
        ({"status": 429, "retry_after_s": 1.0}, Verdict.REFUSED),
        ({"status": 503}, Verdict.REFUSED_BADLY),
        ({"ended_at": None}, Verdict.UNFINISHED),
        ({"is_cut": True}, Verdict.BROKEN_OFF),
        ({"is_cut": True, "status": None}, Verdict.UNREACHABLE),
        ({"is_cut": True, "status": None, "error": "reset"}, Verdict.BROKEN_OFF),
        ({"is_cut": True, "is_gateway_killed": True}, Verdict.LOST_WITH_GATEWAY),
        ({"error": "lost"}, Verdict.FAILED),
        ({"status": 500}, Verdict.FAILED),
        ({"num_done": 2}, Verdict.WRONG_ENDS),
        ({"num_done": 0}, Verdict.WRONG_ENDS),
        ({"choices": {0: Choice(["ab"], ["a", "b"], ["length", "length"])}}, Verdict.WRONG_ENDS),
        ({"choices": {0: Choice(["ab"], ["a", "b"], [])}}, Verdict.WRONG_ENDS),
        ({"choices": {0: Choice(["abb"], ["a", "b"], ["length"])}}, Verdict.WRONG_TEXT),
        ({"choices": {0: Choice(["ab"], ["ab"], ["length"])}}, Verdict.WRONG_TEXT),
        ({"choices": {0: Choice(["ab"], ["a", "b"], ["stop"])}}, Verdict.WRONG_TEXT),
        ({"completion_tokens": 3}, Verdict.WRONG_TEXT),
        ({"choices": {}}, Verdict.WRONG_TEXT),
    ],
)
def test_each_outcome_of_a_request_has_its_verdict(changes: dict[str, Any], verdict: Verdict) -> None:
    assert _entry(**changes).judge(EXPECTED) is verdict


def test_silence_counts_the_wait_for_the_first_output_and_for_the_end() -> None:
    entry = Entry(0, "gateway-0", 1.0)
    entry.note_output(3.0)
    entry.note_output(3.5)
    assert entry.longest_silence == 2.0
    entry.end(7.5)
    assert entry.longest_silence == 4.0
    entry.end(20.0)
    assert (entry.first_at, entry.last_at, entry.ended_at, entry.longest_silence) == (3.0, 3.5, 7.5, 4.0)


def test_answer_is_compared_choice_by_choice_with_that_to_the_same_body() -> None:
    choices = {index: Choice([text], [text], ["stop"]) for index, text in ((1, "b"), (0, "a"))}
    ledger = Ledger()
    ledger.references = {0: EXPECTED, 1: Reference(("a", "b"), (("a",), ("b",)), ("stop", "stop"), 2)}
    ledger.entries = [_entry(), _entry(variant=1, choices=choices), _entry(variant=1), _entry(is_cut=True)]
    assert ledger.verdicts() == {Verdict.OK: 2, Verdict.WRONG_TEXT: 1, Verdict.BROKEN_OFF: 1}
    assert ledger.broken() == ledger.entries[2:]


@pytest.mark.parametrize(
    ("outputs", "after_s"),
    [
        ((4.5, 6.25, 6.3), 0.25),  # over the end of the span
        ((4.5, 5.5, 5.6), 0.0),  # mended for this stream before the span ended
        ((4.5, 4.6, 8.0), 2.0),  # over the whole span
        ((3.0, 4.8, 4.9), 0.0),  # before it
        ((4.9, 5.9, 6.1, 9.0), 0.0),  # behind it
    ],
)
def test_only_the_part_of_a_silence_behind_its_span_counts_as_recovery(
    outputs: tuple[float, ...], after_s: float
) -> None:
    entry = Entry(0, "gateway-0", outputs[0])
    for now in outputs[1:]:
        entry.note_output(now)
    assert entry.silent_after_s(5.0, 6.0) == pytest.approx(after_s)


def test_only_streams_open_during_a_fault_count_for_its_silences() -> None:
    ledger = Ledger()
    ledger.entries = [
        _entry(sent_at=1.0, ended_at=9.0),
        _entry(sent_at=1.0, ended_at=1.5),
        _entry(sent_at=8.5, ended_at=9.0),
        _entry(sent_at=5.5, ended_at=9.0, is_stream=False),
        _entry(sent_at=5.5, ended_at=9.0, status=503),
        _entry(sent_at=7.5, ended_at=9.0),
    ]
    assert ledger.during([(5.0, 6.0)]) == [ledger.entries[0], ledger.entries[-1]]


def test_wrong_texts_are_counted_apart_from_failures() -> None:
    ledger = Ledger()
    ledger.references = {0: EXPECTED}
    ledger.entries = [_entry(), _entry(completion_tokens=3), _entry(completion_tokens=3), _entry(is_cut=True)]
    outcome = Outcome("", "")
    outcome.count(ledger, [])
    assert (outcome.num_requests, outcome.num_wrong, outcome.num_failed) == (4, 2, 1)


def test_recovery_begins_when_the_last_of_several_faults_is_mended() -> None:
    ledger = Ledger()
    ledger.entries = [_entry(sent_at=1.0, ended_at=13.0), _entry(sent_at=1.0, ended_at=13.0)]
    for entry, silence in zip(ledger.entries, ((4.0, 8.5), (9.9, 11.75)), strict=True):
        entry.longest_silence, entry.silence_ended_at = silence[1] - silence[0], silence[1]
    outcome = Outcome("", "")
    outcome.count(ledger, [(6.5, 8.0), (5.0, 6.0), (5.5, 5.6), (10.0, 11.0)])
    assert outcome.recoveries_s == [pytest.approx(0.5), pytest.approx(0.75)]


def heartbeats(*steps_and_running: tuple[int, int]) -> list[Seen]:
    return [
        Seen(msgspec.structs.replace(BEAT, step=step, running=running), 100.0 + 0.2 * number)
        for number, (step, running) in enumerate(steps_and_running)
    ]


def test_possible_rate_is_of_full_steps_in_all_of_the_time() -> None:
    assert possible_per_s(heartbeats((0, 8), (20, 8), (40, 8)), 8) == pytest.approx(800)
    assert possible_per_s(heartbeats((0, 4), (20, 4), (40, 4)), 8) == pytest.approx(800)
    # A slow machine could do less.
    assert possible_per_s(heartbeats((0, 8), (10, 8), (20, 8)), 8) == pytest.approx(400)
    # No work in half of the time: what it did in the other half it could have done in this one too.
    assert possible_per_s(heartbeats((0, 8), (10, 0), (10, 0), (30, 8)), 8) == pytest.approx(8 * 30 / 0.6 / 0.5)


def test_share_is_that_of_the_possible() -> None:
    assert Goodput(380.0, 400.0).share == pytest.approx(0.95)
    assert possible_per_s(heartbeats((0, 0), (0, 0)), 8) == 0.0


def test_tokens_count_where_they_came_and_not_where_their_answer_ended() -> None:
    ledger = Ledger()
    for first_at, finish in ((8.0, "length"), (9.5, "length"), (11.5, "length"), (13.0, "length"), (10.0, "")):
        entry = Entry(0, "gateway-0", first_at, status=200, first_at=first_at, last_at=first_at + 1.0, num_done=1)
        entry.completion_tokens, entry.ended_at = 40, first_at + 1.0
        entry.choices[0] = Choice(finishes=[finish] if finish else [])
        ledger.entries.append(entry)
    # It ended without a token and without usage.
    ledger.entries.append(Entry(0, "gateway-0", 10.0, status=200, num_done=1, ended_at=11.0))
    # Half of the second and half of the third; the last one is no right answer.
    assert tokens_within(ledger, 10.0, 12.0) == pytest.approx(40.0)
