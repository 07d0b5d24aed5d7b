"""What a move does to the old attempt and to the next one; queue, workers and NATS are in memory."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import msgspec
import pytest

from gateway.dispatch.flight_log import Loss
from gateway.dispatch.inflight import Flight, FlightTable
from gateway.dispatch.poison import HARMLESS_TOKENS, MAX_SOLO_LOSSES
from gateway.dispatch.recovery import Recovery
from gateway.dispatch.timeouts import RecoveryLimits
from gateway.errors import ApiError
from gateway.fleet.deaths import Death
from gateway.fleet.fleet import Fleet
from gateway.fleet.fleet_load import OwnRequests
from gateway.fleet.liveness import FleetLimits
from gateway.fleet.resumption import MARGIN_S, NUM_STEPS
from gateway.metrics import MoveReason
from shared.disaggregation import KvReady, RoleNews
from shared.messages import Request
from shared.prefixes import MAX_WAIT_S, PrefixNews
from shared.server_clock import ServerClock
from shared.timeline import MAX_SEQUENCES
from tests.gateway.dispatch_bench import ListSink
from tests.gateway.fleet.test_fleet import BEAT

LIMITS = RecoveryLimits(max_moves=12)


@dataclass
class Wire:
    """Publisher, revoker and quarantine of a gateway; keeps what they are asked for."""

    published: list[tuple[str, int]] = field(default_factory=list)
    cancelled: list[tuple[str, int | None]] = field(default_factory=list)
    deleted: list[int] = field(default_factory=list)
    quarantined: list[tuple[str, str]] = field(default_factory=list)
    failed: list[tuple[str, int]] = field(default_factory=list)
    errors: list[ApiError] = field(default_factory=list)
    num_published_at_cancels: list[int] = field(default_factory=list)
    num_closed: int = 0
    refusal: ApiError | None = None

    def publish(self, flight: Flight) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.published.append((flight.id, flight.epoch))

    def forget(self, flight: Flight) -> None:
        flight.ack = None

    def cancel(self, model: str, request_id: str, epoch: int) -> None:
        self.cancelled.append((request_id, epoch))

    def delete(self, stream_seq: int) -> None:
        self.deleted.append(stream_seq)

    async def send_cancels(self) -> None:
        self.num_published_at_cancels.append(len(self.published))

    def take(self, flight: Flight, reason: str, why: str) -> ApiError:
        self.quarantined.append((flight.id, reason))
        return ApiError(500, why)

    async def close(self) -> None:
        self.num_closed += 1


class Moves:
    """A recovery, its flights, and the wire."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.flights = FlightTable()
        self.fleet = Fleet("g", FleetLimits(), OwnRequests(self.flights.unshown, self.flights.awaited))
        self.recovery = Recovery(
            self.flights,
            self.fleet,
            self.wire,  # type: ignore[arg-type]
            self.wire,  # type: ignore[arg-type]
            self.wire,  # type: ignore[arg-type]
            self.fail,
            LIMITS,
            ServerClock(),
            Counter(),
        )

    def fail(self, flight: Flight, error: ApiError) -> None:
        if self.flights.remove(flight):
            self.wire.failed.append((flight.id, error.status))
            self.wire.errors.append(error)

    def flight(self, request_id: str, worker: str | None = None) -> Flight:
        """Add a flight that was published long ago, and that `worker` holds, if given."""
        flight = Flight(Request(id=request_id, model="m", text="x"), ListSink(), 1, published_at=-1000.0)
        self.flights.add(flight)
        if worker is not None:
            self.flights.claim(flight, worker)
        return flight

    async def settle(self) -> None:
        await self.recovery.close()

    async def move(self, flights: list[Flight], reason: MoveReason) -> None:
        self.recovery.move(flights, reason)
        await self.settle()

    async def sweep(self, now: float, *, is_nats_late: bool = False) -> None:
        self.recovery.sweep(now, is_nats_late)
        await self.settle()

    def reconnect(self, *, is_same_stream: bool = True) -> None:
        self.recovery.disconnected(has_others=False)
        self.recovery.reconnected()
        self.recovery.requeue(is_same_stream)

    def hear(self, now: float, **changes: object) -> None:
        self.fleet.note_heartbeat(msgspec.structs.replace(BEAT, **changes), now)

    async def die(self, worker: str, *, is_blamed: bool = True) -> None:
        self.recovery.lose_worker(
            Death(worker, "m", "it is not there any more", asyncio.get_running_loop().time(), is_blamed)
        )
        await self.settle()


@pytest.fixture
async def moves() -> Moves:
    return Moves()


async def test_move_cancels_exactly_the_old_attempt_and_deletes_its_message(moves: Moves) -> None:
    flight = moves.flight("a", "w")
    flight.epoch, flight.stream_seq = 4, 77
    await moves.move([flight], "gap")
    assert moves.wire.cancelled == [("a", 4)]
    assert moves.wire.deleted == [77]
    assert moves.wire.published == [("a", 5)]
    assert moves.wire.num_published_at_cancels == [0]
    assert (flight.worker, flight.stream_seq, flight.epoch) == (None, None, 5)


