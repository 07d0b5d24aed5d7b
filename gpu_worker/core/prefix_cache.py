"""Finds blocks that already hold the KV of a sequence's prefix.

The KV of a block depends on every token before it, so its name is a digest chained over (parent digest, token ids),
rooted in the tenant's salt: two tenants never share. SHA-256, because a collision would show one client another's
text. Digests are made block by block when first needed, and kept in `Sequence.block_digests`: a prompt that misses at
once costs one digest, and nothing is ever hashed twice. Only full blocks have a digest.
"""

from __future__ import annotations

from collections.abc import Sequence as Values
from hashlib import sha256
from struct import Struct
from typing import Protocol

from gpu_worker.core.block_pool import BlockPool
from gpu_worker.core.sequence import Sequence


class HitRule(Protocol):
    """What a further group of layers says of a prefix."""

    def resumable(self, digests: Values[bytes], num_blocks: int) -> int:
        """Return the most blocks, `num_blocks` at most, behind which a sequence of these digests can go on."""
        ...


class PrefixCache:
    """Chains digests and asks the pool's index for them."""

    def __init__(self, pool: BlockPool, block_size: int, rules: Values[HitRule] = ()) -> None:
        """Look up blocks of `block_size` tokens in `pool`; the groups of `rules` must be able to go on there too."""
        self._pool = pool
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
            block = self._pool.find(self._digest(sequence, index))
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

    def publish(self, sequence: Sequence, num_written: int) -> None:
        """Make the blocks findable that the sequence's first `num_written` tokens fill, as far as they were not yet."""
        first, end = sequence.num_findable_blocks, num_written // self._block_size
        sequence.num_findable_blocks = end
        if first >= end:
            return
        table, digests = sequence.block_table, sequence.block_digests
        if len(digests) < end:
            self.chain(sequence, end)
        for index in range(first, end):
            self._pool.label(table[index], digests[index])

    def chain(self, sequence: Sequence, num_blocks: int) -> None:
        """Make the digests of the sequence's first blocks, whose tokens are known."""
        digests, token_ids, size = sequence.block_digests, sequence.token_ids, self._block_size
        digest = digests[-1] if digests else sha256(sequence.salt).digest()
        for end in range((len(digests) + 1) * size, num_blocks * size + 1, size):
            digest = sha256(digest + self._pack(*token_ids[end - size : end])).digest()
            digests.append(digest)

    def _digest(self, sequence: Sequence, index: int) -> bytes:
        """Return the digest of full block `index`; those before it have been asked for already."""
        self.chain(sequence, index + 1)
        return sequence.block_digests[index]
