"""Slots of recurrent state: one for each running sequence, and checkpoints that others start from.

A checkpoint is made where a later sequence is likely to start: at the end of the prompt, at the end of the longest
prefix that was known, every `interval_blocks` blocks, and at the last full block of the output, where it replaces the
one of the block before. Others can find it once its step has landed.

Where no slot is free, the checkpoint of least priority goes: its priority is what it costs to compute again, in tokens
since the checkpoint before it, plus the priority of the last one evicted before this one was used, which ages those
that are not used.
Source: Cao and Irani, Cost-Aware WWW Proxy Caching Algorithms, 1997 (GreedyDual-Size).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from collections.abc import Sequence as Values
from dataclasses import dataclass
from math import inf

from gpu_worker.core.group_tables import StateSlot
from gpu_worker.core.plan import StateWork
from gpu_worker.core.prefix_cache import Kept
from gpu_worker.core.retention import Retention
from gpu_worker.core.scheduler_config import StateConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import ScheduledSequence
from gpu_worker.core.tiers import KvTiers


@dataclass(slots=True, eq=False)
class _Checkpoint:
    """A state that can be found.

    Attributes:
        ancestors: Earlier checkpoints of the same text when this one was made, in order: lengths in blocks and digests.
        base: Priority of the last eviction when this checkpoint was made or last used (`L` in GreedyDual-Size).
        num_pins: Sequences that will start from it, so that its slot must not be reused.
        entry: Number of its current entry in the heap; its entries of other numbers are stale.
    """

    slot: int
    digest: bytes
    num_blocks: int
    ancestors: list[tuple[int, bytes]]
    base: float
    priority: float = 0.0
    num_pins: int = 0
    num_uses: int = 0
    entry: int = 0


class StateSlots:
    """Hands out slots and keeps checkpoints; writes `StateSlot`.

    Attributes:
        retention: Checkpoints that go last.
    """

    def __init__(
        self,
        config: StateConfig,
        block_size: int,
        tiers: KvTiers | None = None,
        group: int = 1,
        retained_share: float = 0.0,
    ) -> None:
        self.retention = Retention(int(config.num_slots * retained_share))
        self._tiers = tiers
        self._group = group
        self._config = config
        self._block_size = block_size
        self._free = list(range(config.num_slots - 1, -1, -1))
        self._found: dict[bytes, _Checkpoint] = {}
        self._pinned: dict[int, _Checkpoint] = {}
        self._held: dict[int, int] = {}
        self._heap: list[tuple[float, int, _Checkpoint]] = []
        self._num_pushed = 0
        self._last_cost = 0.0

    @property
    def num_slots(self) -> int:
        """Slots in all."""
        return self._config.num_slots

    @property
    def num_used(self) -> int:
        """Slots that a running sequence cannot have: of those that run, and of checkpoints about to be read."""
        return self._config.num_slots - self.num_available

    @property
    def num_checkpoints(self) -> int:
        """States that can be found."""
        return len(self._found)

    @property
    def num_available(self) -> int:
        """Slots that a running sequence can have."""
        num_pinned = sum(self._found.get(checkpoint.digest) is checkpoint for checkpoint in self._pinned.values())
        return len(self._free) + len(self._found) - num_pinned

    def resumable(self, digests: Values[bytes], num_blocks: int, is_kept: Kept | None = None) -> int:
        """Return the most blocks, `num_blocks` at most, behind which a sequence of these digests can go on.

        What `is_kept` says is kept elsewhere counts too.
        """
        while num_blocks > 0:
            digest = digests[num_blocks - 1]
            if digest in self._found or (is_kept is not None and is_kept(digest)):
                break
            num_blocks -= 1
        return num_blocks

    def has(self, digest: bytes) -> bool:
        """Return whether there is a checkpoint behind the prefix of this digest."""
        return digest in self._found

    def hold(self, num_blocks: int) -> int:
        """Take a slot for a checkpoint behind `num_blocks` blocks that is brought from elsewhere; one is free."""
        slot = self._take()
        assert slot is not None, "hold() without asking num_available first"
        self._held[slot] = num_blocks
        return slot

    def let_go(self, slot: int, digest: bytes | None) -> None:
        """Let others find the checkpoint that was brought into a held slot; None if it did not come."""
        num_blocks = self._held.pop(slot)
        if digest is None or digest in self._found:
            self._free.append(slot)
            return
        self._found[digest] = checkpoint = _Checkpoint(slot, digest, num_blocks, [], self._last_cost)
        self._push(checkpoint)

    def open(self, digests: Values[bytes], num_hits: int, num_known: int) -> StateSlot:
        """Give a sequence a slot; it starts from the checkpoint behind `num_hits` blocks, or from nothing.

        Of its prefix somebody has computed `num_known` blocks before.
        """
        known_end = num_known if num_known > num_hits else 0
        if num_hits == 0:
            slot = self._take()
            assert slot is not None, "open() without asking num_available first"
            return StateSlot(slot, None, known_end)
        checkpoint = self._found[digests[num_hits - 1]]
        checkpoint.num_uses += 1
        checkpoint.num_pins += 1
        self._pinned[checkpoint.slot] = checkpoint
        slot = self._take()
        if slot is None:
            # The checkpoint's own slot is the last that no sequence runs in: the sequence takes it, and goes on there.
            self._forget(checkpoint)
            del self._pinned[checkpoint.slot]
            return StateSlot(checkpoint.slot, checkpoint.slot, known_end)
        self._push(checkpoint)
        return StateSlot(slot, checkpoint.slot, known_end, checkpoints=[num_hits])

    def plan(self, item: ScheduledSequence, *, makes_checkpoints: bool) -> StateWork | None:
        """Return what the runner has to do with the state in a sequence's share of a step, None where it only goes on.

        Takes slots for the checkpoints that are made behind its tokens.
        """
        state = item.sequence.state_slot
        assert state is not None
        saves = []
        for num_blocks in self._wanted(item, state) if makes_checkpoints else ():
            slot = self._take()
            if slot is None:
                break
            state.reserved[num_blocks] = slot
            saves.append((num_blocks * self._block_size - item.start, slot))
        is_first, state.is_loaded = not state.is_loaded, True
        if not is_first and not saves:
            return None
        return StateWork(is_first, state.source if is_first else None, tuple(saves))

    def land(self, sequence: Sequence, start: int, work: StateWork) -> None:
        """Make the checkpoints of a share findable that began behind `start` tokens and has landed.

        The digests of the sequence's blocks up to there are known.
        """
        state, digests = sequence.state_slot, sequence.block_digests
        assert state is not None
        if work.is_first:
            self._unpin(state)
        for num_tokens, slot in work.saves:
            num_blocks = (start + num_tokens) // self._block_size
            assert state.reserved.pop(num_blocks) == slot
            digest = digests[num_blocks - 1]
            ancestors = [
                (place, digests[place - 1]) for place in state.checkpoints if digests[place - 1] in self._found
            ]
            if digest in self._found:
                self._free.append(slot)
            else:
                checkpoint = _Checkpoint(slot, digest, num_blocks, ancestors, self._last_cost)
                self._found[digest] = checkpoint
                self._push(checkpoint)
            # Evicted ones are dropped here, or the list would grow with the text.
            state.checkpoints = [*(place for place, _ in ancestors), num_blocks]
            self._replace_output_checkpoint(sequence, state, num_blocks)
            if num_blocks != state.output_checkpoint or num_blocks % self._config.interval_blocks == 0:
                self._store(sequence, digest)

    def hide(self, sequence: Sequence) -> None:
        """Forget the states that the sequence has made or started from: they may be wrong."""
        state = sequence.state_slot
        assert state is not None
        for num_blocks in state.checkpoints:
            if (checkpoint := self._found.get(sequence.block_digests[num_blocks - 1])) is not None:
                self._drop(checkpoint)

    def close(self, sequence: Sequence) -> None:
        """Take back a sequence's slot, and those of checkpoints that have not landed.

        Another may go on behind its last checkpoint: it is stored.
        """
        state, sequence.state_slot = sequence.state_slot, None
        assert state is not None
        if state.output_checkpoint is not None:
            self._store(sequence, sequence.block_digests[state.output_checkpoint - 1])
        self._unpin(state)
        self._free.append(state.slot)
        self._free += state.reserved.values()
        state.reserved = {}

    def retain(self, tenant: str, weight: float, digests: Iterable[bytes], until: float) -> None:
        """Let checkpoints go last, until a time, as far as the tenant's quota goes."""
        # The one behind the longest prefix is of most use.
        found = [digest for digest in digests if digest in self._found][::-1]
        self.retention.retain(tenant, weight, found, until)

    def spend(self, digests: Iterable[bytes]) -> None:
        """Let checkpoints go before others."""
        for digest in digests:
            if (checkpoint := self._found.get(digest)) is not None:
                self.retention.discard(digest)
                checkpoint.base = -inf
                self._push(checkpoint, is_used=False)

    def check_integrity(self, holders: Iterable[StateSlot]) -> None:
        """Assert that every slot is free, a checkpoint, or of exactly one of these sequences."""
        slots, pins = [*self._free, *self._held], dict.fromkeys(self._pinned, 0)
        for state in holders:
            slots += (state.slot, *state.reserved.values())
            if state.source is not None and state.source != state.slot:
                pins[state.source] += 1
        slots += [checkpoint.slot for checkpoint in self._found.values()]
        slots += [slot for slot, checkpoint in self._pinned.items() if checkpoint.digest not in self._found]
        assert sorted(slots) == list(range(self._config.num_slots)), "a slot was lost, or is used twice"
        assert all(digest == checkpoint.digest for digest, checkpoint in self._found.items())
        assert pins == {slot: checkpoint.num_pins for slot, checkpoint in self._pinned.items()}

    def _store(self, sequence: Sequence, digest: bytes) -> None:
        checkpoint = self._found.get(digest)
        if self._tiers is not None and checkpoint is not None:
            self._tiers.store(self._group, checkpoint.slot, digest, sequence.salt)

    def _wanted(self, item: ScheduledSequence, state: StateSlot) -> list[int]:
        sequence, size = item.sequence, self._block_size
        first, last = item.start // size + 1, (item.start + item.num_tokens) // size
        if first > last:
            return []
        if item.num_tokens == 1 and item.samples:
            return [last]
        interval = self._config.interval_blocks
        wanted = set(range(-(-first // interval) * interval, last + 1, interval))
        # The last checkpoint that a sequence of the same prompt can start from: one token must be left.
        prompt_end = (sequence.num_prompt_tokens - 1) // size
        wanted |= {place for place in (state.known_end, prompt_end) if first <= place <= last}
        if item.samples:
            wanted.add(last)
        return sorted(wanted)

    def _replace_output_checkpoint(self, sequence: Sequence, state: StateSlot, num_blocks: int) -> None:
        """Drop the output's last checkpoint for this newer one, unless it lies on the interval or has been used."""
        if num_blocks * self._block_size <= sequence.num_prompt_tokens:
            return
        previous, state.output_checkpoint = state.output_checkpoint, num_blocks
        if previous is None or previous % self._config.interval_blocks == 0:
            return
        checkpoint = self._found.get(sequence.block_digests[previous - 1])
        if checkpoint is not None and checkpoint.num_uses == 0:
            state.checkpoints.remove(previous)
            self._drop(checkpoint)

    def _take(self) -> int | None:
        """Return a free slot, or that of the checkpoint that costs least to compute again."""
        if self._free:
            return self._free.pop()
        passed, slot = [], None
        while self._heap and slot is None:
            entry = heapq.heappop(self._heap)
            if not self._is_current(entry):
                continue
            priority, _, checkpoint = entry
            if checkpoint.num_pins or checkpoint.digest in self.retention:
                passed.append(checkpoint)
            elif checkpoint.base + self._cost(checkpoint) > priority:
                # An ancestor was evicted since it was pushed: it costs more now.
                self._push(checkpoint, is_used=False)
            else:
                slot = self._evict(checkpoint, priority)
        for checkpoint in passed:
            if slot is None and not checkpoint.num_pins:
                # Only retained ones are left, the one that costs least first.
                slot = self._evict(checkpoint, checkpoint.priority)
            else:
                self._push(checkpoint, is_used=False)
        return slot

    def _evict(self, checkpoint: _Checkpoint, priority: float) -> int:
        self._last_cost = max(self._last_cost, priority)
        self._forget(checkpoint)
        return checkpoint.slot

    def _cost(self, checkpoint: _Checkpoint) -> int:
        before = next((place for place, digest in reversed(checkpoint.ancestors) if digest in self._found), 0)
        return (checkpoint.num_blocks - before) * self._block_size

    def _push(self, checkpoint: _Checkpoint, *, is_used: bool = True) -> None:
        if is_used:
            checkpoint.base = self._last_cost
        checkpoint.priority = checkpoint.base + self._cost(checkpoint)
        self._num_pushed += 1
        checkpoint.entry = self._num_pushed
        heapq.heappush(self._heap, (checkpoint.priority, self._num_pushed, checkpoint))
        if len(self._heap) > 2 * self._config.num_slots:
            # `_take` pops stale entries only while no slot is free: without this the heap would grow until then.
            self._heap = sorted(entry for entry in self._heap if self._is_current(entry))

    def _is_current(self, entry: tuple[float, int, _Checkpoint]) -> bool:
        """Return whether an entry of the heap is the last one of a checkpoint that can be found."""
        _, number, checkpoint = entry
        return self._found.get(checkpoint.digest) is checkpoint and number == checkpoint.entry

    def _unpin(self, state: StateSlot) -> None:
        """Release the checkpoint that the sequence starts from: its state has been copied, or is not needed."""
        source, state.source = state.source, None
        if source is None or source == state.slot:
            return
        checkpoint = self._pinned[source]
        checkpoint.num_pins -= 1
        if checkpoint.num_pins == 0:
            del self._pinned[source]
            if self._found.get(checkpoint.digest) is not checkpoint:
                self._free.append(source)

    def _drop(self, checkpoint: _Checkpoint) -> None:
        """Forget a checkpoint; its slot is free at once, or when the last sequence has copied it."""
        self._forget(checkpoint)
        if checkpoint.num_pins == 0:
            self._free.append(checkpoint.slot)

    def _forget(self, checkpoint: _Checkpoint) -> None:
        del self._found[checkpoint.digest]
        self.retention.discard(checkpoint.digest)
