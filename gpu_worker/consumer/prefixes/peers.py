"""What other workers of the model announce of the prefixes that they hold, as their heartbeats say it.

An announcement is a hint and may be false or late. A worker that does not answer when it is asked is not believed for a
while.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from shared.adapter_calls import ResidentAdapters, is_resident
from shared.bounds import PeerName, TokensPerSecond, UnixSeconds
from shared.disaggregation import RoleNews
from shared.errors import InvalidNameError
from shared.messages import UNDECODABLE
from shared.prefixes import LINK_BYTES, MAX_ANNOUNCED, PrefixNews
from shared.services import Services
from shared.subjects import decode_name

HEARD_S = 2.0
"""Seconds of silence after which a worker is not asked."""
DISTRUST_S = 5.0
IN_VAIN_HALF_S = 10.0
"""Half-life of the count of requests that a worker was asked for and did not take: busy workers are asked again."""
MAX_IN_VAIN = 8.0
UNRELIABLE_IN_VAIN = 3.0
"""A worker that took none of this many requests lately is unreliable: it is asked last, and not waited for."""
MAX_PEERS = 1024
MAX_ASKED = 3


class PeerBeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """The part of `Heartbeat` that workers read of one another."""

    worker: PeerName
    started: UnixSeconds = 0.0
    draining: bool = False
    prefill_rate: TokensPerSecond = 0.0
    prefixes: PrefixNews | None = None
    resident_adapters: ResidentAdapters = b""
    services: Services = {}
    roles: RoleNews | None = None


_decode = msgspec.msgpack.Decoder(PeerBeat).decode


def peer_beat(subject: str, data: bytes) -> PeerBeat | None:
    """Read a worker's heartbeat; None if its subject is of another worker, since a login may be for one alone."""
    with contextlib.suppress(InvalidNameError, *UNDECODABLE):
        beat = _decode(data)
        return beat if decode_name(subject.rpartition(".")[2]) == beat.worker else None
    return None


@dataclass(slots=True)
class _Peer:
    links: set[bytes] = field(default_factory=set)
    heard_at: float = 0.0
    distrusted_until: float = 0.0
    prefill_rate: float = 0.0
    num_blank: int = 0
    adapters: ResidentAdapters = b""
    is_draining: bool = False
    num_in_vain: float = 0.0

    def note_in_vain(self) -> None:
        self.num_in_vain = min(MAX_IN_VAIN, self.num_in_vain + 1)

    @property
    def is_reliable(self) -> bool:
        return self.num_in_vain < UNRELIABLE_IN_VAIN

    def may_be_asked(self, now: float) -> bool:
        """Whether it takes requests, was heard lately, and has answered when it was asked."""
        return not self.is_draining and now - self.heard_at <= HEARD_S and now >= self.distrusted_until


class PeerPrefixes:
    """Owns the announcements. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._peers: dict[str, _Peer] = {}

    def note(self, beat: PeerBeat, now: float) -> None:
        """Take note of a heartbeat."""
        peer = self._peers.get(beat.worker)
        if peer is None:
            if len(self._peers) >= MAX_PEERS:
                self._peers = {name: peer for name, peer in self._peers.items() if now - peer.heard_at < HEARD_S}
            if len(self._peers) >= MAX_PEERS:
                return
            peer = self._peers[beat.worker] = _Peer()
        peer.num_in_vain *= 0.5 ** (max(0.0, now - peer.heard_at) / IN_VAIN_HALF_S)
        peer.heard_at, peer.is_draining, peer.prefill_rate = now, beat.draining, beat.prefill_rate
        news, peer.adapters = beat.prefixes, beat.resident_adapters
        peer.num_blank = 0 if news is None else news.num_blank
        if news is None or news.links is not None:
            peer.links = set() if news is None else set(_split(news.links or b""))
        elif len(peer.links) < 2 * MAX_ANNOUNCED:
            peer.links.update(_split(news.new_links))

    def distrust(self, worker: str, now: float) -> None:
        """Ask a worker nothing for a while."""
        if (peer := self._peers.get(worker)) is not None:
            peer.distrusted_until = now + DISTRUST_S
            peer.note_in_vain()

    def note_asked(self, worker: str, *, has_taken: bool) -> None:
        """Note whether a worker has taken the request that it was offered."""
        if (peer := self._peers.get(worker)) is not None:
            if has_taken:
                peer.num_in_vain = 0.0
            else:
                peer.note_in_vain()

    def is_reliable(self, worker: str) -> bool:
        """Return whether a worker that will have room later is worth a wait."""
        peer = self._peers.get(worker)
        return peer is not None and peer.is_reliable

    def holders(self, places: Mapping[bytes, int], now: float) -> list[tuple[int, str]]:
        """Return the workers that announce most of a chain, the best first, each with its last link's place.

        Ask unreliable workers last: only the first `MAX_ASKED` are asked.
        """
        found = []
        for worker, peer in self._peers.items():
            if not peer.may_be_asked(now):
                continue
            common = peer.links.intersection(places) if len(peer.links) < len(places) else places.keys() & peer.links
            if common:
                found.append((peer.is_reliable, max(map(places.__getitem__, common)), -round(peer.num_in_vain), worker))
        found.sort(reverse=True)
        return [(place, worker) for _, place, _, worker in found[:MAX_ASKED]]

    def having(self, adapter: str, now: float) -> list[str]:
        """Return workers that announce an adapter, by its digest, the most reliable and then the emptiest first."""
        return self._best(lambda peer: is_resident(adapter, peer.adapters), now)

    def emptier(self, num_blank: int, now: float) -> list[str]:
        """Return the workers that announce at least this many empty blocks, in the same order."""
        return self._best(lambda peer: peer.num_blank >= num_blank, now)

    def _best(self, is_fit: Callable[[_Peer], bool], now: float) -> list[str]:
        found = [
            (-round(peer.num_in_vain), peer.num_blank, worker)
            for worker, peer in self._peers.items()
            if peer.may_be_asked(now) and is_fit(peer)
        ]
        return [worker for *_, worker in sorted(found, reverse=True)[:MAX_ASKED]]

    def prefill_rate(self, worker: str) -> float:
        """Return the prompt tokens that a worker says to compute in a second."""
        peer = self._peers.get(worker)
        return 0.0 if peer is None else peer.prefill_rate


def _split(links: bytes) -> list[bytes]:
    return [links[start : start + LINK_BYTES] for start in range(0, len(links) - LINK_BYTES + 1, LINK_BYTES)]
