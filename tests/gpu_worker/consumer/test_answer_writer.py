"""What an answer says does not depend on how many tokens each step brought, as drafts let it vary.

Lines and spans of requests at the worker.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.consumer.answer import AnswerWriter, PooledAnswers, _timing, ending, refused_end
from gpu_worker.consumer.gpu_monitor import _power
from gpu_worker.consumer.held_request import HeldRequest
from gpu_worker.consumer.queued_message import QueuedMessage
from gpu_worker.consumer.request_observer import ReceiptWriter, RequestObserver
from gpu_worker.consumer.request_reader import RequestReader
from gpu_worker.core.block_budget import BlockBudget, BlockScores
from gpu_worker.core.model_runner import InvalidLogitsError
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import LogprobEntry, SequenceEvent
from gpu_worker.text.model_directory import read_model_directory
from shared.grammar import GRAMMAR_PARAM, Grammar
from shared.kv_budget import EvictedBlocks
from shared.messages import Delta, Finish, FinishReason, Lane, Request, Usage
from shared.receipt import Timing
from shared.request_log import SLOW_S, RequestLog
from shared.sampling import Sampling
from shared.worker_metrics import GpuReading
from tests.gpu_worker.consumer.harness import BUDGETS, DEMO_MODEL, TASKS, TOKENIZER
from tests.gpu_worker.core.sequences import make_sequence

MESSAGE = QueuedMessage("subject", b"", "ack", 1, 1, 0)
POOLED = PooledAnswers(TASKS)
READER = RequestReader("m", read_model_directory(DEMO_MODEL), 2048, TOKENIZER, POOLED, BUDGETS)
PROMPT = "x = é"

GRAMMAR = Grammar(kind="regex", source="a+")
NO_TOKEN = str(InvalidLogitsError())


def held_request(sampling: Sampling, emitted: list[int], *, echo: bool) -> tuple[HeldRequest, Sequence]:
    request = Request(id="r", model="m", text=PROMPT, sampling=sampling, emitted=tuple(emitted), echo=echo)
    prompt_ids = TOKENIZER.encode_text(PROMPT)
    sequence = READER.sequence(request, "r.1", prompt_ids, [])
    held = HeldRequest("r", request, MESSAGE, sequence, READER.output(request, prompt_ids))
    held.prelude = READER.prelude(request, prompt_ids)
    return held, sequence


def written(
    sampling: Sampling, token_ids: list[int], sizes: list[int], num_emitted: int, reason: FinishReason, *, echo: bool
) -> list[Delta]:
    """Write the answer of a sequence whose steps brought `sizes` tokens, until it has ended."""
    held, sequence = held_request(sampling, token_ids[:num_emitted], echo=echo)
    writer, deltas, place = AnswerWriter(TOKENIZER, POOLED), list[Delta](), num_emitted
    while not deltas or deltas[-1].finish is None:
        size = sizes[len(deltas) % len(sizes)]
        new = tuple(token_ids[place : place + size])
        entries = () if sampling.logprobs is None else tuple(LogprobEntry(token_id, -1.0) for token_id in new)
        finish = reason if place + size >= len(token_ids) else None
        deltas.append(writer.delta(held, SequenceEvent(sequence, new, place, finish, entries)))
        place += size
    return deltas


def summed(deltas: list[Delta]) -> tuple[object, ...]:
    entries = [entry.token_id for delta in deltas for entry in delta.logprobs or ()]
    token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    finish = deltas[-1].finish
    assert finish is not None
    # A receipt tells times.
    return "".join(delta.text for delta in deltas), token_ids, entries, msgspec.structs.replace(finish, receipt=None)


@settings(max_examples=300)
@given(data=st.data(), token_ids=st.lists(st.integers(0, 400), min_size=1, max_size=40))
def test_answer_is_the_same_however_its_tokens_are_grouped(data: st.DataObject, token_ids: list[int]) -> None:
    text = TOKENIZER.decode(token_ids)
    start = data.draw(st.integers(0, max(0, len(text) - 1)))
    stops = data.draw(st.sampled_from([(), ("\n\n", text[start : start + 3] or "x")]))
    sampling = Sampling(stop=stops, logprobs=data.draw(st.sampled_from([None, 0])))
    sizes = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=6))
    reason = data.draw(st.sampled_from(["stop", "length"]))
    echo = data.draw(st.booleans())
    alone = written(sampling, token_ids, [1], 0, reason, echo=echo)
    assert summed(written(sampling, token_ids, sizes, 0, reason, echo=echo)) == summed(alone)
    # An answer goes on where it had not ended.
    num_emitted = data.draw(st.integers(0, len(alone) - 1))
    rest = written(sampling, token_ids, sizes, num_emitted, reason, echo=False)
    assert summed(rest) == summed(written(sampling, token_ids, [1], num_emitted, reason, echo=False))
    assert summed(rest)[1:] == summed(alone[num_emitted:])[1:]
    assert rest[0].seq == num_emitted
    if num_emitted or not echo:
        assert summed(rest)[0] == summed(alone[num_emitted:])[0]


def test_drafts_behind_a_stop_string_do_not_count_as_accepted() -> None:
    token_ids = TOKENIZER.encode_text("one two three four five six")
    held, sequence = held_request(Sampling(stop=("two",)), [], echo=False)
    sequence.num_drafted_tokens, sequence.num_accepted_tokens = len(token_ids) + 2, len(token_ids) - 1
    finish = AnswerWriter(TOKENIZER, POOLED).delta(held, SequenceEvent(sequence, tuple(token_ids), 0)).finish
    assert finish is not None
    assert finish.usage is not None
    usage = finish.usage
    assert usage.accepted_prediction_tokens <= usage.completion_tokens < len(token_ids) - 1
    assert usage.accepted_prediction_tokens + usage.rejected_prediction_tokens == len(token_ids) + 2


def test_evictions_are_told_with_the_first_tokens_that_did_not_see_what_left() -> None:
    """Those of earlier attempts too: the gateway may not have heard of all."""
    held, sequence = held_request(Sampling(), [], echo=False)
    sequence.budget = BlockBudget(8, 1, 1, 16, "heavy_hitters", 4)
    sequence.scores = scores = BlockScores(sequence.budget, (3,))
    writer, told = AnswerWriter(TOKENIZER, POOLED), []
    for place, new in enumerate([[], [(1,), (2,)], [], [(3,)]]):
        for evicted in new:
            scores.evict(len(scores.decisions), evicted)
        finish: FinishReason | None = "length" if place == 3 else None
        sequence.token_ids.append(40)
        told.append(writer.delta(held, SequenceEvent(sequence, (40,), place, finish)))
    places = [(3,), (1, 2), None, (3,)]
    assert [delta.evicted and delta.evicted.places for delta in told] == places
    assert held.evicted == EvictedBlocks(16, (3, 1, 2, 3))
    assert [delta.evicted.first for delta in told if delta.evicted] == [0, 1, 3]


def test_end_names_the_stop_that_ended_the_text() -> None:
    token_ids = TOKENIZER.encode_text("one two three")
    ends: list[tuple[Sampling, FinishReason | None, str | int | None]] = [
        (Sampling(stop=("three", "two")), None, "two"),
        (Sampling(stop_token_ids=(token_ids[-1],)), "stop", token_ids[-1]),
        (Sampling(stop=("four",)), "stop", None),
        (Sampling(stop=("four",)), "length", None),
    ]
    for sampling, reason, stop in ends:
        held, sequence = held_request(sampling, [], echo=False)
        event = SequenceEvent(sequence, tuple(token_ids), 0, reason)
        finish = AnswerWriter(TOKENIZER, POOLED).delta(held, event).finish
        assert finish is not None
        assert finish.stop == stop


def test_end_that_is_no_output_is_what_became_of_the_request() -> None:
    held, _ = held_request(Sampling(), [5, 6], echo=False)
    delta = ending(held, Finish("handoff"))
    assert (held.outcome, delta.seq, delta.finish, delta.token_ids) == ("handoff", 2, Finish("handoff"), ())


def test_time_is_told_from_the_first_step_over_the_first_output_to_the_end() -> None:
    held, sequence = held_request(Sampling(), [], echo=False)
    now = time.monotonic()
    assert _timing(held) is None
    for first_output_at, times in ((None, (7, 0)), (now - 4, (3, 4))):
        sequence.scheduled_at, held.first_output_at = now - 7, first_output_at
        timing = _timing(held)
        assert timing is not None
        assert (timing.prefill_s, timing.decode_s) == pytest.approx(times, abs=0.5)


def end_of(sampling: Sampling, error: str) -> tuple[str | None, str] | None:
    _, sequence = held_request(Sampling(), [], echo=False)
    refused = refused_end(SequenceEvent(sequence, (), 0, "failed", error=error), sampling)
    return None if refused is None else (refused.param, str(refused))


@pytest.mark.parametrize(
    ("sampling", "param", "others"),
    [
        (Sampling(allowed_token_ids=(5,), grammar=GRAMMAR), "allowed_token_ids", "the grammar of the answer"),
        (Sampling(allowed_token_ids=(5,), bad_words=("a b",)), "allowed_token_ids", "bad_words"),
        (Sampling(bad_words=("a",), grammar=GRAMMAR), "bad_words", "the grammar of the answer"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "InvalidLogitsError: "])
def test_parameters_that_leave_no_token_together_are_the_clients_fault(
    sampling: Sampling, param: str, others: str, prefix: str
) -> None:
    message = f"{param}: together with {others} it leaves no token here. Loosen one of them."
    assert end_of(sampling, prefix + NO_TOKEN) == (param, message)


@pytest.mark.parametrize(("error", "param"), [("it takes too long", GRAMMAR_PARAM), ("the device is gone", None)])
def test_only_what_the_grammar_fails_for_is_told_as_its_fault(error: str, param: str | None) -> None:
    _, sequence = held_request(Sampling(), [], echo=False)
    constraint: Any = SimpleNamespace(is_at_fault=True, error="it takes too long")
    sequence.constraint = constraint
    refused = refused_end(SequenceEvent(sequence, (), 0, "failed", error=error), Sampling(grammar=GRAMMAR))
    assert (None if refused is None else refused.param) == param


@pytest.mark.parametrize(
    ("sampling", "error"),
    [
        (Sampling(), NO_TOKEN),
        (Sampling(grammar=GRAMMAR), NO_TOKEN),
        (Sampling(allowed_token_ids=(5,), grammar=GRAMMAR), "the device is gone"),
    ],
)
def test_other_failures_are_the_workers(sampling: Sampling, error: str) -> None:
    assert end_of(sampling, error) is None


OBSERVER_MESSAGE = QueuedMessage("s", b"", "ack", 1, 1, 0)


class Told(RequestLog):
    """Keeps lines and spans."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.kinds: list[str] = []
        self.spans: dict[str, tuple[float, float, dict[str, Any], str | None]] = {}

    def write(self, message: str, fields: Any, kind: Any = "request") -> None:
        self.kinds.append(kind)
        self.lines.append(dict(fields()))

    def add(
        self, name: str, parent: str, began: float, ended: float, attributes: Any, error: str | None = None
    ) -> None:
        assert parent == "parent"
        self.spans[name] = (began, ended, dict(attributes), error)