async def test_moves_without_progress_end_in_quarantine_and_progress_begins_anew(moves: Moves) -> None:
    flight = moves.flight("a", "w")
    for _ in range(LIMITS.max_moves):
        moves.recovery.move([flight], "gap")
    flight.emitted.append(1)
    for _ in range(LIMITS.max_moves):
        moves.recovery.move([flight], "handoff")
    assert moves.wire.failed == []
    moves.recovery.move([flight], "silent")
    assert moves.wire.failed == [("a", 500)]
    assert moves.wire.quarantined == [("a", "attempts_exhausted")]
    assert str(moves.wire.errors[0]) == f"No worker kept this request in {LIMITS.max_moves + 1} attempts."
    assert flight.epoch == 2 * LIMITS.max_moves
    await moves.settle()


async def test_moves_that_are_no_workers_fault_have_no_limit(moves: Moves) -> None:
    flight = moves.flight("a")
    for _ in range(20):
        moves.recovery.move([flight], "nats_restart")
        moves.recovery.move([flight], "unclaimed")
    assert moves.wire.failed == []
    await moves.settle()


async def test_requests_that_died_with_a_worker_are_told_where_there_were_any(
    moves: Moves, caplog: pytest.LogCaptureFixture
) -> None:
    await moves.die("idle")
    moves.flight("a", "busy")
    await moves.die("busy")
    assert [record.getMessage() for record in caplog.records] == ["worker busy died with 1 requests"]


async def test_suspects_are_published_one_per_worker(moves: Moves) -> None:
    for name in "abc":
        moves.flight(name, "w")
    await moves.die("w")
    assert moves.wire.published == [("a", 1)]
    first = moves.flights.by_id["a"]
    assert first.probation == 1
    first.emitted.append(1)
    await moves.sweep(-1000.0)
    assert moves.wire.published == [("a", 1), ("b", 1)]
    moves.flights.remove(moves.flights.by_id["b"])
    await moves.sweep(-1000.0)
    assert moves.wire.published == [("a", 1), ("b", 1), ("c", 1)]


async def test_suspects_are_published_as_others_are_once_their_worker_is_heard_again(moves: Moves) -> None:
    flights = [moves.flight(name, "w") for name in "abc"]
    await moves.die("w")
    assert moves.wire.published == [("a", 1)]
    for flight in flights:
        flight.losses[0].death.is_blamed = False
    await moves.sweep(-1000.0)
    # The first one waits in the queue as a suspect: workers give it back while they have anything else to begin.
    assert sorted(moves.wire.published[1:]) == [("a", 2), ("b", 1), ("c", 1)]
    assert moves.wire.cancelled[-1] == ("a", 1)
    assert [flight.probation for flight in flights] == [0, 0, 0]


async def test_suspect_that_a_worker_has_claimed_stays_there_when_its_death_is_taken_back(moves: Moves) -> None:
    flight = moves.flight("a", "w")
    await moves.die("w")
    moves.flights.claim(flight, "v")
    flight.losses[0].death.is_blamed = False
    await moves.sweep(-1000.0)
    assert (flight.worker, flight.epoch) == ("v", 1)


async def test_suspect_that_is_the_only_one_at_two_deaths_is_quarantined(moves: Moves) -> None:
    poison, neighbour = moves.flight("a", "w0"), moves.flight("b", "w0")
    neighbour.emitted += range(40)
    await moves.die("w0")
    for number in (1, 2):
        assert moves.wire.quarantined == []
        for flight in (poison, neighbour):
            moves.flights.claim(flight, f"w{number}")
        neighbour.emitted += range(40)
        await moves.die(f"w{number}")
    assert moves.wire.quarantined == [("a", "worker_lost")]
    assert list(moves.flights) == [neighbour]


async def test_refused_publication_is_repeated_and_one_that_is_too_large_fails(moves: Moves) -> None:
    flight = moves.flight("a", "w")
    moves.wire.refusal = ApiError(503, "full")
    # The queue has not acknowledged the attempt that ends here, and the next one does not wait until it does.
    flight.ack = "inbox.1"
    await moves.move([flight], "gap")
    assert moves.wire.published == []
    moves.wire.refusal = None
    await moves.sweep(flight.published_at + LIMITS.refused_retry_s + 0.01)
    assert moves.wire.published == [("a", 2)]
    moves.wire.refusal = ApiError(413, "too large")
    await moves.move([flight], "gap")
    assert moves.wire.failed == [("a", 413)]


