"""How many requests a worker should pull: what its free slots and blocks can hold, and a few ahead of need.

Requests left in the queue can go to any worker; pulled ones can only run here. Blocks are estimated from recent
requests. Where tenants hold more than their share, a full worker still pulls a few from the queues that go first: they
begin at once, because others give way (`Admission`). Where they do not begin, it pulls no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from gpu_worker.consumer.held_request import HeldRequests
from gpu_worker.core.block_budget import BlockBudget
from gpu_worker.core.scheduler_config import SchedulerConfig

_LOOK_AHEAD_SHARE = 8
_BATCH_LOOK_AHEAD_SHARE = 4
_MEMORY = 0.1


class PullCapacity:
    """Owns the running estimate of blocks per request, and the reservations for requests about to be held.

    Attributes:
        is_resting: Whether requests should go to other workers, because this one was paused a moment ago.
    """

    def __init__(self, held: HeldRequests, config: SchedulerConfig) -> None:
        self._held = held
        self._config = config
        self._look_ahead = max(1, config.max_num_seqs // _LOOK_AHEAD_SHARE)
        self._mean_blocks = 1.0
        self.is_resting: Callable[[], bool] = lambda: False
        self._num_reserved = self._num_reserved_blocks = 0

    @property
    def num_interactive(self) -> int:
        """Requests for which persons wait, those included that a place is kept for."""
        return self._held.count("interactive") + self._held.num_background + self._num_reserved

    def reserve(self, num_requests: int, num_blocks: int = 0) -> None:
        """Keep room for requests that are about to be held; negative numbers give it back."""
        self._num_reserved += num_requests
        self._num_reserved_blocks += num_blocks

    def can_claim(self, num_tokens: int) -> bool:
        """Whether a prompt of about this many tokens, whose prefix is cached here, can begin (almost) at once.

        Its blocks must be free. Slots become free so often that as many as are pulled ahead of need may wait for one.
        """
        config, held = self._config, self._held
        if held.is_withdrawn or held.has_suspect:
            return False
        num_blocks = held.num_blocks("interactive") + self._num_reserved_blocks + self.num_blocks_for(num_tokens)
        is_free = num_blocks <= config.num_blocks or not self.num_interactive
        return is_free and self.num_interactive < config.max_num_seqs + self._look_ahead

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks a prompt of this many tokens and its answer will probably need."""
        return self._config.expected_blocks(num_tokens, self._config.max_model_len)

    def expected_blocks(self, num_tokens: int, max_new_tokens: int, budget: BlockBudget | None = None) -> int:
        """Return the blocks that a request will probably need, and learn from it."""
        expected = self._config.expected_blocks(num_tokens, num_tokens + max_new_tokens)
        if budget is not None:
            expected = min(expected, budget.num_blocks)
        self._mean_blocks += (expected - self._mean_blocks) * _MEMORY
        return expected

    def interactive(self, backlog: int) -> int:
        """Return how many interactive requests there is room for. Batch work does not count: it gives way."""
        held = self._held
        look_ahead = min(backlog, self._look_ahead)
        return max(0, self._room(self.num_interactive, held.num_blocks("interactive")) + look_ahead)

    def first(self, backlog: int) -> int:
        """Return how many interactive requests there is room for that go before others."""
        config, held = self._config, self._held
        room = self.interactive(backlog)
        if room >= self._look_ahead or held.is_withdrawn:
            return room
        slots, blocks = held.within_shares(config.max_num_seqs, config.num_blocks)
        free = min(config.max_num_seqs - slots, (config.num_blocks - blocks) / self._mean_blocks)
        # As many may wait that were pulled ahead of need.
        most = min(self._look_ahead, 2 * self._look_ahead - held.num_not_begun)
        return max(room, min(most, math.floor(free)))

    def batch(self, interactive_backlog: int, max_batch_seqs: int) -> int:
        """Return how many batch requests there is room for: none while interactive ones wait."""
        if interactive_backlog:
            return 0
        held = self._held
        num_held = len(held) + self._num_reserved
        room = self._room(num_held, held.num_blocks("interactive") + held.num_blocks("batch"))
        look_ahead = max(1, max_batch_seqs // _BATCH_LOOK_AHEAD_SHARE)
        num_batch = held.count("batch") - held.num_background
        return max(0, min(room, max_batch_seqs + look_ahead - num_batch))

    def _room(self, num_held: int, num_blocks: int) -> int:
        """Return how many more requests fit beside those held; negative when too many are held already."""
        if self._held.is_withdrawn:
            return -num_held - self._look_ahead
        config = self._config
        num_blocks += self._num_reserved_blocks
        # Parts have about as many free blocks each.
        free = (config.num_blocks - num_blocks) / config.num_parts
        room = min(config.max_num_seqs - num_held, config.num_parts * math.floor(free / self._mean_blocks))
        for group in config.windows:
            each = min(self._mean_blocks, group.most_blocks(config.block_size))
            room = min(room, math.floor(group.num_blocks / each) - num_held)
        return room if num_held else max(1, room)
