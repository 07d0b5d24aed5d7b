"""Keeps the timelines of requests that have ended lately, encoded, and knows those that run.

It hears of a request twice: from the observer of requests, when it comes and when its answer has ended, and from the
dispatcher, of each of its sequences. The two may come in either order: the stream of a client that left goes on, and an
answer from the cache has no sequence. What is kept is bounded in number, bytes and time. Where it is full, the tenant
with the most requests loses its oldest one; those that were refused before their tenant was known have a small room of
their own, so requests without a key cannot evict others. The one writer is the event loop's thread.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

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
"""For how long a cancelled sequence's worker may still tell what it took."""
_MAX_LATE = 4096
# Between two clocks that run at different speeds, and frames under way.
_SLACK_S = 1.0


@dataclass(slots=True)
class _Entry:
    """What is known of a request that runs: its timeline so far, when it is asked for, and its ended sequences."""

    id: str
    began_at: float
    told: Callable[[], Timeline]
    sequences: list[SequenceLife] = field(default_factory=list)
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class _Kept:
    """A request that ended at `ended`, in Unix seconds, and its encoded timeline."""

    id: str
    tenant: str
    ended: float
    content: bytes


@dataclass(slots=True)
class _Late:
    """A sequence whose end was decided here, and whose worker may yet tell what it took."""

    key: str
    tenant: str
    model: str
    worker: str
    epoch: int
    claimed_at: float | None
    until: float