def removed(traceparent: str | None = "parent", *, has_run: bool, outcome: str, has_output: bool = True) -> Told:
    """Tell of a request that came 10 s ago after 2 s on its way, began to run 7 s ago and to answer 4 s ago."""
    told, now = Told(), time.monotonic()
    request = Request(id="r", model="m", tenant="t", epoch=3, trace="req_1", traceparent=traceparent)
    held = HeldRequest("r", request, OBSERVER_MESSAGE, outcome=outcome, taken_at=now - 10, queued_s=2.0)
    if has_run:
        held.sequence = Sequence("r.1", [1, 2, 3, 4, 5], 3, Sampling(), 9, num_cached_tokens=2, num_preemptions=1)
        held.sequence.scheduled_at = now - 7
        held.first_output_at = now - 4 if has_output else None
    RequestObserver(told, "w", told).removed(held)  # type: ignore[arg-type]
    return told


def test_line_says_what_ran_and_for_how_long() -> None:
    [line] = removed(has_run=True, outcome="stop").lines
    times = {name: line.pop(name) for name in ("held_s", "waited_s", "prefill_s", "decode_s")}
    assert times == pytest.approx({"held_s": 10, "waited_s": 3, "prefill_s": 3, "decode_s": 4}, abs=0.5)
    assert line == {
        "request_id": "req_1", "id": "r", "epoch": 3, "lane": "interactive", "tenant": "t", "outcome": "stop",
        "prompt_tokens": 3, "cached_tokens": 2, "completion_tokens": 2,
    }  # fmt: skip