async def test_request_that_a_frozen_worker_was_sent_is_published_again_although_all_others_are_full(
    moves: Moves,
) -> None:
    now = 100.0
    full = {"running": 8, "queue_pending": 5, "waiting": 3}
    moves.hear(now, **full)
    sent, waiting, suspect = (moves.flight(name) for name in "abc")
    sent.stream_seq, waiting.stream_seq, suspect.stream_seq = 50, 52, 49
    # Perhaps a worker has given it back to the queue: later requests prove nothing.
    suspect.probation, suspect.losses = 1, [Loss(Death("w", "m", "gone", 0.0, is_blamed=True), 0, is_solo=False)]
    moves.recovery.sweep(now)
    moves.hear(now, **full, last_pulled=51)
    moves.recovery.sweep(now)
    now += LIMITS.delivered_claim_timeout_s
    for seconds in (-0.2, 0.2):
        moves.hear(now + seconds, **full, last_pulled=51)
        assert moves.wire.published == []
        await moves.sweep(now + seconds)
    assert moves.wire.published == [("a", 1)]
    assert sent.delivered_at is None


async def test_request_that_waits_for_the_holder_of_its_prefix_is_left_to_wait_as_long_as_it_may(moves: Moves) -> None:
    now = 100.0
    names = {"running": 8, "queue_pending": 5, "waiting": 3, "last_pulled": 51, "prefixes": PrefixNews(waiting=(50,))}
    waiting, other = moves.flight("a"), moves.flight("b")
    waiting.stream_seq, other.stream_seq = 50, 51
    waiting.published_at = other.published_at = now
    moves.hear(now, **names)
    await moves.sweep(now)
    for seconds, published in (
        (LIMITS.delivered_claim_timeout_s + 0.2, [("b", 1)]),
        (LIMITS.delivered_claim_timeout_s + MAX_WAIT_S - 0.2, [("b", 1)]),
        # A worker may name a request for ever.
        (LIMITS.delivered_claim_timeout_s + MAX_WAIT_S + 0.2, [("b", 1), ("a", 1)]),
    ):
        other.published_at = now + seconds
        moves.hear(now + seconds, **names)
        await moves.sweep(now + seconds)
        assert moves.wire.published == published


async def test_how_far_one_queue_was_pulled_says_nothing_of_the_other(moves: Moves) -> None:
    now = 100.0
    new, resumed = moves.flight("a"), moves.flight("b", "w1")
    await moves.move([resumed], "handoff")
    assert (new.has_begun, resumed.has_begun) == (False, True)
    new.stream_seq, resumed.stream_seq, resumed.queue = 50, 60, "resumed"
    moves.hear(now, last_pulled=40, last_resumed=60)
    moves.recovery.sweep(now)
    assert (new.delivered_at, resumed.delivered_at) == (None, now)
    moves.hear(now + 0.1, last_pulled=50, last_resumed=60)
    moves.recovery.sweep(now + 0.1)
    assert new.delivered_at == now + 0.1


READY = KvReady("a", 0, "w1", "0" * 32)


async def test_the_place_of_its_kv_goes_with_the_next_attempt_alone(moves: Moves) -> None:
    flight = moves.flight("a", "w1")
    flight.ready = READY
    await moves.move([flight], "prefilled")
    assert flight.attempt().ready == READY
    assert flight.num_moves == 0, "nobody was at fault"
    await moves.move([flight], "worker_dead")
    assert flight.attempt().ready is None


async def test_what_no_worker_decodes_any_more_is_published_for_those_who_compute_prompts(moves: Moves) -> None:
    flight = moves.flight("a", "w1")
    flight.ready = READY
    await moves.move([flight], "prefilled")
    flight.queue = "ready"
    moves.hear(0.0, roles=RoleNews("prefill"))
    moves.hear(0.0, worker="w2", roles=RoleNews("decode", ("ready",)))
    await moves.sweep(0.0)
    assert flight.epoch == 1
    moves.hear(0.1, worker="w2", roles=RoleNews("decode", ()))
    await moves.sweep(0.1)
    assert (flight.epoch, flight.ready) == (2, None)


async def test_who_does_not_take_from_a_queue_says_nothing_of_what_waits_in_it(moves: Moves) -> None:
    idle = {"waiting": 0, "running": 0}
    flight = moves.flight("a", "w1")
    flight.ready = READY
    await moves.move([flight], "prefilled")
    flight.queue, flight.stream_seq, flight.published_at = "ready", 10, 0.0
    moves.hear(100.0, roles=RoleNews("prefill"), **idle)
    moves.hear(100.0, worker="w2", running=8, roles=RoleNews("decode", ("ready",), last_ready=9))
    await moves.sweep(100.0)
    assert flight.epoch == 1, "the worker that decodes is full"
    moves.hear(100.1, worker="w2", roles=RoleNews("decode", ("ready",), last_ready=10), **idle)
    await moves.sweep(100.1)
    assert flight.epoch == 2, "it has room, sees an empty queue, and has not claimed it"