class TimelineKeeper:
    """Keeps the last `max_kept` requests for fifteen minutes at most."""

    def __init__(
        self,
        gateway: str,
        max_kept: int,
        usage: UsageLedger,
        *,
        shows_prompts: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keep nothing yet.

        Args:
            gateway: Name of this process.
            max_kept: Requests of tenants that have ended; 0 keeps none at all.
            usage: Counts what attempts have taken of devices.
            shows_prompts: Keep the ends of prompts, too.
            clock: Monotonic seconds, as of the event loop.
        """
        self.gateway = gateway
        self.shows_prompts = shows_prompts
        self._max_kept = max_kept
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Timeline).decode
        self._usage = usage
        self._clock = clock
        self._running: dict[str, _Entry] = {}
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._of_tenant: dict[str, OrderedDict[str, None]] = {}
        self._by_count: dict[int, dict[str, None]] = {}
        self._most = 0
        self._late: OrderedDict[str, _Late] = OrderedDict()
        self._flights: Callable[[], Iterable[Flight]] = tuple
        self._num_devices: Callable[[str], int] = lambda worker: 1

    def watch(self, flights: Callable[[], Iterable[Flight]], num_devices: Callable[[str], int]) -> None:
        """Attach the current attempts of these flights to running requests. `num_devices` counts a worker's."""
        self._flights, self._num_devices = flights, num_devices

    def request_began(self, key: str, request_id: str, began_at: float, told: Callable[[], Timeline]) -> None:
        """Take note of a request.

        Args:
            key: The ids of its sequences begin with it; no other request has it.
            request_id: Its `x-request-id`.
            began_at: When it came.
            told: Returns its timeline so far, without its sequences.
        """
        if self._max_kept:
            self._running[key] = _Entry(request_id, began_at, told)

    def request_ended(self, key: str, timeline: Timeline) -> None:
        """Keep a request, with the sequences that have ended."""
        if not self._max_kept:
            return
        entry = self._running.pop(key, None)
        if entry is not None and entry.sequences:
            # The list is new and not shared.
            timeline.sequences.extend(entry.sequences)
            timeline = replace(timeline, left_out=entry.left_out) if entry.left_out else timeline
        self._keep(key, timeline)

    def sequence_ended(self, flight: Flight, end: str, finish: Finish | None) -> None:
        """Take note of a sequence that has ended."""
        key, now = key_of(flight.id), self._clock()
        if finish is None and flight.worker is not None and flight.epoch not in flight.log.receipts:
            self._expect(flight, key, now)
        if not self._max_kept:
            return
        reason = end if finish is None else finish.reason
        entry = self._running.get(key)
        if entry is not None:
            _add(entry, _life(flight, reason, now, entry.began_at))
            return
        kept = self._kept.get(key)
        if kept is None:
            return  # its answer was given elsewhere, or long ago
        timeline = self._decode(kept.content)
        began_at = now - (time.time() - timeline.began)
        entry = _Entry(kept.id, began_at, lambda: timeline, timeline.sequences, timeline.left_out)
        _add(entry, _life(flight, reason, now, began_at))
        self._keep(key, replace(timeline, sequences=entry.sequences, left_out=entry.left_out))

    def receipt_came(self, worker: str, delta: Delta, flight: Flight | None) -> None:
        """Count what an attempt took of its worker, once, whenever it comes.

        Args:
            worker: Who tells.
            delta: The attempt's last, with a receipt.
            flight: Whose attempt it is; None if the flight has ended.
        """
        assert delta.finish is not None
        receipt, now = delta.finish.receipt, self._clock()
        if receipt is None:
            return
        if flight is not None:
            log, request = flight.log, flight.request
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
        running = [self._so_far(key, entry) for key, entry in self._running.items() if entry.id == request_id]
        self._drop_old()
        kept = [each.content for each in self._kept.values() if each.id == request_id]
        return [*reversed(running), *map(self._decode, reversed(kept))]

    def summaries(self, order: Order, limit: int) -> list[Summary]:
        """Return the first of the requests that are kept, by an order; `failed` are those that were not answered."""
        self._drop_old()
        found = [_summary(self._decode(each.content)) for each in self._kept.values()]
        if order == "failed":
            found = [each for each in found if each.status >= 400 or each.outcome != "completed"]
        return sorted(found, key=sort_key(order), reverse=True)[:limit]

    def _so_far(self, key: str, entry: _Entry) -> Timeline:
        now, timeline = self._clock(), entry.told()
        shown = _Entry(entry.id, entry.began_at, entry.told, list(entry.sequences), entry.left_out)
        for flight in self._flights():
            if key_of(flight.id) == key:
                _add(shown, _life(flight, "", now, entry.began_at))
        return replace(timeline, sequences=shown.sequences, left_out=shown.left_out)

    def _keep(self, key: str, timeline: Timeline) -> None:
        content = self._encode(timeline)
        if len(content) > MAX_TIMELINE_BYTES:
            timeline = replace(timeline, sequences=[], left_out=len(timeline.sequences) + timeline.left_out)
            content = self._encode(timeline)
        tenant = timeline.tenant
        self._kept[key] = _Kept(timeline.id, tenant, timeline.began + timeline.ended_s, content)
        self._kept.move_to_end(key)
        own = self._of_tenant.setdefault(tenant, OrderedDict())
        num_before = len(own)
        own[key] = None
        own.move_to_end(key)
        self._recount(tenant, num_before)
        self._make_room(tenant)
        self._drop_old()

    def _make_room(self, tenant: str) -> None:
        """Evict one request if there are too many; `tenant` is "" for requests without one."""
        without = self._of_tenant.get("", ())
        if not tenant:
            if len(without) > min(MAX_WITHOUT_TENANT, self._max_kept):
                self._drop(next(iter(without)))
        elif len(self._kept) - len(without) > self._max_kept:
            largest = next(iter(self._by_count[self._most]))
            self._drop(next(iter(self._of_tenant[largest])))

    def _drop(self, key: str) -> None:
        tenant = self._kept.pop(key).tenant
        own = self._of_tenant[tenant]
        del own[key]
        self._recount(tenant, len(own) + 1)
        if not own:
            del self._of_tenant[tenant]

    def _recount(self, tenant: str, num_before: int) -> None:
        """Note that a tenant has one more or one less: who has most is known without looking at all tenants."""
        num = len(self._of_tenant[tenant])
        if not tenant or num == num_before:
            return
        if num_before:
            alike = self._by_count[num_before]
            del alike[tenant]
            if not alike:
                del self._by_count[num_before]
        if num:
            self._by_count.setdefault(num, {})[tenant] = None
        self._most = max(self._most, num)
        if self._most not in self._by_count:
            self._most -= 1

    def _drop_old(self) -> None:
        """Let go of requests that ended long ago; they are kept in the order in which they ended."""
        oldest = time.time() - KEPT_S
        while self._kept and self._kept[key := next(iter(self._kept))].ended < oldest:
            self._drop(key)

    def _expect(self, flight: Flight, key: str, now: float) -> None:
        assert flight.worker is not None
        while self._late and (len(self._late) >= _MAX_LATE or next(iter(self._late.values())).until < now):
            self._late.popitem(last=False)
        request = flight.request
        self._late[flight.id] = _Late(
            key, request.tenant, request.model, flight.worker, flight.epoch, flight.log.claimed_at, now + LATE_S
        )

    def _complete(self, late: _Late, flight_id: str, receipt: Receipt) -> None:
        entry, kept = self._running.get(late.key), self._kept.get(late.key)
        timeline = None if kept is None else self._decode(kept.content)
        lives = entry.sequences if entry is not None else [] if timeline is None else timeline.sequences
        for life in lives:
            if life.id == flight_id and life.attempts:
                life.attempts[-1] = replace(life.attempts[-1], receipt=receipt)
        if entry is None and timeline is not None:
            self._keep(late.key, timeline)


def sort_key(order: Order) -> Callable[[Summary], float]:
    """Return by what a list is sorted, the largest first."""
    if order == "slow":
        return lambda each: each.ended_s
    return lambda each: each.began + each.ended_s


def _add(entry: _Entry, life: SequenceLife) -> None:
    if len(entry.sequences) < MAX_SEQUENCES:
        entry.sequences.append(life)
    else:
        entry.left_out += 1


def _life(flight: Flight, end: str, now: float, began_at: float) -> SequenceLife:
    last = flight.attempt_ended(end, now, began_at)
    return SequenceLife(flight.id, [*flight.log.earlier(began_at), last] if flight.log.ended else [last])


def _holder(flight: Flight, epoch: int) -> tuple[str | None, float | None]:
    if epoch == flight.epoch:
        return flight.worker, flight.log.claimed_at
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
    return replace(
        receipt,
        num_devices=devices,
        device_s=device_s,
        prefill_s=min(receipt.prefill_s * part, device_s),
        rejected_s=min(receipt.rejected_s * part, device_s),
        recomputed_s=min(receipt.recomputed_s * part, device_s),
        energy_j=None if energy_j is None else min(energy_j * part, device_s * MAX_DEVICE_WATTS),
    )
