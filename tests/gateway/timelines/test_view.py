"""What people see of a timeline follows from it, and nothing in it can run as a command."""

from __future__ import annotations

import json
import shlex
from typing import Any

import msgspec
import pytest

from gateway.timelines.view import view_of
from shared.receipt import PrefillPart, Receipt
from shared.timeline import Attempt, SequenceLife, Timeline

RECEIPT = Receipt(
    taken=1000.0,
    waited_s=0.2,
    admitted_s=0.1,
    scheduled_s=0.3,
    first_s=0.9,
    ended_s=2.0,
    device_s=0.8,
    prefill_s=0.3,
    rejected_s=0.05,
    prompt_tokens=40,
    cached_tokens=16,
    prefills=(PrefillPart(0.3, 0.2, 16), PrefillPart(0.6, 0.3, 8)),
    preempted_s=(0.5,),
)


def timeline(**fields: Any) -> Timeline:
    dead = Attempt(epoch=0, published_s=0.1, claimed_s=0.2, worker="w0", ended_s=1.0, end="worker_dead", tokens=3)
    times: dict[str, Any] = {"published_s": 1.0, "claimed_s": 1.6, "ended_s": 4.0}
    last = Attempt(epoch=1, why="worker_dead", worker="w1", end="stop", tokens=5, receipt=RECEIPT, **times)
    values: dict[str, Any] = {
        "route": "chat",
        "model": "m",
        "status": 200,
        "outcome": "completed",
        "admitted_s": 0.1,
        "first_token_s": 0.4,
        "ended_s": 4.1,
        "sequences": [SequenceLife("s", [dead, last])],
    }
    return Timeline(id="r", gateway="gw", began=0.0, **values | fields)


def test_bars_of_a_worker_end_when_its_last_delta_came_whatever_its_clock_says() -> None:
    request, dead, last = view_of(timeline(), None).rows
    assert [(bar.kind, bar.begin_s, bar.end_s) for bar in request.bars] == [
        ("gateway", 0.0, 0.1),
        ("wait", 0.1, 0.4),
        ("answer", 0.4, 4.1),
    ]
    assert [(bar.kind, bar.end_s) for bar in dead.bars] == [("queue", 0.2), ("worker", 1.0)]
    assert (dead.is_retry, last.is_retry) == (False, True)
    # Taken at 2.0, two seconds before its end; of the second before that it waited 0.2 s for its prefix.
    expected = [
        ("queue", 1.0, 1.8),
        ("prefix", 1.8, 2.0),
        ("read", 2.0, 2.1),
        ("wait", 2.1, 2.3),
        ("prefill", 2.3, 2.5),
        ("prefill", 2.6, 2.9),
        ("decode", 2.9, 4.0),
        ("preempted", 2.5, 2.6),
    ]
    assert [bar.kind for bar in last.bars] == [kind for kind, *_ in expected]
    for bar, (_, begin_s, end_s) in zip(last.bars, expected, strict=True):
        assert (bar.begin_s, bar.end_s) == (pytest.approx(begin_s), pytest.approx(end_s))


def test_events_say_in_order_why_there_was_another_attempt() -> None:
    events = view_of(timeline(), None).events
    assert [event.at_s for event in events] == sorted(event.at_s for event in events)
    texts = [event.text for event in events]
    assert "attempt 0 ended after 3 tokens: its worker died" in texts
    assert texts.index("attempt 1, because its worker died") < texts.index("claimed by w1") < texts.index("preempted")
    assert texts[-1] == "completed with status 200"


def test_first_token_comes_after_the_steps_that_made_it() -> None:
    receipt = Receipt(taken=0.0, scheduled_s=0.1, first_s=0.2, ended_s=1.0, prefills=(PrefillPart(0.1, 0.09, 5),))
    # The worker's last delta was longer on its way than its first.
    attempt = Attempt(epoch=0, published_s=0.1, claimed_s=0.15, worker="w", ended_s=1.5, end="stop", receipt=receipt)
    later = Attempt(epoch=0, published_s=0.1, claimed_s=0.15, worker="w", ended_s=2.5, end="stop", receipt=receipt)
    lives = [SequenceLife("s-0", [later]), SequenceLife("s-1", [attempt])]
    view = view_of(timeline(sequences=lives, first_token_s=0.4), None)
    at = {event.text: event.at_s for event in view.events}
    firsts = [at[f"sequence {number} first step, 0 of 0 prompt tokens from the cache"] for number in (0, 1)]
    assert firsts == [pytest.approx(1.6), pytest.approx(0.3)]
    assert at["sequence 1 prefilled 5 tokens"] <= at["first token"]


def test_pause_of_the_gateway_is_one_event_for_all_sequences() -> None:
    attempt = Attempt(epoch=0, published_s=0.1, ended_s=4.0, end="stop", pauses=((3.5, 3.0),))
    view = view_of(timeline(sequences=[SequenceLife("s-0", [attempt]), SequenceLife("s-1", [attempt])]), None)
    told = [(event.at_s, event.text) for event in view.events if "heard nothing" in event.text]
    assert told == [(3.5, "the gateway heard nothing for 3.00 s: it was paused, or NATS was silent")]