async def hand_over(moves: Moves, flight: Flight, now: float) -> None:
    """Have a prefill worker take a flight, make one token, and hand it over."""
    moves.flights.claim(flight, "w1")
    flight.emitted.append(1)
    flight.ready = msgspec.structs.replace(READY, epoch=flight.epoch)
    await moves.move([flight], "prefilled")
    flight.queue, flight.stream_seq, flight.published_at = "ready", 10, now


async def test_wait_for_a_claim_goes_on_doubling_over_handovers_until_a_worker_goes_on(moves: Moves) -> None:
    flight, now = moves.flight("a"), 100.0
    idle = {"waiting": 0, "running": 0, "last_pulled": 10, "last_resumed": 10}
    for factor in (1, 2, 4, 1):
        if factor == 1:
            # A worker that decodes has claimed it, and was lost.
            moves.flights.claim(flight, "w2")
            await moves.move([flight], "worker_dead")
        await hand_over(moves, flight, now)
        for late_s, has_moved in ((-0.2, False), (0.2, True)):
            at, epoch = now + LIMITS.claim_timeout_s * factor + late_s, flight.epoch
            moves.hear(at, **idle, roles=RoleNews("prefill"))
            moves.hear(at, worker="w2", **idle, roles=RoleNews("decode", ("ready",), last_ready=10))
            await moves.sweep(at)
            assert (flight.epoch > epoch, factor) == (has_moved, factor)
        now += 10.0


async def test_token_of_a_handover_does_not_hide_that_no_worker_goes_on(moves: Moves) -> None:
    flight = moves.flight("a")
    for _ in range(LIMITS.max_moves):
        await hand_over(moves, flight, 0.0)
        moves.flights.claim(flight, "w2")
        await moves.move([flight], "handoff")
    assert moves.wire.failed == []
    await hand_over(moves, flight, 0.0)
    moves.flights.claim(flight, "w2")
    await moves.move([flight], "handoff")
    assert (moves.wire.failed, moves.wire.quarantined) == ([("a", 500)], [("a", "attempts_exhausted")])


async def test_what_a_worker_may_have_given_back_is_not_taken_for_delivered(moves: Moves) -> None:
    now = 100.0
    before, after = moves.flight("a"), moves.flight("b")
    first, second = moves.flight("c", "w1"), moves.flight("d", "w1")
    await moves.move([first, second], "handoff")
    for number, flight in enumerate((before, after, first, second)):
        flight.stream_seq, flight.queue = 50 + number, "resumed" if flight.has_begun else "interactive"
    sent = {"last_pulled": 51, "last_returned": 50, "last_resumed": 53, "last_resumed_returned": 52}
    moves.hear(now, **sent)
    moves.recovery.sweep(now)
    assert [flight.delivered_at for flight in (before, after, first, second)] == [None, now, None, now]


IDLE = msgspec.structs.replace(BEAT, waiting=0, running=0)


async def check_timeouts(moves: Moves, flight: Flight, *timeouts_s: float) -> None:
    """Check that a flight is moved after each of these waits for a claim, and not before, while a worker is idle."""
    for epoch, timeout_s in enumerate(timeouts_s):
        for seconds, expected in ((-0.2, epoch), (0.2, epoch + 1)):
            now = 100.0 + timeout_s + seconds
            flight.published_at, flight.stream_seq = 100.0, 10
            moves.fleet.note_heartbeat(IDLE, now)
            await moves.sweep(now)
            assert flight.epoch == expected


async def test_timeout_of_a_request_that_no_worker_claims_doubles(moves: Moves) -> None:
    await check_timeouts(moves, moves.flight("a"), *(LIMITS.claim_timeout_s * factor for factor in (1, 2, 4)))


async def test_timeout_is_shorter_while_a_worker_may_have_died_and_does_not_grow_beyond_the_usual(
    moves: Moves,
) -> None:
    silent = msgspec.structs.replace(IDLE, worker="silent")
    moves.fleet.note_heartbeat(silent, 99.0)
    flight, usual_s = moves.flight("a"), LIMITS.claim_timeout_s
    await check_timeouts(moves, flight, LIMITS.disturbed_claim_timeout_s, usual_s, usual_s)
    # What was lost then says nothing about how long a claim takes once all is quiet.
    now = 200.0 + LIMITS.claim_timeout_s + 0.2
    flight.published_at, flight.stream_seq = 200.0, 10
    for beat, told_at in ((IDLE, now - 0.2), (IDLE, now), (silent, now)):
        moves.fleet.note_heartbeat(beat, told_at)
    await moves.sweep(now)
    assert flight.epoch == 4


