"""Which blocks belong to one conversation alone: those that it may declare useless.

A conversation owns the blocks that its sequences were the first to compute, until a sequence of another one, or of
none, starts behind them or computes them too. A sequence that is dropped and names no conversation is one of its own.
A block once shared is never owned again, so a system prompt outlives the first agent that used it. Ownership from
before this process started is unknown. The number of digests is bounded, and a tenant has half of them at most: beyond
that, the tenant with most of them loses digests of its least recently used conversation, whose blocks are then evicted
like all others.

A conversation may own so much that walking it would stop the engine. So no call walks more than its caller names or
allows, and a digest is spent again only after it was used in between.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from gpu_worker.core.sequence import Sequence

MAX_DIGESTS = 1 << 18


Key = tuple[bytes, str, str]
"""Salt, name, and id of the sequence where it has no name."""


@dataclass(slots=True, eq=False)
class _Session:
    """A conversation with the digests that it owns, one or more, the beginning of a prefix before its end.

    Attributes:
        unspent: Those computed or used since the device was asked to evict them first.
        spent: The others.
        is_over: It is no longer a conversation: its digests are to be spent everywhere, and are then of none.
    """

    tenant: str
    key: Key
    unspent: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    spent: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    is_over: bool = False

    def __len__(self) -> int:
        return len(self.unspent) + len(self.spent)

    def use(self, digest: bytes) -> None:
        """Take note that an owned digest was used."""
        if digest in self.spent:
            del self.spent[digest]
            self.unspent[digest] = None

    def pop_oldest(self) -> bytes:
        """Take out a digest, spent ones first."""
        return (self.spent or self.unspent).popitem(last=False)[0]


@dataclass(slots=True)
class _Tenant:
    num_digests: int = 0
    sessions: OrderedDict[Key, _Session] = field(default_factory=OrderedDict)


class Sessions:
    """Conversations of all tenants. Not thread safe."""

    def __init__(self, max_digests: int = MAX_DIGESTS) -> None:
        self._max_digests = max_digests
        self._num_digests = 0
        self._tenants: dict[str, _Tenant] = {}
        self._owners: dict[bytes, _Session] = {}
        self._shared: OrderedDict[bytes, None] = OrderedDict()
        self._over: deque[_Session] = deque()

    def __len__(self) -> int:
        return len(self._owners)

    def starts_behind(self, sequence: Sequence, digests: Iterable[bytes]) -> None:
        """Take note of a sequence that uses these blocks: those of other conversations are shared from now on."""
        if not self._owners:
            return
        own = self._find(sequence)
        for digest in digests:
            owner = self._owners.get(digest)
            if owner is None:
                continue
            if owner is own:
                owner.use(digest)
                continue
            self._disown(owner, digest)
            if not owner.is_over:
                self._shared[digest] = None
        while len(self._shared) > self._max_digests // 4:
            self._shared.popitem(last=False)

    def computed(self, sequence: Sequence, new: Iterable[bytes]) -> None:
        """Take note of blocks that a sequence of a conversation was the first to compute, in prefix order."""
        if (key := _key(sequence)) is None:
            return
        session = self._find(sequence) or _Session(sequence.tenant, key)
        before = len(session)
        for digest in new:
            owner = self._owners.get(digest)
            if owner is session:
                session.use(digest)
            elif owner is not None and owner.is_over:
                self._disown(owner, digest)
                owner = None
            if owner is None and digest not in self._shared:
                self._owners[digest] = session
                session.unspent[digest] = None
        if not session:
            return
        tenant = self._tenants.setdefault(sequence.tenant, _Tenant())
        tenant.num_digests += len(session) - before
        self._num_digests += len(session) - before
        tenant.sessions[key] = session
        tenant.sessions.move_to_end(key)
        self._forget(tenant, tenant.num_digests - self._max_digests // 2)
        while (excess := self._num_digests - self._max_digests) > 0:
            self._forget(max(self._tenants.values(), key=lambda each: each.num_digests), excess)

    def spend(self, sequence: Sequence, current: Iterable[bytes], limit: int) -> list[bytes]:
        """Return what the sequence's conversation owns besides these blocks and is not spent; from now on it is.

        These are `limit` digests at most, in prefix order.
        """
        session = self._find(sequence)
        if session is None or not session.unspent or not limit:
            return []
        kept = set(current)
        spent = list(islice((digest for digest in session.unspent if digest not in kept), limit))
        for digest in spent:
            del session.unspent[digest]
            session.spent[digest] = None
        return spent

    def end(self, sequence: Sequence, current: Iterable[bytes] = ()) -> None:
        """Take note that what the sequence's conversation owns besides these blocks is of no use any more."""
        session = self._find(sequence)
        if session is None:
            return
        kept = [digest for digest in dict.fromkeys(current) if self._owners.get(digest) is session]
        for digest in kept:
            self._disown(session, digest)
        if session:
            session.is_over = True
            self._count_lost(session, len(session))
            self._over.append(session)
        self.computed(sequence, kept)

    def pop_outdated(self, limit: int) -> list[bytes]:
        """Return useless digests, each once: from now on no conversation owns them.

        These are `limit` digests at most, each conversation's in prefix order except those that were spent and used
        again.
        """
        outdated: list[bytes] = []
        while self._over and len(outdated) < limit:
            if not self._over[0]:
                self._over.popleft()
                continue
            digest = self._over[0].pop_oldest()
            del self._owners[digest]
            outdated.append(digest)
        return outdated

    def _find(self, sequence: Sequence) -> _Session | None:
        key, tenant = _key(sequence), self._tenants.get(sequence.tenant)
        return None if key is None or tenant is None else tenant.sessions.get(key)

    def _disown(self, owner: _Session, digest: bytes) -> None:
        del self._owners[digest]
        (owner.spent if digest in owner.spent else owner.unspent).pop(digest)
        if not owner.is_over:
            self._count_lost(owner, 1)

    def _forget(self, tenant: _Tenant, count: int) -> None:
        """Take note that `count` blocks of the tenant, or all, are of no conversation any more."""
        for _ in range(min(count, tenant.num_digests)):
            session = next(iter(tenant.sessions.values()))
            del self._owners[session.pop_oldest()]
            self._count_lost(session, 1)

    def _count_lost(self, session: _Session, count: int) -> None:
        """Count digests that a conversation has no more; one that is over, or has none, is not kept."""
        tenant = self._tenants[session.tenant]
        tenant.num_digests -= count
        self._num_digests -= count
        if session.is_over or not session:
            del tenant.sessions[session.key]
            if not tenant.sessions:
                del self._tenants[session.tenant]


def _key(sequence: Sequence) -> Key | None:
    """Return what names the sequence's conversation, None where nothing will be asked of it."""
    hints = sequence.hints
    if hints is None or not (hints.session_id or hints.drop):
        return None
    return (sequence.salt, hints.session_id, "") if hints.session_id else (sequence.salt, "", sequence.id)
