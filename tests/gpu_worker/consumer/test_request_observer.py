"""Lines and spans of requests at the worker."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from gpu_worker.consumer.gpu_monitor import _power
from gpu_worker.consumer.held_request import HeldRequest
from gpu_worker.consumer.queued_message import QueuedMessage
from gpu_worker.consumer.request_observer import ReceiptWriter, RequestObserver
from gpu_worker.core.sequence import Sequence
from shared.messages import Finish, Lane, Request, Usage
from shared.receipt import Timing
from shared.request_log import SLOW_S, RequestLog
from shared.sampling import Sampling
from shared.worker_metrics import GpuReading
from tests.gpu_worker.core.sequences import make_sequence

MESSAGE = QueuedMessage("s", b"", "ack", 1, 1, 0)


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
    held = HeldRequest("r", request, MESSAGE, outcome=outcome, taken_at=now - 10, queued_s=2.0)
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
    held = HeldRequest("r", request, MESSAGE, outcome=outcome, taken_at=time.monotonic() - held_s, queued_s=0.0)
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