async def test_request_that_was_published_before_a_worker_died_is_not_waited_for(moves: Moves) -> None:
    frozen = msgspec.structs.replace(BEAT, waiting=0, running=0, worker="frozen")
    idle = msgspec.structs.replace(frozen, worker="idle")
    now = 100.0
    moves.fleet.note_heartbeat(frozen, now)
    while not moves.fleet.liveness.deaths.since("m", now - 1):
        now += 0.05
        moves.fleet.note_heartbeat(idle, now)
        moves.fleet.sweep(now)
        moves.fleet.liveness.take_probes(now)
    before, after = moves.flight("before"), moves.flight("after")
    before.published_at, after.published_at = now - 0.01, now + 0.01
    before.stream_seq, after.stream_seq = 10, 11
    now += LIMITS.after_death_claim_timeout_s + 0.02
    moves.fleet.note_heartbeat(idle, now)
    await moves.sweep(now)
    assert moves.wire.published == [("before", 1)]
    # Once: what no worker claims after that was not lost with that worker.
    before.published_at, before.stream_seq = now, 12
    await moves.sweep(now + LIMITS.disturbed_claim_timeout_s - 0.01)
    assert [flight for flight, _ in moves.wire.published].count("before") == 1


async def test_request_whose_worker_is_unknown_moves(moves: Moves) -> None:
    now = 100.0
    for _ in range(100):
        now += 0.1
        moves.fleet.note_heartbeat(BEAT, now)
        moves.fleet.sweep(now)
    gone, kept = moves.flight("a", "somebody"), moves.flight("b", BEAT.worker)
    gone.emitted, kept.emitted = [1], [1]
    gone.progressed_at = kept.progressed_at = now - LIMITS.reconnect_timeout_s - 0.1
    await moves.sweep(now)
    assert moves.wire.published == [("a", 1)]


@pytest.mark.parametrize("num_tokens", [0, 1])
async def test_claimed_request_of_which_nothing_is_heard_after_a_reconnect_moves(moves: Moves, num_tokens: int) -> None:
    lost, heard = moves.flight("a", "w"), moves.flight("b", "w")
    moves.reconnect()
    now = asyncio.get_running_loop().time()
    moves.hear(now, worker="w")
    lost.emitted = heard.emitted = [1] * num_tokens
    lost.progressed_at, heard.progressed_at = now - 1, now + 0.01
    timeout_s = LIMITS.reconnect_timeout_s
    if not num_tokens:
        timeout_s = LIMITS.reconnect_prefill_timeout_s + 1 / LIMITS.reconnect_prefill_rate
    await moves.sweep(now + timeout_s - 0.1)
    assert moves.wire.published == []
    await moves.sweep(now + timeout_s + 0.1)
    assert moves.wire.published == [("a", 1)]
    assert lost.losses == []


@pytest.mark.parametrize("num_tokens", [0, 1])
async def test_claimed_request_moves_when_its_worker_has_gone_on_without_it(moves: Moves, num_tokens: int) -> None:
    lost = moves.flight("a", "w")
    start = asyncio.get_running_loop().time()
    beat = msgspec.structs.replace(BEAT, worker="w", waiting=0, waiting_tokens=0)
    moves.fleet.note_heartbeat(beat, start - 1)
    moves.fleet.liveness.nats_disconnected()
    moves.recovery.disconnected(has_others=False)
    moves.fleet.liveness.nats_reconnected(start)
    moves.recovery.reconnected()
    moves.recovery.requeue(is_same_stream=True)
    lost.emitted, lost.progressed_at = [1] * num_tokens, start - 1
    moves.fleet.note_heartbeat(beat, start)
    await moves.sweep(start + 0.2)
    assert moves.wire.published == []
    moves.fleet.note_heartbeat(msgspec.structs.replace(beat, step=beat.step + NUM_STEPS), start + 0.2)
    await moves.sweep(start + 0.2 + 2 * MARGIN_S)
    assert moves.wire.published == [("a", 1)]


async def test_further_reconnects_do_not_put_off_the_move_of_what_the_first_one_lost(moves: Moves) -> None:
    lost = moves.flight("a", "w")
    first = asyncio.get_running_loop().time()
    moves.hear(first, worker="w")
    lost.emitted, lost.progressed_at = [1], first - 1
    for _ in range(2):
        moves.reconnect()
        second = asyncio.get_running_loop().time()
        await asyncio.sleep(0.05)
    await moves.sweep(second + LIMITS.reconnect_timeout_s - 0.01)
    assert moves.wire.published == [("a", 1)]


async def test_only_requests_of_a_worker_that_reconnected_are_expected_to_have_lost_frames(moves: Moves) -> None:
    lost, other = moves.flight("a", "w"), moves.flight("b", "v")
    now = asyncio.get_running_loop().time()
    for worker in ("w", "v"):
        moves.hear(now, worker=worker)
    lost.emitted, other.emitted = [1], [1]
    lost.progressed_at = other.progressed_at = now - 1
    moves.recovery.worker_reconnected("w")
    await moves.sweep(now + LIMITS.reconnect_timeout_s + 0.1)
    assert moves.wire.published == [("a", 1)]


