"""What the scheduler asks of memory below the device's: contents of blocks that are kept, and come back, by digest.

A name is a group of layers and a chain digest, which stands for all that the content depends on. Groups are numbered
as in block tables: 0 keeps all tokens, then come those of windows; recurrent states have the number behind these.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

FULL = 0
"""Number of the group that keeps all tokens."""


class Wanted(NamedTuple):
    """Content that a block, or a slot of states, is to get. Nothing else reads or writes the block meanwhile."""

    group: int
    digest: bytes
    block: int


class Load(Protocol):
    """Contents on their way to the device."""

    @property
    def num_ended(self) -> int:
        """Contents that have arrived, or were found unusable."""

    def end(self) -> list[bool]:
        """Stop, and say of each wanted content whether it arrived whole. No block is written to from now on."""


class KvTiers(Protocol):
    """Tiers of memory. Only the engine's thread calls them; no call waits for a disk or a device.

    Attributes:
        prefill_rate: Prompt tokens per second that the engine will compute, 0 while unknown: a load should be faster.
    """

    prefill_rate: float

    def has(self, group: int, digest: bytes) -> bool:
        """Return whether the content is likely to be there (`lookup`). It may be gone when it is loaded."""

    def pays(self, wanted: Iterable[tuple[int, bytes]], num_tokens: int) -> bool:
        """Return whether loading these contents is likely to take less time than computing `num_tokens` tokens."""

    def load(self, salt: bytes, wanted: list[Wanted]) -> Load:
        """Begin to bring contents of sequences with this salt to the device."""

    def store(self, group: int, block: int, digest: bytes, salt: bytes) -> None:
        """Keep the content of a block, unless it is kept already. It is copied by the next `flush` or `load`."""

    def evicted(self, block: int, digest: bytes) -> None:
        """Keep the content of a block of group 0, which is about to be overwritten, if it is not kept any more."""

    def flush(self) -> None:
        """Copy the contents to keep, in the order of the device's work. Call it before steps write to blocks."""

    def forget(self, digests: Iterable[bytes]) -> None:
        """Drop contents that may be wrong, in all groups and tiers."""

    def retain(self, tenant: str, weight: float, digests: Iterable[bytes], until: float) -> None:
        """Evict contents last, in all groups, until a time by the engine's clock, as far as the tenant's quota goes."""

    def spend(self, digests: Iterable[bytes]) -> None:
        """Evict contents before others, in all groups."""

    def suspend(self) -> None:
        """Use nothing that may hang for a while: a load has made no progress."""
