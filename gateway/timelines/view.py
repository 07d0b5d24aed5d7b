"""A timeline for display: rows of bars, the events in order, and the receipt of all attempts."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator
from typing import Any, Literal

from msgspec import Struct, to_builtins
from msgspec.structs import asdict

from shared.timeline import Attempt, Timeline

Kind = Literal["gateway", "queue", "prefix", "read", "wait", "prefill", "decode", "preempted", "worker", "answer"]
_PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
_LEAST_S = 0.0005
_WHY = {
    "worker_dead": "its worker died",
    "gap": "tokens of it were lost on the way",
    "handoff": "its worker gave it back",
    "prefilled": "its prompt was computed, and another worker went on",
    "silent": "its worker was silent about it",
    "waiting": "it waited where another worker had room",
    "unclaimed": "no worker took it",
    "nats_restart": "NATS was restarted or reconnected",
    "cancelled": "its worker stopped it",
    "early": "its worker's clock is wrong",
    "delivered_again": "the one before did not end it",
}


class Bar(Struct, frozen=True):
    """A span of time in a row, in seconds since the request came."""

    kind: Kind
    begin_s: float
    end_s: float
    text: str


class Row(Struct, frozen=True):
    """One line of bars: the gateway's, or an attempt's."""

    label: str
    bars: list[Bar]
    is_retry: bool = False


class Event(Struct, frozen=True):
    """Something that happened."""

    at_s: float
    text: str


class ReceiptView(Struct, frozen=True, kw_only=True):
    """Cost of all attempts. `retries_ms` is the part of lost attempts; `cost` is the price."""

    device_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    rejected_ms: float = 0.0
    recomputed_ms: float = 0.0
    retries_ms: float = 0.0
    energy_j: float | None = None
    cost: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    is_complete: bool = True


class TimelineView(Struct, frozen=True, kw_only=True):
    """Everything shown of a request; `timeline` has the fields of `Timeline`, and those of receipts by name, too."""

    timeline: dict[str, Any]
    rows: list[Row]
    events: list[Event]
    receipt: ReceiptView
    curl: str | None


def view_of(timeline: Timeline, device_hour_cost: float | None) -> TimelineView:
    """Return the view of a request; its device time is priced if an hour has a cost."""
    rows = [Row("request", list(_request_bars(timeline)))]
    came = f"the request came to {timeline.gateway}" if timeline.gateway else "the job was published"
    # Among simultaneous events, the request's admission comes first, and its own end last.
    events = [Event(0.0, came), *_admission(timeline)]
    first = _first_to_answer(timeline)
    for number, life in enumerate(timeline.sequences):
        name = f"sequence {number} " if len(timeline.sequences) > 1 else ""
        for attempt in life.attempts:
            label = f"{name}attempt {attempt.epoch} {attempt.worker or 'no worker'}"
            base_s = _began_s(attempt, timeline.first_token_s if attempt is first else None)
            rows.append(Row(label, list(_attempt_bars(attempt, base_s)), is_retry=attempt.epoch > 0))
            events += _attempt_events(name, attempt, base_s)
    events = sorted([*events, *_pauses(timeline), *_request_events(timeline)], key=lambda event: event.at_s)
    receipt = _receipt(timeline, device_hour_cost)
    return TimelineView(timeline=_named(timeline), rows=rows, events=events, receipt=receipt, curl=_curl(timeline))


def _named(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline whose receipts name their fields; gateways and workers send these as arrays."""
    named: dict[str, Any] = to_builtins(timeline)
    for life, shown in zip(timeline.sequences, named.get("sequences", []), strict=True):
        for attempt, told in zip(life.attempts, shown["attempts"], strict=True):
            if attempt.receipt is not None:
                prefills = [asdict(part) for part in attempt.receipt.prefills]
                told["receipt"] = asdict(attempt.receipt) | {"prefills": prefills}
    return named


def _request_bars(timeline: Timeline) -> Iterator[Bar]:
    admitted_s = _admitted_s(timeline)
    if timeline.gateway:
        shown_s = timeline.ended_s if admitted_s is None else admitted_s
        yield Bar("gateway", 0.0, shown_s, "admission: key, body, limits, load")
    if admitted_s is None:
        return
    first_s = timeline.ended_s if timeline.first_token_s is None else timeline.first_token_s
    yield Bar("wait", admitted_s, first_s, "until the first token")
    if timeline.first_token_s is not None:
        yield Bar("answer", first_s, timeline.ended_s, "the answer")


