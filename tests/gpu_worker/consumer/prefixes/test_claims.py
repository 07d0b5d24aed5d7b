"""What a worker answers to offers, and for how long one that offers waits."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from gpu_worker.consumer.prefixes.affinity import PeerConnection, PrefixAffinity
from gpu_worker.consumer.prefixes.claims import PrefixClaims
from gpu_worker.consumer.prefixes.messages import Answer, Grant, Offer, decode_peer_message
from gpu_worker.consumer.prefixes.waiting import ANSWER_S, WaitingRequests
from shared.messages import UNDECODABLE, encode

# Of a worker with one request, 50 blank blocks, and 100 tokens of each offered prefix, which other prompts share.
OFFER: dict[str, Any] = {
    "worker": "other", "number": 1, "links": (b"link",), "num_tokens": 164, "num_held": 0, "backlog": 0,
    "num_requests": 1, "num_blank": 40, "expires_s": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "reply"),
    [
        ({}, "claim"),
        ({"num_held": 100}, "decline"),
        ({"num_held": 99}, "claim"),
        # Our memory is fuller by more than the shared beginning, which takes 7 blocks.
        ({"num_blank": 57}, "claim"),
        ({"num_blank": 58}, "decline"),
        # There is no room for the rest of the prompt where it was pulled.
        ({"num_blank": 3, "num_tokens": 164}, "claim"),
        ({"num_requests": 0}, "decline"),
        # No prefix is asked for, but more memory.
        ({"links": (), "num_tokens": 64}, "claim"),
        ({"links": (), "num_tokens": 64, "num_blank": 46}, "claim"),
        ({"links": (), "num_tokens": 64, "num_blank": 47}, "decline"),
        ({"links": (), "num_tokens": 64, "adapter": "a" * 64}, "decline"),
        ({"links": (), "num_tokens": 64, "num_requests": 0}, "decline"),
    ],
)
def test_offer_is_claimed_where_the_prefix_or_more_memory_is(changes: dict[str, Any], reply: str) -> None:
    peers = Mock(worker="own")
    capacity = Mock(num_interactive=1, is_resting=lambda: False, num_blocks_for=lambda num_tokens: -(-num_tokens // 16))
    held = Mock(longest=lambda links: Mock(num_tokens=100, is_shared=True) if links else None)
    engine = Mock(stats=Mock(waiting_tokens=0, prefill_rate=0.0), num_blank_blocks=50)
    claims = PrefixClaims(held, engine, capacity, peers, _adapters=Mock(is_resident=lambda adapter: False))
    claims.start(Mock())
    claims.receive_offer(Offer(**OFFER | changes))
    peers.send.assert_called_once_with("other", Answer("own", 1, reply))  # type: ignore[arg-type]


def test_memory_that_is_blank_here_goes_to_a_request_that_has_no_room_where_it_was_pulled() -> None:
    capacity = Mock(num_interactive=1, is_resting=lambda: False, num_blocks_for=lambda num_tokens: -(-num_tokens // 16))
    held = Mock(longest=lambda links: Mock(num_tokens=100, is_shared=True))
    peers, engine = Mock(worker="own"), Mock(stats=Mock(waiting_tokens=0), num_blank_blocks=0)
    claims = PrefixClaims(held, engine, capacity, peers)
    claims.start(Mock())
    # Of 64 new tokens in 4 blocks; with the shared beginning's 7 blocks this worker would be no fuller.
    for num_blank, reply in ((3, "claim"), (4, "claim"), (7, "claim"), (8, "decline")):
        claims.receive_offer(Offer(**OFFER | {"num_blank": num_blank}))
        assert peers.send.call_args[0][1].reply == reply
    capacity.is_resting = lambda: True
    claims.receive_offer(Offer(**OFFER | {"num_blank": 3}))
    assert peers.send.call_args[0][1].reply == "decline", "this worker was paused a moment ago"
    capacity.is_resting = lambda: False
    claims.stop()
    claims.receive_offer(Offer(**OFFER))
    claims.receive_grant(Grant("other", 1, "hr.req.m.interactive", b"", "$JS.ACK.S.c.1.1.1.1.0"))
    assert [each[0][1].reply for each in peers.send.call_args_list[-2:]] == ["decline"] * 2


@pytest.mark.parametrize(
    "end", ["", "\r\nPUB hr.cancel.m 4\r\nEVIL\r\nPUB x", " hr.cancel.m", "\thr.cancel.m", "\n", ">", "*"]
)
def test_granted_request_is_acknowledged_by_one_command_to_its_queue_alone(end: str) -> None:
    for subject in ("$JS.ACK.S.c.1.2.3.4.0", "hr.cancel.m.1.2.3.4.5"):
        grant = Grant("other", 1, "hr.req.m.interactive", b"", subject + end)
        if subject.startswith("$") and not end:
            assert decode_peer_message(encode(grant)) == grant
            continue
        with pytest.raises(UNDECODABLE):
            decode_peer_message(encode(grant))


def test_offer_of_a_worker_that_no_subject_can_name_is_dropped() -> None:
    nats = Mock(is_connected=True, max_payload=1 << 20)
    engine = Mock(stats=Mock(waiting_tokens=0), num_blank_blocks=50)
    capacity = Mock(num_interactive=0, is_resting=lambda: False, num_blocks_for=lambda num_tokens: 4)
    affinity = PrefixAffinity(PeerConnection(nats, "own", "m", Mock()), engine, capacity, 16)
    affinity._claims.start(Mock())
    affinity._receive(Mock(data=b""))
    # As many characters as a name may have bytes, of three bytes each.
    name = "\u20ac" * 128
    for said in (Offer(**OFFER | {"worker": name, "links": ()}), Grant(name, 1, "s", b"", "$JS.ACK.S.c.1.1.1.1.0")):
        affinity._receive(Mock(data=encode(said)))
        affinity.review()
    capacity.reserve.assert_not_called()
    nats.send.assert_not_called()


def test_room_that_is_kept_for_an_offer_is_kept_once_however_often_it_comes() -> None:
    kept, timers = [0, 0], list[Any]()

    def reserve(num_requests: int, num_blocks: int = 0) -> None:
        kept[0] += num_requests
        kept[1] += num_blocks

    capacity = Mock(num_interactive=0, is_resting=lambda: False, num_blocks_for=lambda num_tokens: 4, reserve=reserve)
    engine = Mock(stats=Mock(waiting_tokens=0), num_blank_blocks=50)
    peers = Mock(worker="own", call_later=lambda delay, call: timers.append(call) or Mock())
    claims = PrefixClaims(Mock(longest=lambda links: None), engine, capacity, peers)
    claims.start(Mock())
    for _ in range(3):
        claims.receive_offer(Offer(**OFFER | {"links": ()}))
        assert kept == [1, 4]
    timers[-1]()
    assert kept == [0, 0]


class _Offering:
    """A worker that has offered a request to two others, at a time that the test sets."""

    def __init__(self, **request: Any) -> None:
        self.now = 100.0
        self.timers: list[Any] = []
        # A message is as old as its time is far behind.
        self.peers = Mock(worker="own", time=lambda: self.now, age_s=lambda stored_at: self.now - stored_at)
        self.peers.call_later = lambda delay, call: self.timers.append((self.now + delay, call)) or Mock()
        engine = Mock(stats=Mock(prefill_rate=100.0, expected_prefill_rate=100.0, waiting_tokens=0), num_blank_blocks=9)
        held = Mock(longest=lambda links: None, bytes_per_token=4)
        self.others = Mock(holders=lambda places, now: [(0, "a"), (0, "b")], emptier=lambda num_blank, now: [])
        capacity = Mock(num_interactive=1, num_blocks_for=lambda num_tokens: 7, interactive=lambda backlog: 1)
        self.waiting = WaitingRequests(held, self.others, engine, capacity, self.peers, 5.0)
        self.begun: list[Any] = []
        self.waiting.start(self.begun.append, Mock(), Mock())
        chain = Mock(links=(b"link",), num_bytes=400, share=lambda place: 0.6)
        asked = Mock(**{"adapter": None, "emitted": (), "epoch": 0, "probation": False, "deadline": None} | request)
        self.is_waiting = self.waiting.take(Mock(stored_at=99.9), asked, chain)

    @property
    def expires_s(self) -> float:
        offer: Offer = self.peers.send.call_args[0][1]
        return offer.expires_s

    def time_out(self) -> None:
        self.now, call = self.timers.pop()
        call()


@pytest.mark.parametrize(("deadline", "expires_s"), [(None, 0.5), (101.5, 0.5), (101.2, 0.2), (101.004, None)])
def test_request_waits_no_longer_than_its_prefix_saves_and_its_deadline_allows(
    deadline: float | None, expires_s: float | None
) -> None:
    # Its 100 tokens take a second, and 60 are saved; a tenth of a second is over.
    offering = _Offering(deadline=deadline)
    assert offering.is_waiting == (expires_s is not None)
    if expires_s is not None:
        assert offering.expires_s == pytest.approx(expires_s)


def test_worker_that_was_granted_a_request_and_is_silent_keeps_it_from_no_other() -> None:
    offering = _Offering()
    offering.waiting.receive(Answer("b", 1, "later"))
    offering.waiting.receive(Answer("a", 1, "claim"))
    assert offering.timers[-1][0] == pytest.approx(offering.now + ANSWER_S)
    offering.time_out()
    # Another one would have had room later; that it was asked for is over.
    assert len(offering.begun) == 1
    offering.others.distrust.assert_called_once_with("a", pytest.approx(100.0 + ANSWER_S))


def test_silent_worker_is_not_waited_for_where_another_will_have_room() -> None:
    offering = _Offering()
    offering.waiting.receive(Answer("b", 1, "later"))
    offering.time_out()
    assert not offering.begun
    offering.others.distrust.assert_called_once_with("a", pytest.approx(100.0 + ANSWER_S))
    offering.time_out()
    assert (len(offering.begun), offering.now) == (1, pytest.approx(100.5))
