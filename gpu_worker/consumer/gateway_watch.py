"""Requests whose clients no longer wait: those of gateways that are silent, and those that were cancelled.

A cancellation is remembered, because it may arrive before its request. Who is silent is decided by the periodic review
alone, which knows whether this worker was paused: heartbeats that came meanwhile may lie unread.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from shared.features import READY
from shared.messages import UNDECODABLE, Features

# With a heartbeat and a review each second, the work of a dead gateway stops within five.
SILENCE_S = 3.5
# After this time the requests of a lost gateway are useless even if it returns: its clients have given up.
GIVE_UP_S = 60.0
_FORGET_S = 600.0
# Limit on gateways that are distinguished, so invented names cannot fill the memory of a worker.
MAX_GATEWAYS = 4096
_SUBJECT_PREFIX = "hr.gateway."
_REPLY_PREFIX = "hr.tok."

MAX_REMEMBERED = 10_000
MEMORY_S = 120.0


class _GatewayBeat(msgspec.Struct, frozen=True, tag="gateway"):
    features: Features = ()


_decode = msgspec.msgpack.Decoder(_GatewayBeat).decode


class GatewayWatch:
    """When each gateway was last seen. One that was never seen is not silent. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._heard_at: dict[str, float] = {}
        # Silence in seconds of those that are silent, as of the latest review.
        self._silences: dict[str, float] = {}
        # Those that know the queue `ready`.
        self._knowing: set[str] = set()

    def note_features(self, subject: str, data: bytes) -> None:
        """Record what a gateway says that it understands; a message that is not a heartbeat says nothing."""
        name = subject.removeprefix(_SUBJECT_PREFIX)
        try:
            features = _decode(data).features
        except UNDECODABLE:
            features = ()
        if READY in features and (name in self._knowing or len(self._knowing) < MAX_GATEWAYS):
            self._knowing.add(name)
        else:
            self._knowing.discard(name)

    def knows_ready(self, reply: str) -> bool:
        """Return whether the gateway behind this frame subject understands requests whose prompt is computed."""
        return reply.removeprefix(_REPLY_PREFIX) in self._knowing

    def note_heartbeat(self, subject: str, now: float) -> None:
        """Record a heartbeat; the last token of its subject is also the last token of the gateway's frame subject."""
        name = subject.removeprefix(_SUBJECT_PREFIX)
        # Later heartbeats come last, so that the first one is of the gateway that has been silent for longest.
        self._heard_at.pop(name, None)
        self._heard_at[name] = now
        self._silences.pop(name, None)
        if len(self._heard_at) > MAX_GATEWAYS:
            oldest = next(iter(self._heard_at))
            del self._heard_at[oldest]
            self._silences.pop(oldest, None)

    def restart(self, now: float) -> None:
        """Restart the silence of all gateways: this worker was paused or disconnected."""
        self._heard_at = {token: now for token, heard_at in self._heard_at.items() if now - heard_at < _FORGET_S}
        self._silences = {}

    def review(self, now: float) -> None:
        """Decide which gateways are silent, in a round that does not follow a pause of this worker."""
        silences = {name: now - heard_at for name, heard_at in self._heard_at.items()}
        self._silences = {name: silence_s for name, silence_s in silences.items() if silence_s > SILENCE_S}

    def is_silent(self, reply: str) -> bool:
        """Return whether the gateway that gets its frames on this subject has been silent for too long."""
        return reply.removeprefix(_REPLY_PREFIX) in self._silences

    def is_given_up(self, reply: str) -> bool:
        """Return whether it has been silent for so long that none of its clients can be waiting."""
        return self._silences.get(reply.removeprefix(_REPLY_PREFIX), 0.0) > GIVE_UP_S


class Cancellations:
    """Bounded in number and time: the oldest are forgotten first."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, tuple[int | None, float]] = OrderedDict()

    def add(self, request_id: str, epoch: int | None, now: float) -> None:
        """Remember that attempts up to `epoch`, or all, are cancelled. `now` is monotonic seconds."""
        known = self._by_id.pop(request_id, None)
        if known is not None and (known[0] is None or epoch is None):
            epoch = None
        elif known is not None and known[0] is not None and epoch is not None:
            epoch = max(epoch, known[0])
        self._by_id[request_id] = (epoch, now)
        while len(self._by_id) > MAX_REMEMBERED or next(iter(self._by_id.values()))[1] < now - MEMORY_S:
            self._by_id.popitem(last=False)

    def covers(self, request_id: str, epoch: int, now: float) -> bool:
        """Return whether this attempt of a request is cancelled."""
        known = self._by_id.get(request_id)
        return known is not None and known[1] >= now - MEMORY_S and (known[0] is None or epoch <= known[0])