def test_spans_follow_each_other_from_the_queue_to_the_last_token() -> None:
    spans = removed(has_run=True, outcome="length").spans
    assert list(spans) == ["queue", "prefill", "decode"]
    assert [ended - began for began, ended, _, _ in spans.values()] == pytest.approx([5, 3, 4], abs=0.5)
    assert spans["queue"][1] == spans["prefill"][0]
    assert spans["prefill"][1] == spans["decode"][0]
    names = {
        "gen_ai.request.model": "m", "headrace.request_id": "req_1", "headrace.sequence_id": "r",
        "headrace.worker": "w", "headrace.epoch": 3, "headrace.lane": "interactive",
    }  # fmt: skip
    assert [attributes for _, _, attributes, _ in spans.values()] == [
        names,
        names | {"gen_ai.usage.input_tokens": 3, "headrace.cached_tokens": 2},
        names | {
            "gen_ai.usage.output_tokens": 2, "gen_ai.response.finish_reasons": ["length"], "headrace.preemptions": 1,
        },
    ]  # fmt: skip
    assert {error for *_, error in spans.values()} == {None}


@pytest.mark.parametrize(
    ("has_run", "has_output", "names"),
    [(False, False, ["queue"]), (True, False, ["queue", "prefill"]), (True, True, ["queue", "prefill", "decode"])],
)
def test_failure_is_told_by_the_last_span(has_run: bool, has_output: bool, names: list[str]) -> None:
    spans = removed(has_run=has_run, has_output=has_output, outcome="failed").spans
    assert list(spans) == names
    assert [error is not None for *_, error in spans.values()] == [name == names[-1] for name in names]