def _admitted_s(timeline: Timeline) -> float | None:
    """Return when it was admitted: the gateway notes it once all is published, and a worker may take it before."""
    # One that was published at 0 was in flight already when this request joined it.
    attempts = [attempt for life in timeline.sequences for attempt in life.attempts]
    published = [attempt.published_s for attempt in attempts if attempt.published_s > 0]
    return None if timeline.admitted_s is None else min([timeline.admitted_s, *published])


def _admission(timeline: Timeline) -> Iterator[Event]:
    if (admitted_s := _admitted_s(timeline)) is not None and timeline.gateway:
        is_cached = timeline.source == "cache"
        told = "answered from the response cache" if is_cached else "admitted, and given to the queue"
        yield Event(admitted_s, told)


def _request_events(timeline: Timeline) -> Iterator[Event]:
    if timeline.first_token_s is not None:
        yield Event(timeline.first_token_s, "first token")
    if timeline.outcome != "running":
        told = f": {timeline.error}" if timeline.error else ""
        status = f" with status {timeline.status}" if timeline.status else ""
        yield Event(timeline.ended_s, f"{timeline.outcome}{status}{told}")


def _pauses(timeline: Timeline) -> Iterator[Event]:
    """Yield the listed pauses, once for all sequences; if there were more, first how many and how long together."""
    lives = [life.attempts for life in timeline.sequences]
    pauses = {pause for attempts in lives for attempt in attempts for pause in attempt.pauses}
    num, paused_s = max(
        ((sum(each.num_pauses for each in one), sum(each.paused_s for each in one)) for one in lives),
        default=(0, 0.0),
    )
    if num > len(pauses):
        text = f"the gateway heard nothing {num} times, for {paused_s:.2f} s together; listed are the longest of them"
        # Before the first of them, so that a reader does not miss the others.
        yield Event(min((at_s for at_s, _ in pauses), default=timeline.ended_s), text)
    for at_s, lost_s in pauses:
        yield Event(at_s, f"the gateway heard nothing for {lost_s:.2f} s: it was paused, or NATS was silent")


def _began_s(attempt: Attempt, first_token_s: float | None = None) -> float:
    """Return when the worker took it: its clock is placed so that nothing it sent came here before it was sent.

    That is the attempt's end, and the request's first token if that was this attempt's.
    """
    receipt = attempt.receipt
    if receipt is None:
        return attempt.published_s
    base_s = attempt.ended_s - receipt.ended_s
    if first_token_s is not None and receipt.first_s is not None:
        base_s = min(base_s, first_token_s - receipt.first_s)
    return max(attempt.published_s, base_s)


def _first_to_answer(timeline: Timeline) -> Attempt | None:
    """Return the attempt that produced the first token, as far as the workers' receipts show."""
    found, earliest_s = None, math.inf
    for life in timeline.sequences:
        for attempt in life.attempts:
            first_s = None if attempt.receipt is None else attempt.receipt.first_s
            if first_s is not None:
                if _began_s(attempt) + first_s < earliest_s:
                    found, earliest_s = attempt, _began_s(attempt) + first_s
                break
            if attempt.tokens:
                return None  # it answered at an unknown time
    return found


def _attempt_bars(attempt: Attempt, base_s: float) -> Iterator[Bar]:
    receipt = attempt.receipt
    if receipt is None:
        claimed_s = attempt.ended_s if attempt.claimed_s is None else attempt.claimed_s
        yield Bar("queue", attempt.published_s, claimed_s, "in the queue")
        if attempt.claimed_s is not None:
            yield Bar("worker", claimed_s, attempt.ended_s, "with a worker that did not tell more")
        return
    held_s = min(receipt.waited_s, base_s - attempt.published_s)
    yield Bar("queue", attempt.published_s, base_s - held_s, "in the queue")
    if held_s > _LEAST_S:
        yield Bar("prefix", base_s - held_s, base_s, "waited for the worker that has its prefix")
    if receipt.admitted_s is None:
        yield Bar("worker", base_s, attempt.ended_s, "read by the worker, and not computed")
        return
    yield Bar("read", base_s, base_s + receipt.admitted_s, "tokenized, grammar and images prepared")
    began_s = receipt.ended_s if receipt.scheduled_s is None else receipt.scheduled_s
    yield Bar("wait", base_s + receipt.admitted_s, base_s + began_s, "waited for a place in the batch")
    for number, part in enumerate(receipt.prefills, 1):
        text = f"prefill part {number} of {len(receipt.prefills)}: {part.tokens} tokens"
        yield Bar("prefill", base_s + part.at_s, base_s + part.at_s + part.took_s, text)
    if receipt.first_s is not None:
        yield Bar("decode", base_s + receipt.first_s, base_s + receipt.ended_s, f"{attempt.tokens} tokens")
    for at_s in receipt.preempted_s:
        again_s = min((part.at_s for part in receipt.prefills if part.at_s >= at_s), default=receipt.ended_s)
        yield Bar("preempted", base_s + at_s, base_s + again_s, "preempted: others needed its blocks")


