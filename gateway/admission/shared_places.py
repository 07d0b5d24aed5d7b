"""Places that gateways have promised, in Redis: a client may return to another gateway than the one that refused it.

Used only while several gateways are alive. A promise is offered here when it is made and withdrawn when it is used,
both without waiting. The gateway that takes it holds it alone. One sorted set per model, key and body: each member is a
place, scored by its return time in Unix milliseconds. It stays for a while after its time, so that the one that
promised it learns whether another kept the promise.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.admission.caller import Caller
from gateway.admission.drain_calendar import HORIZON_S
from gateway.admission.reservations import GRACE_S, Reservation
from gateway.cache.redis_client import RedisCache, Script
from gateway.cache.redis_pipeline import Argument
from shared.background_tasks import BackgroundTasks
from shared.bounds import NumRequests, NumTokens, Seconds, UnixSeconds
from shared.messages import UNDECODABLE

# More offers than this under way are not made: Redis is too slow for them.
MAX_PENDING = 1024

_OFFER = Script(
    """
redis.call('ZADD', KEYS[1], ARGV[1], ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
"""
)

# How long a place is remembered after its time: its gateway settles it with the next request for the model.
_REMEMBERED_S = 600.0

# ARGV: before when places are forgotten, the earliest and the latest return time of one that may be taken.
_TAKE = Script(
    """
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ARGV[1])
local found = redis.call('ZRANGEBYSCORE', KEYS[1], ARGV[2], ARGV[3], 'LIMIT', 0, 1)
if #found == 0 then return '' end
redis.call('ZREM', KEYS[1], found[1])
return found[1]
"""
)

_WITHDRAW = Script("return redis.call('ZREM', KEYS[1], ARGV[1])")


class _Place(msgspec.Struct, frozen=True, array_like=True):
    """A reservation as other gateways read it. Times are Unix seconds."""

    ticket: Annotated[str, Meta(max_length=64)]
    key_id: str
    size: tuple[NumRequests, NumTokens]
    cost_s: Seconds
    since: UnixSeconds
    return_at: UnixSeconds
    is_booked: bool
    promised_wait_s: Seconds = 0.0


class SharedPlaces:
    """One gateway's access to the places of all."""

    def __init__(self, redis: RedisCache, clock: Callable[[], float], wall: Callable[[], float] = time.time) -> None:
        """Translate between `clock`, by which reservations are kept here, and Unix time."""
        self._redis = redis
        self._clock = clock
        self._wall = wall
        self._tasks = BackgroundTasks()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(_Place).decode

    def offer(self, model: str, reservation: Reservation) -> bytes:
        """Let other gateways find a reservation; return the token that withdraws it."""
        offset = self._wall() - self._clock()
        shared = {name: getattr(reservation, name) for name in _Place.__struct_fields__}
        shared |= {"since": reservation.since + offset, "return_at": reservation.return_at + offset}
        place = _Place(**shared)
        member = self._encode(place)
        lifetime = _milliseconds(HORIZON_S + _REMEMBERED_S)
        arguments: list[Argument] = [_milliseconds(place.return_at), member, lifetime]
        self._send(self._redis.run_script(_OFFER, [_key(model, reservation.identity)], arguments))
        return member

    def withdraw(self, model: str, reservation: Reservation, member: bytes) -> None:
        """Take back an offer: the client has returned here."""
        self._send(self._redis.run_script(_WITHDRAW, [_key(model, reservation.identity)], [member]))

    def settle(self, model: str, reservation: Reservation, member: bytes, unused: Callable[[], None]) -> None:
        """Take back an offer whose time is over, and call `unused` unless another gateway has taken it."""

        async def withdraw() -> None:
            removed = await self._redis.run_script(_WITHDRAW, [_key(model, reservation.identity)], [member])
            if removed != 0:
                unused()

        if not self._send(withdraw()):
            unused()

    async def take(self, model: str, caller: Caller) -> Reservation | None:
        """Return the place for which a caller returns, wherever it was promised; no other gets it any more."""
        now = self._wall()
        latest: Argument = "+inf" if caller.is_retry else _milliseconds(now)
        arguments: list[Argument] = [_milliseconds(now - _REMEMBERED_S), _milliseconds(now - GRACE_S), latest]
        member = await self._redis.run_script(_TAKE, [_key(model, caller.identity)], arguments)
        if not isinstance(member, bytes) or not member:
            return None
        try:
            place = self._decode(member)
        except UNDECODABLE:
            return None
        if place.key_id != caller.key_id:
            return None
        offset = now - self._clock()
        return Reservation(
            place.ticket,
            caller.key_id,
            caller.tenant,
            caller.identity,
            place.size,
            place.cost_s,
            place.since - offset,
            place.return_at - offset,
            place.is_booked,
            promised_wait_s=min(HORIZON_S, place.promised_wait_s),
        )

    def _send(self, call: Coroutine[Any, Any, object]) -> bool:
        """Let a call run unless Redis is away or too slow; return whether it does."""
        if len(self._tasks) >= MAX_PENDING or not self._redis.is_available:
            call.close()
            return False
        self._tasks.spawn(call)
        return True


def _key(model: str, identity: bytes) -> str:
    return f"hr:place:{hashlib.sha256(model.encode()).hexdigest()[:16]}:{identity.hex()}"


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