def test_request_without_a_parent_has_a_line_and_no_spans() -> None:
    told = removed(traceparent=None, has_run=True, outcome="stop")
    assert (len(told.lines), told.spans) == (1, {})


@pytest.mark.parametrize(
    ("lane", "outcome", "held_s", "kind"),
    [
        ("interactive", "stop", 1.0, "request"),
        ("interactive", "stop", SLOW_S, "problem"),
        ("interactive", "failed", 1.0, "problem"),
        ("batch", "stop", SLOW_S, "batch"),
        ("batch", "expired", 1.0, "problem"),
    ],
)
def test_jobs_and_requests_that_failed_or_were_slow_have_lines_of_their_own(
    lane: Lane, outcome: str, held_s: float, kind: str
) -> None:
    told = Told()
    request = Request(id="r", model="m", lane=lane)
    held = HeldRequest(
        "r", request, OBSERVER_MESSAGE, outcome=outcome, taken_at=time.monotonic() - held_s, queued_s=0.0
    )
    RequestObserver(told, "w", None).removed(held)
    assert told.kinds == [kind]


def held_for(seconds: float) -> HeldRequest:
    now = time.monotonic()
    message = QueuedMessage("s", b"", "ack", 1, 1, 0, came_at=now - seconds - 2)
    return HeldRequest("r", Request(id="r", model="m"), message, taken_at=now - seconds, queued_s=7.0)


