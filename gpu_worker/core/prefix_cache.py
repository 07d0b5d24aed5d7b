"""Finds blocks that already hold the KV of a sequence's prefix.

The KV of a block depends on every token before it, so its name is a digest chained over (parent digest, token ids),
rooted in the tenant's salt: two tenants never share. SHA-256, because a collision would show one client another's
text. Digests are made block by block when first needed, and kept in `Sequence.block_digests`: a prompt that misses at
once costs one digest, and nothing is ever hashed twice. Only full blocks have a digest. Where a block holds a part of
an image, its digest is made of the image's digest, and of which part it is, too: the tokens are those of any image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Values
from hashlib import sha256
from struct import Struct
from typing import Protocol

from gpu_worker.core.block_pool import BlockPool
from gpu_worker.core.media import media_key
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.sessions import Sessions
from gpu_worker.core.tiers import FULL, KvTiers

Kept = Callable[[bytes], bool]


class HitRule(Protocol):
    """What a further group of layers says of a prefix."""

    def resumable(self, digests: Values[bytes], num_blocks: int, is_kept: Kept | None = None) -> int:
        """Return the most blocks, `num_blocks` at most, behind which a sequence of these digests can go on.

        What `is_kept` says is kept elsewhere counts too.
        """


class PrefixCache:
    """Chains digests and asks the pool's index for them."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        rules: Values[HitRule] = (),
        tiers: KvTiers | None = None,
        sessions: Sessions | None = None,
    ) -> None:
        self._sessions = Sessions() if sessions is None else sessions
        self._pool = pool
        self._tiers = tiers
        self._rules = rules
        self._block_size = block_size
        self._pack = Struct(f"<{block_size}q").pack

    def match(self, sequence: Sequence) -> list[int]:
        """Return the blocks that hold the longest known prefix, in order, without taking them.

        At least the last token is left to compute, since its logits are needed. A sequence whose answer comes from
        computing the whole prompt matches nothing: its log probabilities, or the mean of its hidden vectors.
        """
        if sequence.needs_whole_prompt:
            return []
        blocks: list[int] = []
        for index in range((sequence.num_tokens - 1) // self._block_size):
            block = self._pool.find(self.digest(sequence, index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_resumable(self, sequence: Sequence, num_known: int) -> int:
        """Return how many of `num_known` blocks, which `match` found, can be gone on behind in all groups."""
        count = None
        while num_known != count:
            count = num_known
            for rule in self._rules:
                num_known = rule.resumable(sequence.block_digests, num_known)
        return num_known

    def publish(self, written: Iterable[tuple[Sequence, int]]) -> None:
        """Make the blocks of sequences findable that are full, as far as they were not yet.

        Args:
            written: Sequences, each with how many of its first tokens are in its blocks for good. Those that evict
                are left out: what follows an eviction does not depend on the tokens alone.
        """
        size, label, digest_of = self._block_size, self._pool.label, self._digest_of
        for sequence, num_written in written:
            if sequence.num_evicted_tokens:
                continue
            place, end = sequence.num_findable_blocks, num_written // size
            sequence.num_findable_blocks = end
            table, digests = sequence.block_table, sequence.block_digests
            first = place
            while place < end:
                if place == len(digests):
                    digests.append(digest_of(sequence, place))
                label(table[place], digests[place])
                place += 1
            if self._tiers is not None:
                for new in range(first, end):
                    self._tiers.store(FULL, table[new], digests[new], sequence.salt)
            if sequence.hints is not None or self._sessions:
                self._note_owner(sequence, range(first, end))

    def chain(self, sequence: Sequence, num_blocks: int) -> None:
        """Make the digests of the sequence's first blocks, whose tokens are known."""
        digests = sequence.block_digests
        for place in range(len(digests), num_blocks):
            digests.append(self._digest_of(sequence, place))

    def digest(self, sequence: Sequence, index: int) -> bytes:
        """Return the digest of full block `index`; those before it have been asked for already."""
        self.chain(sequence, index + 1)
        return sequence.block_digests[index]

    def _note_owner(self, sequence: Sequence, places: Iterable[int]) -> None:
        """Tell conversations which blocks the sequence was the first to publish, and which are others' too."""
        first: list[bytes] = []
        others: list[bytes] = []
        for place in places:
            digest = sequence.block_digests[place]
            is_first = self._pool.find(digest) == sequence.block_table[place]
            (first if is_first else others).append(digest)
        self._sessions.starts_behind(sequence, others)
        self._sessions.computed(sequence, first)

    def _digest_of(self, sequence: Sequence, place: int) -> bytes:
        """Compute the digest of a full block; those of all blocks before it are known."""
        parent = sequence.block_digests[-1] if place else sha256(sequence.salt).digest()
        start = place * self._block_size
        content = parent + self._pack(*sequence.token_ids[start : start + self._block_size])
        if sequence.media:
            content += media_key(sequence.media, start, start + self._block_size)
        return sha256(content).digest()