def _attempt_events(name: str, attempt: Attempt, base_s: float) -> Iterator[Event]:
    if attempt.epoch:
        why = _WHY.get(attempt.why, attempt.why)
        yield Event(attempt.published_s, f"{name}attempt {attempt.epoch}, because {why}")
    receipt = attempt.receipt
    if attempt.claimed_s is not None:
        # The worker reports its claim and its steps on different paths; the steps may arrive first.
        claimed_s = attempt.claimed_s if receipt is None else min(attempt.claimed_s, base_s)
        yield Event(claimed_s, f"{name}claimed by {attempt.worker}")
    if receipt is not None:
        if receipt.scheduled_s is not None:
            cached = f", {receipt.cached_tokens} of {receipt.prompt_tokens} prompt tokens from the cache"
            yield Event(base_s + receipt.scheduled_s, f"{name}first step{cached}")
        for part in receipt.prefills:
            yield Event(base_s + part.at_s + part.took_s, f"{name}prefilled {part.tokens} tokens")
        for at_s in receipt.preempted_s:
            yield Event(base_s + at_s, f"{name}preempted")
        if receipt.drafted_tokens:
            told = f"{receipt.accepted_tokens} of {receipt.drafted_tokens} drafts accepted"
            yield Event(attempt.ended_s, f"{name}{told}")
    if attempt.end:
        end = attempt.end if attempt.end == "cancelled" else _WHY.get(attempt.end, attempt.end)
        yield Event(attempt.ended_s, f"{name}attempt {attempt.epoch} ended after {attempt.tokens} tokens: {end}")


def _receipt(timeline: Timeline, device_hour_cost: float | None) -> ReceiptView:
    told = [(each, each is life.attempts[-1]) for life in timeline.sequences for each in life.attempts]
    receipts = [attempt.receipt for attempt, _ in told if attempt.receipt is not None]
    names = ("device_s", "prefill_s", "rejected_s", "recomputed_s")
    device_s, prefill_s, rejected_s, recomputed_s = (sum(getattr(each, name) for each in receipts) for name in names)
    energies = [each.energy_j for each in receipts if each.energy_j is not None]
    # The decode worker fetches the prefill worker's blocks: nothing is recomputed.
    lost = [each.receipt for each, is_last in told if not is_last and each.end != "prefilled"]
    return ReceiptView(
        device_ms=1e3 * device_s,
        prefill_ms=1e3 * prefill_s,
        decode_ms=1e3 * (device_s - prefill_s),
        rejected_ms=1e3 * rejected_s,
        recomputed_ms=1e3 * recomputed_s,
        retries_ms=1e3 * sum(each.device_s for each in lost if each is not None),
        energy_j=sum(energies) if energies else None,
        cost=None if device_hour_cost is None else device_s / 3600 * device_hour_cost,
        prompt_tokens=timeline.prompt_tokens,
        cached_tokens=timeline.cached_tokens,
        completion_tokens=timeline.num_generated,
        drafted_tokens=sum(each.drafted_tokens for each in receipts),
        accepted_tokens=sum(each.accepted_tokens for each in receipts),
        is_complete=all(attempt.receipt is not None for attempt, _ in told if attempt.worker is not None),
    )


def _curl(timeline: Timeline) -> str | None:
    """Return a command that repeats the request, as far as it is kept; without texts if they are hidden."""
    path = _PATHS.get(timeline.route)
    if path is None or not timeline.model:
        return None
    body: dict[str, object] = {"model": timeline.model, **timeline.asked}
    if timeline.stop:
        body["stop"] = timeline.stop
    text = "<prompt>" if timeline.prompt is None else timeline.prompt
    if timeline.route == "chat":
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = text
    # Escaped, since marks of direction would show a command that is not the one to be pasted.
    data = shlex.quote(json.dumps(body))
    key = '-H "Authorization: Bearer $HEADRACE_API_KEY"'
    return f"curl $HEADRACE_URL{path} {key} -H 'Content-Type: application/json' -d {data}"