def test_times_are_since_the_request_was_taken_and_devices_are_counted() -> None:
    held = held_for(10.0)
    held.sequence = sequence = make_sequence(5)
    held.admitted_at, sequence.scheduled_at, held.first_output_at = (held.taken_at + each for each in (1, 2, 4))
    sequence.num_cached_tokens, sequence.num_drafted_tokens, sequence.num_accepted_tokens = 3, 9, 7
    record = sequence.record
    record.device_s, record.rejected_s = 0.5, 0.1
    record.prefill(0, 5, 0.2, held.taken_at + 2, held.taken_at + 3)
    record.preempt(5, held.taken_at + 5)
    receipt = ReceiptWriter(4, lambda: 300.0).receipt(held, 6)
    assert receipt.taken == pytest.approx(time.time() - 10, abs=2)
    times = (receipt.queued_s, receipt.waited_s, receipt.admitted_s, receipt.scheduled_s, receipt.first_s)
    assert times == pytest.approx((7, 2, 1, 2, 4))
    assert 10 <= receipt.ended_s < 12
    shares = (receipt.device_s, receipt.prefill_s, receipt.rejected_s, receipt.energy_j)
    assert shares == pytest.approx((2.0, 0.8, 0.4, 600.0))
    assert (receipt.cached_tokens, receipt.drafted_tokens, receipt.accepted_tokens) == (3, 9, 6)
    (part,) = receipt.prefills
    assert (part.at_s, part.took_s, part.tokens) == (pytest.approx(2), pytest.approx(1), 5)
    assert receipt.preempted_s == (pytest.approx(5),)


def test_request_that_was_never_read_has_taken_nothing() -> None:
    receipt = ReceiptWriter().receipt(held_for(1.0), 0)
    assert (receipt.device_s, receipt.admitted_s, receipt.energy_j, receipt.num_devices) == (0.0, None, None, 1)


def test_gateway_of_the_version_before_reads_an_end_that_has_a_receipt() -> None:
    class EarlierFinish(msgspec.Struct, array_like=True):
        reason: str
        usage: Usage | None = None
        error: str | None = None
        error_param: str | None = None
        error_code: str | None = None
        stop: str | int | None = None
        vector: bytes | None = None
        timing: Timing | None = None

    told = Finish("stop", Usage(5, 3), timing=Timing(1.0, 2.0), receipt=ReceiptWriter().receipt(held_for(1.0), 3))
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=EarlierFinish)
    assert (read.reason, read.usage, read.timing) == ("stop", Usage(5, 3), Timing(1.0, 2.0))


def test_sender_with_a_wrong_clock_makes_no_receipt_that_cannot_be_read() -> None:
    held = held_for(1.0)
    held.queued_s = 1e12
    told = Finish("stop", receipt=ReceiptWriter().receipt(held, 0))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=Finish) == told


@pytest.mark.parametrize(
    ("before", "now", "watts"),
    [
        ((), (), None),
        ((), (GpuReading("g", power_watts=250.0, energy_j=9.0),), 250.0),
        ((GpuReading("g", energy_j=10.0),), (GpuReading("g", power_watts=250.0, energy_j=410.0),), 200.0),
        ((GpuReading("g", energy_j=900.0),), (GpuReading("g", power_watts=90.0, energy_j=10.0),), 90.0),
        ((GpuReading("g"),), (GpuReading("g"),), None),
    ],
)
def test_power_is_the_joules_between_readings(
    before: tuple[GpuReading, ...], now: tuple[GpuReading, ...], watts: float | None
) -> None:
    assert _power(before, now, 2.0) == watts
