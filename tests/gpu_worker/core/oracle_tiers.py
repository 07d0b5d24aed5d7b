"""Tiers over the memory of the oracle runner: loads arrive late, in part, or never, and contents may be lost."""

from __future__ import annotations

import random
from collections.abc import Iterable

from gpu_worker.core.tiers import Wanted
from tests.gpu_worker.core.paged_oracle import OracleRunner

Content = list[int | None]


class OracleLoad:
    """A load of which each `tick` brings some contents."""

    def __init__(self, tiers: OracleTiers, wanted: list[Wanted]) -> None:
        self._tiers = tiers
        self._wanted = wanted
        self._arrived = [False] * len(wanted)
        self._has_ended = False
        self.hangs = tiers.random.random() < 0.15
        self.num_ended = 0

    def tick(self) -> None:
        tiers = self._tiers
        for _ in range(0 if self.hangs else tiers.random.randint(0, 3)):
            if self._has_ended or self.num_ended == len(self._wanted):
                return
            group, digest, block = self._wanted[self.num_ended]
            content = tiers.kept.get((group, digest))
            if content is not None and tiers.random.random() > 0.1:
                tiers.write(group, block, content)
                self._arrived[self.num_ended] = True
                tiers.num_loaded += 1
            self.num_ended += 1

    def end(self) -> list[bool]:
        if not self._has_ended and self.num_ended < len(self._wanted):
            # What was being written when it was ended is anything.
            group, _, block = self._wanted[self.num_ended]
            self._tiers.write(group, block, [-1])
        self._has_ended = True
        return self._arrived


class OracleTiers:
    """Keeps what blocks hold, and asserts that a digest names one content only."""

    def __init__(self, seed: int, num_windows: int) -> None:
        self.prefill_rate = 0.0
        self.random = random.Random(seed)
        self.kept: dict[tuple[int, bytes], Content] = {}
        self.num_loaded = self.num_suspensions = 0
        self.loads: list[OracleLoad] = []
        self.retained: dict[bytes, float] = {}
        self.spent: set[bytes] = set()
        self.runner: OracleRunner
        self._state_group = num_windows + 1
        self._pending: dict[tuple[int, bytes], int] = {}

    def read(self, group: int, block: int) -> Content:
        if group == 0:
            return list(self.runner._memory[block])
        if group == self._state_group:
            return [self.runner._states[block]]
        return list(self.runner._window_memory[group - 1, block])

    def write(self, group: int, block: int, content: Content) -> None:
        size = self.runner.block_size
        if group == self._state_group:
            self.runner._states[block] = content[0]
        elif group == 0:
            self.runner._memory[block] = (content * size)[:size]
        else:
            self.runner._window_memory[group - 1, block] = (content * size)[:size]

    def has(self, group: int, digest: bytes) -> bool:
        return (group, digest) in self.kept

    def pays(self, wanted: Iterable[tuple[int, bytes]], num_tokens: int) -> bool:
        assert all(self.has(*name) for name in wanted)
        assert num_tokens > 0
        return self.random.random() > 0.1

    def load(self, salt: bytes, wanted: list[Wanted]) -> OracleLoad:
        self.flush()
        for group, _, block in wanted:
            # Until it arrives, a block holds anything.
            self.write(group, block, [-1])
        self.loads.append(OracleLoad(self, wanted))
        return self.loads[-1]

    def store(self, group: int, block: int, digest: bytes, salt: bytes) -> None:
        self._pending[group, digest] = block

    def evicted(self, block: int, digest: bytes) -> None:
        self._pending[0, digest] = block

    def flush(self) -> None:
        for (group, digest), block in self._pending.items():
            content = self.read(group, block)
            assert self.kept.setdefault((group, digest), content) == content, "a digest names two contents"
            assert -1 not in content, "a content was stored that a failed step has written"
            if self.random.random() < 0.05:
                del self.kept[group, digest]
        self._pending.clear()

    def forget(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            for group in range(self._state_group + 1):
                self.kept.pop((group, digest), None)
                self._pending.pop((group, digest), None)

    def retain(self, tenant: str, weight: float, digests: Iterable[bytes], until: float) -> None:
        self.retained.update(dict.fromkeys(digests, until))

    def spend(self, digests: Iterable[bytes]) -> None:
        self.spent.update(digests)

    def suspend(self) -> None:
        self.num_suspensions += 1

    def tick(self) -> None:
        for load in self.loads:
            load.tick()
