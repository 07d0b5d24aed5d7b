"""Deliveries are read as the NATS client reads them, which is the oracle here, whatever the subject looks like."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.msg import Msg
from nats.errors import NotJSMessageError

from gpu_worker.consumer.queued_message import delivery, queued_message

COUNT = st.integers(min_value=0, max_value=2**63 - 1).map(str)
NAME = st.text("abcXYZ_-019", min_size=1, max_size=9)
NUMBERS = st.tuples(COUNT, COUNT, COUNT, st.just("1763830000123456789"), COUNT).map(".".join)


def message(reply: str) -> Msg:
    nobody: Any = None
    return Msg(nobody, subject="hr.req.m.interactive.t", reply=reply, data=b"payload")


@given(NAME, NAME, NUMBERS)
def test_delivery_is_read_as_the_client_reads_it(stream: str, consumer: str, numbers: str) -> None:
    _check(f"$JS.ACK.{stream}.{consumer}.{numbers}")


@given(NAME, NAME, NAME, NUMBERS, st.sampled_from(["", ".token", ".token.more"]))
def test_delivery_with_a_domain_is_read_as_the_client_reads_it(
    domain: str, stream: str, consumer: str, numbers: str, more: str
) -> None:
    _check(f"$JS.ACK.{domain}.account.{stream}.{consumer}.{numbers}{more}")


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "_INBOX_gateway.abc",
        "$JS.ACK",
        "$JS.NAK.s.c.1.2.3.4.5",
        "$JS.ACK.s.c.1.2.3.4",
        "$JS.ACK.d.s.c.1.2.3.4.5",
        "$JS.ACK.s.c.one.2.3.4.5",
    ],
)
def test_message_that_is_no_delivery_is_none(reply: str) -> None:
    with pytest.raises((NotJSMessageError, ValueError)):
        _ = message(reply).metadata
    assert queued_message(message(reply)) is None


def _check(reply: str) -> None:
    queued, expected = queued_message(message(reply)), message(reply).metadata
    assert queued is not None
    assert (queued.subject, queued.data, queued.ack_subject) == ("hr.req.m.interactive.t", b"payload", reply)
    read = (queued.stream_seq, queued.num_delivered, queued.num_pending)
    assert read == (expected.sequence.stream, expected.num_delivered, expected.num_pending)
    assert queued.stored_at == pytest.approx(expected.timestamp.timestamp(), abs=0.001)


def test_delivery_whose_time_is_no_number_of_this_world_is_none() -> None:
    # Another worker may say anything of what it grants.
    assert delivery("hr.req.m.interactive", b"", f"$JS.ACK.s.c.1.2.3.{'9' * 400}.5") is None
