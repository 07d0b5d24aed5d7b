"""Keeps the data of request timelines, for running requests and those that have ended lately.

A timeline is built when it is read. The request observer reports the start and the end of a request, the dispatcher
each of its sequences, in either order. The store is bounded in number, bytes and time. When it is full, the tenant with
the most requests loses its oldest one; requests that were refused before their tenant was known have a small store of
their own. The one writer is the event loop's thread.
"""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from msgspec import structs

from gateway.config import PROBE_KEY_ID
from gateway.dispatch.inflight import Flight, key_of
from shared.messages import Delta, Finish
from shared.receipt import Receipt
from shared.timeline import MAX_SEQUENCES, Order, SequenceLife, Summary, Timeline
from shared.usage_ledger import UsageLedger

KEPT_S = 900.0
MAX_TIMELINE_BYTES = 32 << 10
MAX_WITHOUT_TENANT = 100
MAX_DEVICE_WATTS = 2000.0
"""More than any device draws."""
LATE_S = 30.0
"""How long a cancelled sequence's worker may still report its cost."""
_MAX_LATE = 4096
_LOOK_S = 60.0
# Parts of a prompt and preemptions of a request that is not worth encoding.
_SHORT = 8
# Between two clocks that run at different speeds, and frames under way.
_SLACK_S = 1.0


class SeenRequest(Protocol):
    """A request as its observer knows it; the keeper writes the last three attributes alone.

    Attributes:
        request_id: Its `x-request-id`.
        began_at, ended_at: By the keeper's clock; `ended_at` is None while it runs.
        tenant: None if it was refused before its tenant was known.
        sequences: Those that have ended.
        left_out: Sequences beyond the bound.
    """

    request_id: str
    began_at: float
    ended_at: float | None
    tenant: str | None
    sequences: list[SequenceLife]
    left_out: int

    def timeline(self, gateway: str) -> Timeline:
        """Return its timeline so far, without its sequences."""


@dataclass(slots=True)
class _Packed:
    """A long request: its timeline is encoded, with `num_packed` sequences; later ones are beside it."""

    request_id: str
    began_at: float
    ended_at: float | None
    tenant: str | None
    content: bytes
    num_packed: int
    sequences: list[SequenceLife] = field(default_factory=list)
    left_out: int = 0

    def timeline(self, gateway: str) -> Timeline:
        return _decode(self.content)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Timeline).decode


@dataclass(slots=True)
class _Late:
    """A sequence that the gateway has ended, and whose worker may still report its cost."""

    key: str
    tenant: str
    model: str
    worker: str
    epoch: int
    claimed_at: float | None
    until: float


