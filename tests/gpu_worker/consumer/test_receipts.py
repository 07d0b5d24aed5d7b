"""The receipt of a request as its worker writes it."""

from __future__ import annotations

import time

import msgspec
import pytest

from gpu_worker.consumer.gpu_monitor import _power
from gpu_worker.consumer.held_request import HeldRequest
from gpu_worker.consumer.queued_message import QueuedMessage
from gpu_worker.consumer.request_observer import ReceiptWriter
from shared.messages import Finish, Request, Usage
from shared.receipt import Timing
from shared.worker_metrics import GpuReading
from tests.gpu_worker.core.sequences import make_sequence


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
