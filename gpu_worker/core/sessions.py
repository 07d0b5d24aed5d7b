"""Which blocks are of one conversation alone: those that it may say are of no more use.

A conversation owns the blocks that its sequences were the first to compute, until a sequence of another one, or of
none, starts behind them or computes them too. A sequence that is dropped and names no conversation is one of its own.
What was shared once is not owned again, so that a system prompt outlives the first agent that had it. What a
conversation owned before this process started is not known. The number of digests is bounded: beyond it, the
tenant with most of them loses its conversation that was not heard of for longest, whose blocks are then evicted like
all others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from gpu_worker.core.sequence import Sequence

MAX_DIGESTS = 1 << 18


Key = tuple[bytes, str, str]
"""Salt, name, and id of the sequence where it has no name."""


@dataclass(slots=True, eq=False)
class _Session:
    """A conversation with the digests that it owns, one or more, the beginning of a prefix before its end."""

    tenant: str
    key: Key
    digests: dict[bytes, None] = field(default_factory=dict)


@dataclass(slots=True)
class _Tenant:
    num_digests: int = 0
    sessions: OrderedDict[Key, _Session] = field(default_factory=OrderedDict)


class Sessions:
    """Conversations of all tenants. Not thread safe."""

    def __init__(self, max_digests: int = MAX_DIGESTS) -> None:
        self._max_digests = max_digests
        self._tenants: dict[str, _Tenant] = {}
        self._owners: dict[bytes, _Session] = {}
        self._shared: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._owners)

    def starts_behind(self, sequence: Sequence, digests: Iterable[bytes]) -> None:
        """Take note of a sequence that uses these blocks: those of other conversations are shared from now on."""
        if not self._owners:
            return
        own = self._find(sequence)
        for digest in digests:
            owner = self._owners.get(digest)
            if owner is not None and owner is not own:
                self._disown(owner, digest)
                self._shared[digest] = None
        while len(self._shared) > self._max_digests // 4:
            self._shared.popitem(last=False)

    def computed(self, sequence: Sequence, new: Iterable[bytes]) -> None:
        """Take note of blocks that a sequence of a conversation was the first to compute, in prefix order."""
        if (key := _key(sequence)) is None:
            return
        session = self._find(sequence) or _Session(sequence.tenant, key)
        before = len(session.digests)
        for digest in new:
            if digest not in self._owners and digest not in self._shared:
                self._owners[digest] = session
                session.digests[digest] = None
        if not session.digests:
            return
        tenant = self._tenants.setdefault(sequence.tenant, _Tenant())
        tenant.num_digests += len(session.digests) - before
        tenant.sessions[key] = session
        tenant.sessions.move_to_end(key)
        while len(self._owners) > self._max_digests:
            self._forget_one()

    def outdated(self, sequence: Sequence, current: Iterable[bytes] = ()) -> list[bytes]:
        """Return what the sequence's conversation owns besides these blocks, in prefix order."""
        session = self._find(sequence)
        if session is None:
            return []
        kept = set(current)
        return [digest for digest in session.digests if digest not in kept]

    def disown(self, digests: Iterable[bytes]) -> None:
        """Take note that these blocks are of no conversation any more."""
        for digest in digests:
            if (owner := self._owners.get(digest)) is not None:
                self._disown(owner, digest)

    def _find(self, sequence: Sequence) -> _Session | None:
        key, tenant = _key(sequence), self._tenants.get(sequence.tenant)
        return None if key is None or tenant is None else tenant.sessions.get(key)

    def _disown(self, owner: _Session, digest: bytes) -> None:
        tenant = self._tenants[owner.tenant]
        del self._owners[digest]
        del owner.digests[digest]
        tenant.num_digests -= 1
        if not owner.digests:
            del tenant.sessions[owner.key]
            if not tenant.sessions:
                del self._tenants[owner.tenant]

    def _forget_one(self) -> None:
        tenant = max(self._tenants.values(), key=lambda each: each.num_digests)
        self.disown(list(next(iter(tenant.sessions.values())).digests))


def _key(sequence: Sequence) -> Key | None:
    """Return what names the sequence's conversation, None where nothing will be asked of it."""
    hints = sequence.hints
    if hints is None or not (hints.session_id or hints.drop):
        return None
    return (sequence.salt, hints.session_id, "") if hints.session_id else (sequence.salt, "", sequence.id)
