"""What timelines, receipts and the ledger cost a gateway for each request: calls, and processor time (-m slow -s)."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from unittest.mock import Mock

import msgspec
import pytest

from gateway.api.request_observer import RequestObserver
from gateway.api.schemas.parsing import parse_chat
from gateway.api.usage import UsageTotals
from gateway.dispatch.inflight import Flight
from gateway.dispatch.timelines import TimelineKeeper
from shared.messages import Delta, Finish, Request, Usage
from shared.receipt import PrefillPart, Receipt
from shared.usage_ledger import UsageLedger

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "What is a headrace?"}], "max_tokens": 30})
TIMES = {"queued_s": 0.001, "admitted_s": 0.002, "scheduled_s": 0.003, "first_s": 0.01, "ended_s": 0.3}
RECEIPT = Receipt(taken=0.0, device_s=0.05, prefill_s=0.01, prefills=(PrefillPart(0.003, 0.007, 10),), **TIMES)
FINISHES = [Finish("stop", Usage(10, 30), receipt=receipt) for receipt in (RECEIPT, None)]
Item = TypeVar("Item")


def taken_us(work: Callable[[Item], object], items: Sequence[Item]) -> float:
    began = time.thread_time()
    for item in items:
        work(item)
    return (time.thread_time() - began) / len(items) * 1e6


def calls_of(work: Callable[[Item], object], items: Sequence[Item]) -> float:
    num_calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        for item in items:
            work(item)
    finally:
        sys.setprofile(before)
    return num_calls / len(items)


def costs(
    measure: Callable[[Callable[[Any], object], Sequence[Any]], float], num_requests: int = 1000, max_kept: int = 500
) -> dict[str, float]:
    """Return what each part costs for a request of one sequence."""
    log: Any = Mock(write=lambda *_: None)
    ledger = UsageLedger("interactive")
    keeper = TimelineKeeper("gateway", max_kept, ledger)
    seeing, blind = RequestObserver(log, timelines=keeper), RequestObserver(log)
    generation, records, flights = parse_chat(BODY.encode()), [], []
    for number in range(num_requests):
        record = seeing.begin("chat", f"request-{number}", ())
        record.tenant, record.generation = "tenant", generation
        record.dispatched_at = record.first_token_at = time.monotonic()
        record.outcome, record.usage = "completed", UsageTotals(1)
        flight = Flight(Request(id=f"{record.key}-0", model="m", tenant="tenant"), Mock(), 1, 0.0, worker="w")
        flight.log.claimed_at = time.monotonic()
        records.append(record)
        flights.append((flight, Delta(flight.id, 0, 30, finish=FINISHES[0])))
    frames = [[msgspec.msgpack.encode(finish)] * num_requests for finish in FINISHES]
    decode = msgspec.msgpack.Decoder(Finish).decode
    counts = {"prompt_tokens": 10, "cached_tokens": 0, "completion_tokens": 30}
    return {
        "decode": measure(decode, frames[0]) - measure(decode, frames[1]),
        "began": measure(lambda each: seeing.begin("chat", each.request_id, ()), records)
        - measure(lambda each: blind.begin("chat", each.request_id, ()), records),
        "receipt": measure(lambda each: keeper.receipt_came("w", each[1], each[0]), flights),
        "sequence": measure(lambda each: keeper.sequence_ended(each[0], "completed", FINISHES[0]), flights),
        "ledger": measure(lambda _: ledger.add("tenant", "m", **counts), records),
        "ended": measure(lambda each: seeing.end(each, 200), records)
        - measure(lambda each: blind.end(each, 200), records),
        "reading the body": measure(parse_chat, [BODY.encode()] * num_requests),
    }


def test_seeing_a_request_takes_few_calls() -> None:
    parts = costs(calls_of, 200, 100)
    del parts["reading the body"]
    assert sum(parts.values()) < 85, parts


@pytest.mark.slow
def test_seeing_a_request_takes_less_than_reading_its_body() -> None:
    gc.disable()
    try:
        rounds = [costs(taken_us) for _ in range(7)]
    finally:
        gc.enable()
    least = {part: min(each[part] for each in rounds) for part in rounds[0]}
    reading = least.pop("reading the body")
    told = ", ".join(f"{part} {us:.2f}" for part, us in least.items())
    sys.stdout.write(f"{sum(least.values()):.2f} us a request ({told}); reading its body {reading:.2f}\n")
    assert sum(least.values()) < 0.9 * reading