async def test_stream_that_waits_at_its_worker_moves_only_to_one_that_has_room(moves: Moves) -> None:
    # What is published again bears the loop's own time.
    now = asyncio.get_running_loop().time()
    waiting, silent = moves.flight("a", "w1"), moves.flight("b", "w1")
    for flight in (waiting, silent):
        flight.emitted, flight.progressed_at = [1] * 100, now - LIMITS.stall_s - 1
    waiting.heard_at, silent.heard_at = now - 2, now - LIMITS.stall_s - 1

    async def sweep(**other: int) -> list[tuple[str, int]]:
        full = msgspec.structs.replace(BEAT, waiting=0, running=1, free_blocks=100, num_reconnects=0)
        moves.fleet.note_heartbeat(full, now)
        if other:
            moves.fleet.note_heartbeat(msgspec.structs.replace(full, worker="w2", **other), now)
        await moves.sweep(now)
        return moves.wire.published

    assert await sweep() == [("b", 1)]
    for lack in ({"waiting": 1}, {"running": 8}, {"free_blocks": 6}, {"queue_pending": 1}):
        assert await sweep(**lack) == [("b", 1)]
    assert await sweep(running=1) == [("b", 1), ("a", 1)]
    # No worker is at fault.
    assert (waiting.num_moves, silent.num_moves) == (0, 1)


async def test_stream_that_is_said_to_wait_has_lost_nothing_with_its_workers_connection(moves: Moves) -> None:
    waiting, lost = moves.flight("a", "w"), moves.flight("b", "w")
    now = asyncio.get_running_loop().time()
    moves.hear(now, worker="w")
    for flight in (waiting, lost):
        flight.emitted, flight.progressed_at = [1], now - 1
    moves.recovery.worker_reconnected("w")
    waiting.heard_at = now + 0.1
    await moves.sweep(now + LIMITS.reconnect_timeout_s + 0.1)
    assert moves.wire.published == [("b", 1)]


async def test_pause_of_this_process_moves_nothing(moves: Moves) -> None:
    now = 5000.0
    silent, unclaimed = moves.flight("a", "w"), moves.flight("b")
    silent.emitted, silent.progressed_at, silent.heard_at = [1], now - 1, now - 2
    unclaimed.published_at, unclaimed.stream_seq = now - 1, 5
    moves.recovery.discount_pause(600.0, now + 600)
    assert (silent.progressed_at, silent.heard_at, unclaimed.published_at) == (now + 599, now + 598, now + 599)
    await moves.sweep(now + 600)
    assert moves.wire.published == []
    # What was read before the pause was noticed is not moved into the future.
    silent.progressed_at, unclaimed.delivered_at = now + 600, now - 1
    moves.recovery.discount_pause(600.0, now + 600)
    assert (silent.progressed_at, unclaimed.delivered_at) == (now + 600, now + 599)
    moves.recovery.discount_pause(600.0, now + 600)
    assert unclaimed.delivered_at == now + 600


async def test_pause_of_this_process_is_in_the_timeline_and_moves_none_of_its_times(moves: Moves) -> None:
    flight, now = moves.flight("a", "w"), 5000.0
    flight.published_at, flight.log.claimed_at = now - 2, now - 1.5
    moves.recovery.discount_pause(3.0, now + 3)
    moves.recovery.discount_pause(1.0, now + 5)
    attempt = flight.attempt_ended("stop", now + 6, now - 4)
    assert (attempt.published_s, attempt.claimed_s, attempt.ended_s) == (2.0, 2.5, 10.0)
    assert (attempt.pauses, attempt.num_pauses, attempt.paused_s) == (((7.0, 3.0), (9.0, 1.0)), 2, 4.0)
    # The next attempt has times and pauses of its own.
    flight.log.end(flight.attempt_ended("silent", now + 6))
    flight.published_at = now + 7
    assert flight.log.earlier(now - 4)[0].published_s == 2.0
    assert flight.log.earlier(now - 4)[0].pauses == ((7.0, 3.0), (9.0, 1.0))
    later = flight.attempt_ended("stop", now + 8, now - 4)
    assert (later.published_s, later.pauses, later.num_pauses) == (11.0, (), 0)


def test_longest_pauses_are_listed_and_all_are_counted(moves: Moves) -> None:
    flight = moves.flight("a", "w")
    for number in range(1, 3 * MAX_SEQUENCES + 1):
        flight.log.note_pause(float(number), float(number % (2 * MAX_SEQUENCES)))
    attempt = flight.attempt_ended("stop", 100.0)
    assert sorted(lost_s for _, lost_s in attempt.pauses) == list(range(MAX_SEQUENCES, 2 * MAX_SEQUENCES))
    assert (attempt.num_pauses, attempt.paused_s) == (48, 632.0)


