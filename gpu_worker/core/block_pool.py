"""Fixed-size KV blocks: who holds which, and which freed ones can still be found by their content.

Owns the reference count of every block, the stack of blank blocks, the order of eviction of freed blocks that keep
their content, and the index from content digest to block. Knows nothing of sequences; digests are made by
`prefix_cache`. Every block is in exactly one place: blank, cached (no holder, findable) or in use. Tiers that keep
content elsewhere are notified of evictions, and restore content by its digest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain

from gpu_worker.core.eviction_order import EvictionOrder
from gpu_worker.core.retention import Retention

Evicted = Callable[[int, bytes], None]
"""Told of a block, whose content is overwritten from now on, and of the digest of that content."""


class BlockPool:
    """Hands out blocks by id. All operations are O(1) per block.

    Attributes:
        order: Contents of blocks without a holder, as they are evicted.
    """

    def __init__(self, num_blocks: int, evicted: Evicted | None = None, retained_share: float = 0.0) -> None:
        assert num_blocks > 0
        self._evicted = evicted
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        self.order = EvictionOrder(Retention(int(num_blocks * retained_share)))
        self._block_of: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: blank ones and cached ones."""
        return len(self._blank) + len(self.order)

    @property
    def num_blank(self) -> int:
        """Blocks that hold nothing which could be found."""
        return len(self._blank)

    def is_in_use(self, block: int) -> bool:
        """Return whether a sequence holds the block."""
        return self._ref_counts[block] > 0

    def num_holders(self, block: int) -> int:
        """Return how many sequences hold the block."""
        return self._ref_counts[block]

    def num_freed_by(self, tables: Iterable[list[int]], kept: Iterable[int] = ()) -> int:
        """Return how many blocks other than `kept` get free when the holders of these tables release them."""
        counts = Counter(chain.from_iterable(tables))
        for block in kept:
            del counts[block]
        return sum(self._ref_counts[block] == count for block, count in counts.items())

    def is_findable(self, block: int) -> bool:
        """Return whether the block can be found by its content."""
        return self._digests[block] is not None

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks for one holder: blank ones first, then cached ones in the order of eviction."""
        assert count <= len(self._blank) + len(self.order), "allocate() without asking num_available first"
        blocks = []
        for _ in range(count):
            block = self._blank.pop() if self._blank else self._evict()
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def admit(self, digest: bytes) -> int | None:
        """Take a block for one holder, who brings content of this digest into it before a step reads it.

        It can be found by the digest at once. None where a block has that content already, or none is free.
        """
        if digest in self._block_of or not self.num_available:
            return None
        (block,) = self.allocate(1)
        self.label(block, digest)
        return block

    def find(self, digest: bytes) -> int | None:
        """Return the block whose content has this digest, in use or cached."""
        return self._block_of.get(digest)

    def share(self, blocks: Iterable[int]) -> None:
        """Add one holder to each block, which is in use or cached."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                digest = self._digests[block]
                assert digest is not None
                self.order.remove(digest)
            self._ref_counts[block] += 1

    def label(self, block: int, digest: bytes) -> None:
        """Make a block in use findable by its content; another block with the same content keeps the name."""
        assert self._ref_counts[block] > 0
        assert self._digests[block] is None
        if self._block_of.setdefault(digest, block) == block:
            self._digests[block] = digest

    def unlabel(self, blocks: list[int]) -> None:
        """Take the content of these blocks, which are in use, out of the prefix cache."""
        for block in blocks:
            assert self._ref_counts[block] > 0
            if (digest := self._digests[block]) is not None:
                del self._block_of[digest]
                self._digests[block] = None
                self.order.retention.discard(digest)

    def forget(self, digest: bytes) -> None:
        """Take the block whose content has this digest out of the prefix cache, if there is one."""
        block = self._block_of.pop(digest, None)
        if block is None:
            return
        self._digests[block] = None
        self.order.retention.discard(digest)
        if self._ref_counts[block] == 0:
            self.order.remove(digest)
            self._blank.append(block)

    def retain(self, tenant: str, weight: float, digests: Iterable[bytes], until: float) -> None:
        """Evict last, until a time, the blocks that have contents of these digests."""
        self.order.retain(tenant, weight, [digest for digest in digests if digest in self._block_of], until)

    def release(self, blocks: list[int], *, is_spent: bool = False) -> None:
        """Drop one holder of each block, in prefix order: the last are reused first, spent ones before all others."""
        for block in reversed(blocks):
            count = self._ref_counts[block] - 1
            assert count >= 0, f"block {block} was released twice"
            self._ref_counts[block] = count
            if count:
                continue
            digest = self._digests[block]
            if digest is None:
                self._blank.append(block)
            else:
                self.order.add(digest, goes_first=is_spent)

    def ref_counts(self) -> dict[int, int]:
        """Return the number of holders of each block in use."""
        return {block: count for block, count in enumerate(self._ref_counts) if count > 0}

    def check_holders(self, tables: Iterable[list[int]], others: Iterable[int]) -> None:
        """Assert that these tables, and `others`, hold each block as often as it is counted."""
        self.check_integrity()
        counts = Counter(others)
        for table in tables:
            assert len(set(table)) == len(table)
            counts.update(table)
        assert counts == self.ref_counts(), "a block has no holder or is counted wrongly"

    def check_integrity(self) -> None:
        """Assert that every block is in exactly one place and the index names each labelled block once."""
        in_use = self.ref_counts().keys()
        blank = set(self._blank)
        assert len(blank) == len(self._blank), "a blank block is listed twice"
        cached = {self._block_of[digest] for digest in self.order}
        assert len(cached) == len(self.order)
        assert not in_use & blank
        assert not cached & (in_use | blank)
        assert len(in_use) + len(blank) + len(cached) == self.num_blocks, "blocks were lost"
        labelled = {block: digest for block, digest in enumerate(self._digests) if digest is not None}
        assert {digest: block for block, digest in labelled.items()} == self._block_of
        assert not blank & labelled.keys()

    def _evict(self) -> int:
        digest = self.order.pop()
        assert digest is not None
        block = self._block_of.pop(digest)
        self._digests[block] = None
        if self._evicted is not None:
            self._evicted(block, digest)
        return block