class TimelineKeeper:
    """Keeps the last requests for fifteen minutes at most: `max_kept`, and up to an eighth more until room is made."""

    def __init__(
        self,
        gateway: str,
        max_kept: int,
        usage: UsageLedger,
        *,
        shows_prompts: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keep up to `max_kept` requests of tenants that have ended; with 0 none at all.

        `usage` counts what attempts have taken of devices, `clock` is that of the event loop.
        """
        self.gateway = gateway
        self.shows_prompts = shows_prompts
        self._max_kept = max_kept
        self._slack = max(0, max_kept - 100) // 8
        self._usage = usage
        self._clock = clock
        self._running: dict[str, SeenRequest] = {}
        # In the order in which they ended.
        self._kept: dict[str, SeenRequest] = {}
        self._num_of: dict[str, int] = {}
        self._next_look_at = 0.0
        self._late: OrderedDict[str, _Late] = OrderedDict()
        self._flights: Callable[[], Iterable[Flight]] = tuple
        self._num_devices: Callable[[str], int] = lambda worker: 1

    def watch(self, flights: Callable[[], Iterable[Flight]], num_devices: Callable[[str], int]) -> None:
        """Attach the current attempts of these flights to running requests. `num_devices` counts a worker's."""
        self._flights, self._num_devices = flights, num_devices

    def request_began(self, key: str, request: SeenRequest) -> None:
        """Take note of a request; the ids of its sequences begin with `key`, which no other request has."""
        if self._max_kept:
            self._running[key] = request

    def request_ended(self, key: str, request: SeenRequest) -> None:
        """Keep a request, which is small, with its sequences; `request_began` need not have been called."""
        if not self._max_kept:
            return
        self._running.pop(key, None)
        tenant = request.tenant or ""
        self._num_of[tenant] = self._num_of.get(tenant, 0) + 1
        self._kept[key] = request
        if request.sequences:
            self._pack(key, request)
        if len(self._kept) > self._max_kept + self._slack or self._clock() > self._next_look_at:
            self._make_room()

    def sequence_ended(self, flight: Flight, end: str, finish: Finish | None) -> None:
        """Take note of a sequence that has ended."""
        key, now = key_of(flight.request.id), self._clock()
        if finish is None and flight.worker is not None and flight.epoch not in flight.log.receipts:
            self._expect(flight, key, now)
        # One that is neither: its answer was given elsewhere, or long ago.
        request = self._running.get(key) or self._kept.get(key)
        if request is not None:
            num_packed = request.num_packed if isinstance(request, _Packed) else 0
            if num_packed + len(request.sequences) < MAX_SEQUENCES:
                reason = end if finish is None else finish.reason
                request.sequences.append(_life(flight, reason, now, request.began_at))
            else:
                request.left_out += 1
            if request.ended_at is not None:
                self._pack(key, request)

    def receipt_came(self, worker: str, delta: Delta, flight: Flight | None) -> None:
        """Count an attempt's cost, once, from its last delta; `flight` is None if that has ended."""
        assert delta.finish is not None
        receipt, now = delta.finish.receipt, self._clock()
        if receipt is None:
            return
        if flight is not None:
            log, request = flight.log, flight.request
            holder, claimed_at = flight.worker, log.claimed_at
            if delta.epoch != flight.epoch:
                holder, claimed_at = _holder(flight, delta.epoch)
            if delta.epoch in log.receipts or holder != worker:
                return
            receipt = _bounded(receipt, claimed_at, now, self._num_devices(worker))
            log.receipts[delta.epoch] = receipt
            if request.key != PROBE_KEY_ID:
                self._usage.add_time(request.tenant, request.model, receipt)
            return
        late = self._late.get(delta.id)
        if late is None or (late.worker, late.epoch) != (worker, delta.epoch) or now > late.until:
            return
        del self._late[delta.id]
        receipt = _bounded(receipt, late.claimed_at, now, self._num_devices(worker))
        self._usage.add_time(late.tenant, late.model, receipt)
        self._complete(late, delta.id, receipt)

    def find(self, request_id: str) -> list[Timeline]:
        """Return the requests of an id, the latest first; running requests are shown with their events so far."""
        running = self._so_far({key: each for key, each in self._running.items() if each.request_id == request_id})
        self._make_room()
        kept = [self._timeline(each) for each in self._kept.values() if each.request_id == request_id]
        return [*reversed(running), *reversed(kept)]

    def summaries(self, order: Order, limit: int) -> list[Summary]:
        """Return the first of the requests that have ended, or of those that run, by an order.

        `failed` are those that were not answered.
        """
        if order == "running":
            found = list(map(_summary, self._so_far(self._running)))
        else:
            self._make_room()
            found = [_summary(self._timeline(each)) for each in self._kept.values()]
        if order == "failed":
            found = [each for each in found if each.status >= 400 or each.outcome != "completed"]
        return sorted(found, key=sort_key(order), reverse=True)[:limit]

    def _so_far(self, requests: Mapping[str, SeenRequest]) -> list[Timeline]:
        """Return the timelines of running requests, in one pass over all flights."""
        now, lives = self._clock(), defaultdict[str, list[SequenceLife]](list)
        for flight in self._flights() if requests else ():
            if (request := requests.get(key := key_of(flight.id))) is not None:
                lives[key].append(_life(flight, "", now, request.began_at))
        return [self._with_lives(self._timeline(request), lives[key]) for key, request in requests.items()]

    def _with_lives(self, shown: Timeline, lives: list[SequenceLife]) -> Timeline:
        sequences, num = [*shown.sequences, *lives], len(shown.sequences) + len(lives)
        left_out = shown.left_out + max(0, num - MAX_SEQUENCES)
        return structs.replace(shown, sequences=sequences[:MAX_SEQUENCES], left_out=left_out)

    def _timeline(self, request: SeenRequest) -> Timeline:
        timeline = request.timeline(self.gateway)
        sequences, left_out = [*timeline.sequences, *request.sequences], timeline.left_out + request.left_out
        return structs.replace(timeline, sequences=sequences, left_out=left_out)

    def _pack(self, key: str, request: SeenRequest) -> None:
        """Encode the record of a request with many attempts or steps, which takes less memory."""
        lives = request.sequences
        if len(lives) == 1 and len(lives[0].attempts) == 1:
            receipt = lives[0].attempts[0].receipt
            if receipt is None or len(receipt.prefills) + len(receipt.preempted_s) <= _SHORT:
                return
        if lives:
            self._encode(key, request, self._timeline(request))

    def _encode(self, key: str, request: SeenRequest, timeline: Timeline) -> None:
        """Keep a timeline encoded; of one that is too long the later half of its sequences is left out, and so on."""
        while len(content := _encode(timeline)) > MAX_TIMELINE_BYTES and (num := len(timeline.sequences)):
            left_out = timeline.left_out + num - num // 2
            timeline = structs.replace(timeline, sequences=timeline.sequences[: num // 2], left_out=left_out)
        self._kept[key] = _Packed(
            request.request_id,
            request.began_at,
            request.ended_at,
            request.tenant,
            content,
            len(timeline.sequences),
        )

    def _make_room(self) -> None:
        """Let go of what ended long ago, and of the oldest requests of the tenants with the most if there are too many.

        Requests without a tenant have a room of their own. As a rule an eighth of all go at once, so that what each
        tenant has is seldom looked at.
        """
        now = self._clock()
        self._next_look_at = now + _LOOK_S
        gone = []
        for key, request in self._kept.items():
            if request.ended_at is None or request.ended_at >= now - KEPT_S:
                break
            gone.append(key)
        self._drop(gone)
        excess = self._excess()
        num_gone, gone = sum(excess.values()), []
        for key, request in self._kept.items():
            if len(gone) == num_gone:
                break
            if excess.get(tenant := request.tenant or ""):
                excess[tenant] -= 1
                gone.append(key)
        self._drop(gone)

    def _excess(self) -> dict[str, int]:
        """Return how many requests each tenant loses: those with the most have equal numbers left."""
        num_without, room = self._num_of.get("", 0), self._max_kept
        excess = {"": max(0, num_without - min(MAX_WITHOUT_TENANT, room))}
        tenants = sorted((num, tenant) for tenant, num in self._num_of.items() if tenant)
        for place, (num, tenant) in enumerate(tenants):
            left = min(num, room // (len(tenants) - place))
            excess[tenant] = num - left
            room -= left
        return excess

    def _drop(self, keys: list[str]) -> None:
        for key in keys:
            tenant = self._kept.pop(key).tenant or ""
            self._num_of[tenant] -= 1
            if not self._num_of[tenant]:
                del self._num_of[tenant]

    def _expect(self, flight: Flight, key: str, now: float) -> None:
        assert flight.worker is not None
        while self._late and (len(self._late) >= _MAX_LATE or next(iter(self._late.values())).until < now):
            self._late.popitem(last=False)
        request = flight.request
        self._late[flight.id] = _Late(
            key, request.tenant, request.model, flight.worker, flight.epoch, flight.log.claimed_at, now + LATE_S
        )

    def _complete(self, late: _Late, flight_id: str, receipt: Receipt) -> None:
        request = self._running.get(late.key) or self._kept.get(late.key)
        if request is None:
            return
        timeline = self._timeline(request)
        lives = [life for life in timeline.sequences if life.id == flight_id and life.attempts]
        if not lives:
            # It ended before anything was known of its request, or is beyond the bounds.
            return
        for life in lives:
            life.attempts[-1] = structs.replace(life.attempts[-1], receipt=receipt)
        if isinstance(request, _Packed):
            self._encode(late.key, request, timeline)
        elif request.ended_at is not None:
            self._pack(late.key, request)


def sort_key(order: Order) -> Callable[[Summary], float]:
    """Return by what a list is sorted, the largest first."""
    if order in ("slow", "running"):
        return lambda each: each.ended_s
    if order == "first":
        # One that ended without a token has waited for it all the time.
        return lambda each: each.ended_s if each.first_token_s is None else each.first_token_s
    return lambda each: each.began + each.ended_s


def _life(flight: Flight, end: str, now: float, began_at: float) -> SequenceLife:
    last = flight.attempt_ended(end, now, began_at)
    return SequenceLife(flight.request.id, [*flight.log.earlier(began_at), last] if flight.log.ended else [last])


def _holder(flight: Flight, epoch: int) -> tuple[str | None, float | None]:
    found = (each for each in flight.log.ended if each.epoch == epoch)
    return next(((each.worker, each.claimed_s) for each in found), (None, None))


def _summary(timeline: Timeline) -> Summary:
    return Summary(
        timeline.id,
        timeline.tenant,
        timeline.model,
        timeline.route,
        timeline.status,
        timeline.outcome,
        timeline.began,
        timeline.ended_s,
        timeline.first_token_s,
        timeline.num_generated,
        sum(len(each.attempts) - 1 for each in timeline.sequences),
        (timeline.error or "").partition(":")[0],
    )


def _bounded(receipt: Receipt, claimed_at: float | None, now: float, most_devices: int) -> Receipt:
    """Return a receipt of no more than can be true; tenants pay by it, and a worker must not charge them at will.

    Its device time is no more than can have passed since its attempt was claimed, on the devices that its worker has;
    the parts are no more than the whole, and energy is no more than devices can draw in that time.
    """
    passed_s = _SLACK_S if claimed_at is None else now - claimed_at + _SLACK_S
    devices = min(receipt.num_devices, most_devices)
    device_s = min(receipt.device_s, max(0.0, passed_s) * devices)
    if (
        device_s == receipt.device_s
        and devices == receipt.num_devices
        and max(receipt.prefill_s, receipt.rejected_s, receipt.recomputed_s) <= device_s
        and (receipt.energy_j is None or receipt.energy_j <= device_s * MAX_DEVICE_WATTS)
    ):
        return receipt
    part = device_s / receipt.device_s if receipt.device_s else 1.0
    energy_j = receipt.energy_j
    return structs.replace(
        receipt,
        num_devices=devices,
        device_s=device_s,
        prefill_s=min(receipt.prefill_s * part, device_s),
        rejected_s=min(receipt.rejected_s * part, device_s),
        recomputed_s=min(receipt.recomputed_s * part, device_s),
        energy_j=None if energy_j is None else min(energy_j * part, device_s * MAX_DEVICE_WATTS),
    )