@pytest.mark.parametrize("is_same_stream", [True, False])
async def test_return_of_nats_publishes_what_no_worker_claimed(moves: Moves, is_same_stream: bool) -> None:
    claimed, unclaimed = moves.flight("a", "w"), moves.flight("b")
    claimed.stream_seq, unclaimed.stream_seq = 3, 4
    moves.reconnect(is_same_stream=is_same_stream)
    await moves.settle()
    assert moves.wire.published == [("b", 1)]
    assert claimed.stream_seq == (3 if is_same_stream else None)
    # In a stream that was made anew the old number may be another request's.
    assert moves.wire.deleted == ([4] if is_same_stream else [])


async def test_absence_of_nats_ends_requests_at_their_deadline_or_when_it_is_too_long(moves: Moves) -> None:
    moves.recovery.disconnected(has_others=False)
    start = asyncio.get_running_loop().time()
    moves.flight("a", "w").expires_at = start + 5
    moves.flight("b", "w")
    moves.recovery.sweep(start + 4)
    assert moves.wire.failed == []
    moves.recovery.sweep(start + 6)
    assert moves.wire.failed == [("a", 408)]
    # The official SDKs would repeat it, and no client waits for the answer any more.
    assert moves.wire.errors[0].headers["x-should-retry"] == "false"
    moves.recovery.sweep(start + LIMITS.outage_timeout_s + 1)
    assert moves.wire.failed == [("a", 408), ("b", 503)]
    assert moves.wire.published == []


async def test_deadline_ends_a_flight_that_waits_on_probation(moves: Moves) -> None:
    moves.flight("a", "w")
    parked = moves.flight("b", "w")
    await moves.die("w")
    assert parked.is_parked
    parked.expires_at = -1000.5
    await moves.sweep(-1000.0)
    assert ("b", 408) in moves.wire.failed


async def test_end_waits_for_the_dead_letters(moves: Moves) -> None:
    await moves.recovery.close()
    assert moves.wire.num_closed == 1


async def test_copies_of_a_poisonous_request_end_with_it_but_nothing_else_does(moves: Moves) -> None:
    poison = moves.flight("a")
    copies = {
        "waiting": moves.flight("b"),
        "running elsewhere": moves.flight("c", "alive"),
        "harmless": moves.flight("d"),
        "of another tenant": moves.flight("e"),
        "another prompt": moves.flight("f"),
    }
    copies["harmless"].emitted = [1] * HARMLESS_TOKENS
    for name, change in (("of another tenant", {"tenant": "u"}), ("another prompt", {"text": "y"})):
        copies[name].request = msgspec.structs.replace(copies[name].request, **change)
    for number in range(MAX_SOLO_LOSSES + 1):
        assert moves.wire.failed == []
        moves.flights.claim(poison, f"w{number}")
        await moves.die(f"w{number}")
    assert sorted(moves.wire.failed) == [("a", 500), ("b", 500)]
    assert moves.wire.quarantined == [("a", "worker_lost")]
    # A dead worker acknowledges no message: what ends a flight deletes its message if no worker holds it.
    assert (poison.worker, copies["waiting"].worker) == (None, None)


async def test_request_whose_workers_are_restarted_again_and_again_is_not_quarantined(moves: Moves) -> None:
    moved = moves.flight("a")
    for number in range(4):
        for idle in ("x", "y"):
            await moves.die(f"{idle}{number}")
        moves.flights.claim(moved, f"w{number}")
        await moves.die(f"w{number}")
    assert moves.wire.quarantined == []


async def test_request_that_no_worker_kept_is_no_known_poison_unless_it_was_alone_on_several(moves: Moves) -> None:
    for request_id, num_solo in (("b", 1), ("c", 2)):
        moved = moves.flight(request_id)
        moved.request = msgspec.structs.replace(moved.request, text=request_id)
        for number in range(LIMITS.max_moves + 1):
            moves.flights.claim(moved, f"{request_id}{number}")
            if number <= num_solo:
                for idle in ("x", "y"):
                    await moves.die(f"{request_id}{idle}{number}")
                await moves.die(f"{request_id}{number}")
            else:
                await moves.move([moved], "gap")
        assert moves.wire.quarantined[-1] == (request_id, "attempts_exhausted")
        again = moves.flight(f"{request_id}2")
        again.request = msgspec.structs.replace(again.request, text=request_id)
        assert moves.recovery.is_suspect(again) is (num_solo > 1)