def test_pauses_beyond_the_listed_ones_are_counted_with_their_sum() -> None:
    attempt = Attempt(epoch=0, published_s=0.1, ended_s=60.0, pauses=((3.5, 3.0),), num_pauses=41, paused_s=18.3)
    view = view_of(timeline(sequences=[SequenceLife("s-0", [attempt]), SequenceLife("s-1", [attempt])]), None)
    told = [event.text for event in view.events if "heard nothing" in event.text]
    assert told[:1] == ["the gateway heard nothing 41 times, for 18.30 s together; listed are the longest of them"]


def test_claim_that_is_told_late_comes_before_the_first_step() -> None:
    receipt = Receipt(taken=0.0, scheduled_s=0.01, first_s=0.05, ended_s=0.2, prefills=(PrefillPart(0.01, 0.04, 5),))
    attempt = Attempt(epoch=0, published_s=0.1, claimed_s=0.2, worker="w", ended_s=0.3, end="stop", receipt=receipt)
    # Publishing returned only when the worker had begun.
    times = {"admitted_s": 0.15, "first_token_s": 0.16, "ended_s": 0.3}
    view = view_of(timeline(sequences=[SequenceLife("s", [attempt])], **times), None)
    assert [(bar.begin_s, bar.end_s) for bar in view.rows[0].bars[:2]] == [(0.0, 0.1), (0.1, 0.16)]
    assert [event.text.split(",")[0] for event in view.events] == [
        "the request came to gw",
        "admitted",
        "claimed by w",
        "first step",
        "prefilled 5 tokens",
        "first token",
        "attempt 0 ended after 0 tokens: stop",
        "completed with status 200",
    ]


def test_receipt_adds_up_attempts_prices_them_and_says_what_is_missing() -> None:
    receipt = view_of(timeline(prompt_tokens=40, completion_tokens=8), 3.6).receipt
    assert (receipt.device_ms, receipt.prefill_ms, receipt.decode_ms) == pytest.approx((800, 300, 500))
    assert receipt.cost == pytest.approx(0.8 / 1000)
    assert (receipt.is_complete, receipt.energy_j, receipt.retries_ms) == (False, None, 0.0)
    assert view_of(timeline(), None).receipt.cost is None


@pytest.mark.parametrize(("end", "lost_ms"), [("worker_dead", 800), ("prefilled", 0)])
def test_planned_handover_is_no_lost_attempt(end: str, lost_ms: float) -> None:
    first = Attempt(epoch=0, worker="w0", end=end, receipt=RECEIPT, ended_s=1.0)
    last = Attempt(epoch=1, why=end, worker="w1", end="stop", receipt=RECEIPT, ended_s=4.0)
    receipt = view_of(timeline(sequences=[SequenceLife("s", [first, last])]), None).receipt
    assert (receipt.device_ms, receipt.retries_ms) == pytest.approx((1600, lost_ms))


def test_request_without_usage_counts_the_tokens_that_its_attempts_delivered() -> None:
    left = timeline(outcome="disconnected")
    assert view_of(left, None).receipt.completion_tokens == 3 + 5
    assert view_of(timeline(completion_tokens=7), None).receipt.completion_tokens == 7


def test_receipts_of_attempts_have_named_fields_in_json() -> None:
    told = json.loads(msgspec.json.encode(view_of(timeline(), None)))["timeline"]
    dead, last = told["sequences"][0]["attempts"]
    assert "receipt" not in dead
    receipt = last["receipt"]
    assert (receipt["device_s"], receipt["energy_j"], receipt["preempted_s"]) == (0.8, None, [0.5])
    assert receipt["prefills"][1] == {"at_s": 0.6, "took_s": 0.3, "tokens": 8}
    assert (told["id"], last["worker"]) == ("r", "w1")


@pytest.mark.parametrize(
    "prompt", ["'; rm -rf / #", '`x` $(y) "z"', "a\nb\\'c", "<script>alert(1)</script>", "ü 🙂", "\u202eabc"]
)
def test_command_passes_the_text_on_as_it_is(prompt: str) -> None:
    curl = view_of(timeline(prompt=prompt, asked={"max_tokens": 7}), None).curl
    assert curl is not None
    # Marks of direction are escaped: they would show another command than the one that is copied.
    assert curl.isascii()
    words = shlex.split(curl)
    body = json.loads(words[words.index("-d") + 1])
    assert body == {"model": "m", "max_tokens": 7, "messages": [{"role": "user", "content": prompt}]}


def test_hidden_prompt_is_not_in_the_command() -> None:
    curl = view_of(timeline(route="completion"), None).curl
    assert curl is not None
    assert '"prompt": "<prompt>"' in curl
    assert view_of(timeline(route="embedding"), None).curl is None


def test_refused_request_shows_its_admission_and_why() -> None:
    told = {"status": 503, "outcome": "refused", "error": "overloaded: x"}
    refused = timeline(admitted_s=None, first_token_s=None, sequences=[], **told)
    view = view_of(refused, None)
    assert [bar.kind for row in view.rows for bar in row.bars] == ["gateway"]
    assert view.events[-1].text == "refused with status 503: overloaded: x"