async def test_copy_that_ends_with_another_choice_of_its_answer_is_not_counted_as_waiting(
    moves: Moves, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison, copy = moves.flight("a"), moves.flight("b")
    fail = moves.fail

    def fail_all_choices(flight: Flight, error: ApiError) -> None:
        for choice in (poison, copy):
            fail(choice, error)

    monkeypatch.setattr(moves.recovery, "_fail", fail_all_choices)
    for number in range(MAX_SOLO_LOSSES + 1):
        moves.flights.claim(poison, f"w{number}")
        await moves.die(f"w{number}")
    assert moves.flights.unclaimed_of() == {}


@pytest.mark.parametrize("is_claimed", [True, False], ids=["claimed", "ended"])
async def test_request_that_is_claimed_or_ends_while_cancellations_are_sent_is_not_published(
    moves: Moves, monkeypatch: pytest.MonkeyPatch, is_claimed: bool
) -> None:
    gone, moved = moves.flight("a", "w"), moves.flight("b", "w")

    async def send_cancels() -> None:
        if is_claimed:
            moves.flights.claim(gone, "w2")
        else:
            moves.flights.remove(gone)

    monkeypatch.setattr(moves.wire, "send_cancels", send_cancels)
    await moves.move([gone, moved], "gap")
    assert moves.wire.published == [("b", 1)]


async def test_request_like_a_poisonous_one_is_a_suspect_until_one_is_answered(moves: Moves) -> None:
    poison = moves.flight("a")
    for number in range(MAX_SOLO_LOSSES + 1):
        moves.flights.claim(poison, f"w{number}")
        await moves.die(f"w{number}")
    again = moves.flight("b")
    assert moves.recovery.is_suspect(again)
    moves.recovery.note_answer(again)
    assert not moves.recovery.is_suspect(moves.flight("c"))


async def test_request_that_was_held_back_and_then_published_is_not_refused_when_nats_is_away_again(
    moves: Moves,
) -> None:
    held_back = moves.flight("a")
    held_back.is_held_back = True
    moves.reconnect()
    moves.recovery.disconnected(has_others=False)
    await moves.sweep(asyncio.get_running_loop().time() + LIMITS.held_back_s + 0.1)
    assert moves.wire.failed == []


async def test_new_request_waits_for_another_server_of_nats_where_there_is_one(moves: Moves) -> None:
    held_back = moves.flight("a")
    held_back.is_held_back = True
    moves.recovery.disconnected(has_others=True)
    now = asyncio.get_running_loop().time()
    moves.recovery.sweep(now + LIMITS.outage_timeout_s - 0.1)
    assert (moves.wire.failed, moves.recovery.holds_back(now + LIMITS.outage_timeout_s - 0.1)) == ([], True)
    moves.recovery.sweep(now + LIMITS.outage_timeout_s + 0.1)
    assert moves.wire.failed == [("a", 503)]


async def test_new_request_does_not_wait_for_a_server_that_had_been_silent_before(moves: Moves) -> None:
    moves.recovery.disconnected(has_others=False, was_silent=True)
    assert not moves.recovery.holds_back(asyncio.get_running_loop().time())
    moves.recovery.disconnected(has_others=True, was_silent=True)
    assert moves.recovery.holds_back(asyncio.get_running_loop().time())


async def test_nothing_moves_while_nats_owes_an_answer_but_deadlines_hold(moves: Moves) -> None:
    now = asyncio.get_running_loop().time()
    unsent, ending = moves.flight("unsent"), moves.flight("ending", "w")
    unsent.ack, ending.expires_at = "inbox.1", now + 1
    later = now + LIMITS.ack_timeout_s + 0.1
    await moves.sweep(later, is_nats_late=True)
    assert (moves.wire.published, moves.wire.failed) == ([], [("ending", 408)])
    await moves.sweep(later)
    assert moves.wire.published == [("unsent", 1)]


async def test_only_new_requests_that_nats_has_not_acknowledged_are_refused(moves: Moves) -> None:
    flights = {
        name: moves.flight(name, worker)
        for name, worker in (("new", None), ("held", "w"), ("moved", None), ("promised", None))
    }
    moves.flight("stored")
    flights["promised"].is_promised = True
    for flight in flights.values():
        flight.ack = "inbox.1"
    flights["moved"].epoch = 1
    moves.recovery.refuse_unsent()
    assert moves.wire.failed == [("new", 503)]


async def test_what_workers_hold_is_left_to_them_while_no_server_leads_the_queue(moves: Moves) -> None:
    held, waiting = moves.flight("a", "w"), moves.flight("b")
    assert moves.recovery.waits_for_stream(waiting, may_elect=True)
    held.progressed_at = asyncio.get_running_loop().time()
    moves.recovery.requeue(is_same_stream=True)
    await moves.settle()
    assert moves.wire.published == [("b", 1)]
    await moves.sweep(held.progressed_at + LIMITS.reconnect_timeout_s + 0.1)
    assert held.epoch == 0


async def test_request_that_is_given_up_keeps_no_other_from_moving(moves: Moves) -> None:
    given_up, moved = moves.flight("a", "w"), moves.flight("b", "w")
    given_up.num_moves = LIMITS.max_moves
    await moves.move([given_up, moved], "gap")
    assert (moves.wire.failed, moves.wire.published) == ([("a", 500)], [("b", 1)])
