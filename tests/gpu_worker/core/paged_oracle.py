"""A model runner that proves the block tables right.

Its "KV" of a position is a hash of all tokens up to there (and of the tenant), its "model" derives the next token from
the KV of the last position, and it reads every position back through the block table. So it notices a block that was
reused too early, shared wrongly, skipped or written by two sequences; and `reference_tokens` is what a contiguous model
would have generated.

It knows sequences from encoded plans alone. Where it is given what the scheduler has planned too, it compares both.

Like a device it may run behind: it takes block tables and known tokens when a step is submitted, computes when the
result is asked for, and takes tokens that were in flight from its own samples.

Beside the KV of a position it keeps the place to which its key is turned. Of a sequence with a budget it reads the
tokens back that `kept_tokens` says are kept, each turned to its place among them.

Drafts come from a function that is told what would be right and may return anything; their KV is written like that of
all tokens, and what was right is found by sampling behind each.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain

import msgspec

from gpu_worker.core.batch_sequences import BatchSequence, BatchSequences, Share
from gpu_worker.core.block_budget import BlockScores
from gpu_worker.core.group_tables import WindowTable
from gpu_worker.core.plan import Eviction, StepPlan
from gpu_worker.core.step import LogprobEntry, SampledTokens, ScheduledSequence, ScheduledStep, StepResult
from tests.gpu_worker.core.sequences import kept_tokens


def content(previous: int, token_id: int) -> int:
    """KV of a position, from the KV before it."""
    return int.from_bytes(blake2b(f"{previous}/{token_id}".encode(), digest_size=8).digest())


def root(salt: bytes) -> int:
    """What is known before the first token."""
    return int.from_bytes(blake2b(salt, digest_size=8).digest())


def contents(salt: bytes, token_ids: list[int], previous: int | None = None) -> list[int]:
    """KV of all positions, as a contiguous model has it; `previous` is the KV before them if they are not the first."""
    result, last = [], root(salt) if previous is None else previous
    for token_id in token_ids:
        last = content(last, token_id)
        result.append(last)
    return result


def reference_tokens(
    salt: bytes, prompt: list[int], limit: int, stop_ids: frozenset[int], vocab_size: int
) -> tuple[list[int], str]:
    """What the model generates after `prompt`: at most `limit` tokens, and why it ends."""
    last, output = contents(salt, prompt)[-1], []
    while len(output) < limit:
        output.append(last % vocab_size)
        if output[-1] in stop_ids:
            return output, "stop"
        last = content(last, output[-1])
    return output, "length"


@dataclass(eq=False)
class _Row:
    """What the device knows of a sequence: its samples by position, right until a step got lost.

    `token_ids` and `expected` are the tokens of its last step without drafts and what their KV must be, so that a long
    sequence is not hashed from its start at each step.
    """

    sampled: dict[int, int] = field(default_factory=dict)
    lost_from: float = math.inf
    token_ids: list[int] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)


@dataclass
class _Work:
    """An item as it was when it was submitted: later changes of the sequence do not reach the device."""

    item: Share
    row: _Row
    salt: bytes
    token_ids: list[int]
    block_table: list[int]
    drafts: list[int]
    windows: list[WindowTable]
    slot: int | None
    num_evicted: int
    budget: tuple[int, int, int] | None
    scores: BlockScores | None

    @property
    def end(self) -> int:
        return self.item.start + self.item.num_tokens


class OracleStep:
    """A submitted step, computed when its result is asked for."""

    def __init__(
        self, runner: "OracleRunner", number: int, work: list[_Work], evictions: list[Eviction], evicted: list[_Row]
    ) -> None:
        self._runner, self._number, self._work, self._evictions = runner, number, work, evictions
        self._evicted = evicted

    def result(self) -> StepResult:
        self._runner.evict(self._evictions)
        sampled = self._runner.compute(self._number, self._work)
        # Any numbers do: they need only differ from sequence to sequence, and be the same again.
        attention = [
            (place, [float((work.end * (block + 7) * len(work.token_ids)) % 11) for block in range(12)])
            for place, work in enumerate(self._work)
            if work.scores is not None
        ]
        return StepResult(self._number, sampled, attention)

    def lose(self) -> None:
        """Fail: the device wrote something into the slots, and what it sampled is of no use. It may have evicted."""
        self._runner.evict(self._evictions[: self._number % 2])
        # Steps behind this one may still be computed, also for sequences that it only evicts for.
        for row in (*self._evicted, *(work.row for work in self._work)):
            row.lost_from = min(row.lost_from, self._number)
        for work in self._work:
            work.drafts = []
            self._runner.spoil(work)


Drafter = Callable[[list[int]], list[int]]
PART_STRIDE = 1_000_000


class OracleRunner:
    """Executes plans on a paged memory of hashes; raises AssertionError on any wrong read or write."""

    def __init__(
        self,
        block_size: int,
        vocab_size: int = 5,
        max_steps_in_flight: int = 1,
        max_num_seqs: int = 1000,
        drafter: Drafter | None = None,
        windows: tuple[int, ...] = (),
        salt: bytes = b"tenant",
    ) -> None:
        self._salt = salt
        self._sequences = BatchSequences()
        self._max_num_seqs = max_num_seqs
        self._windows = windows
        self._window_memory: defaultdict[tuple[int, int], list[int | None]] = defaultdict(lambda: [None] * block_size)
        self._states: dict[int, int | None] = {}
        self.num_loads = 0
        self._drafter = drafter
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.max_steps_in_flight = max_steps_in_flight
        self.plans: list[ScheduledStep | StepPlan] = []
        self.names: dict[int, list[str]] = {}
        self.num_computed_tokens = 0
        self._evicted: dict[int, int] = {}
        self._parts: dict[int, int] = {}
        # The KV of a position, and the place to which its key is turned.
        self._memory: defaultdict[int, list[tuple[int, int] | None]] = defaultdict(lambda: [None] * block_size)
        self._rows: dict[BatchSequence, _Row] = {}
        self._last_computed = 0

    def submit(self, step: ScheduledStep | StepPlan) -> OracleStep:
        self.plans.append(step)
        scheduled: list[ScheduledSequence] | list[None] = []
        if isinstance(step, ScheduledStep):
            assert len(set(step.departed)) == len(step.departed)
            assert step.num_batch == sum(item.sequence.lane == "batch" for item in step.scheduled)
            assert step.num_prefilled == step.num_tokens - sum(item.samples for item in step.scheduled)
            scheduled = step.scheduled
        sent = step.plan if isinstance(step, ScheduledStep) else step
        plan = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=StepPlan)
        self.num_computed_tokens += plan.num_tokens
        changes = self._sequences.apply(plan)
        for sequence in changes.departed:
            del self._rows[sequence]
        for sequence in changes.new:
            self._rows[sequence] = _Row()
        assert len(self._rows) <= self._max_num_seqs, "more sequences in the batch than it has rows"
        shares = self._sequences.shares(plan)
        self.names[plan.step] = [share.sequence.id for share in shares]
        assert plan.num_tokens == sum(share.num_tokens for share in shares)
        self._evicted |= {new.row: new.num_evicted for new in plan.new}
        self._parts |= {new.row: new.part for new in plan.new}
        self._evicted |= {each.row: each.num_evicted for each in plan.evictions if each.row is not None}
        work = list(map(self._take, shares, scheduled or [None] * len(shares)))
        evicting = {eviction.row for eviction in plan.evictions}
        evicted = [row for sequence, row in self._rows.items() if sequence.row in evicting]
        return OracleStep(self, plan.step, work, plan.evictions, evicted)

    def evict(self, evictions: list[Eviction]) -> None:
        """Move blocks, and turn their keys back."""
        for eviction in evictions:
            sources, targets, shifts = zip(*eviction.moves, strict=True) if eviction.moves else ((), (), ())
            assert len(set(sources)) == len(sources)
            assert len(set(targets)) == len(targets)
            read = [list(self._memory[block]) for block in sources]
            for target, shift, kept in zip(targets, shifts, read, strict=True):
                self._memory[target] = [entry and (entry[0], entry[1] - shift) for entry in kept]

    def compute(self, number: int, works: list[_Work]) -> list[SampledTokens]:
        assert number > self._last_computed, "the device computes steps in the order of their submission"
        self._last_computed = number
        for work in works:
            self._draft(work)
        self._load_states(works)
        expected = [[] if number >= work.row.lost_from else self._expected(work) for work in works]
        written: set[int] = set()
        for work, values in zip(works, expected, strict=True):
            for position in range(work.item.start, work.end + len(work.drafts)):
                slot = self._slot(work, position)
                assert slot not in written, f"two tokens of one step share slot {slot}"
                written.add(slot)
                self._write(work, position, values[position] if values else -1)
                self._write_windows(work, position, values[position] if values else -1)
        for work, values in zip(works, expected, strict=True):
            self._read_windows(work, values)
            self._advance_state(work, values)
        return [self._sample(work, values) for work, values in zip(works, expected, strict=True)]

    def spoil(self, work: _Work) -> None:
        for position in range(work.item.start, work.end):
            self._write(work, position, -1)
            self._write_windows(work, position, -1)
        if work.slot is not None:
            self._states[work.slot] = -1

    def _write_windows(self, work: _Work, position: int, value: int) -> None:
        place, offset = divmod(position, self.block_size)
        for group, table in enumerate(work.windows):
            assert place >= table.num_released, "a token is written into a block that was given back"
            self._window_memory[group, table.blocks[place]][offset] = value

    def _read_windows(self, work: _Work, values: list[int]) -> None:
        """Read what the step's tokens see: of each, the window that ends with it."""
        for group, (window, table) in enumerate(zip(self._windows, work.windows, strict=True)):
            for position in range(max(0, work.item.start - window + 1), len(values)):
                place, offset = divmod(position, self.block_size)
                assert place >= table.num_released, "a block in the window was given back"
                read = self._window_memory[group, table.blocks[place]][offset]
                assert read == values[position], f"{work.item.sequence.id} reads wrong KV in its window at {position}"

    def _load_states(self, works: list[_Work]) -> None:
        """Copy checkpoints: all are read before any slot is written."""
        loaded: dict[int, int | None] = {}
        for work in works:
            if work.slot is not None and work.item.state is not None and work.item.state.is_first:
                source = work.item.state.source
                self.num_loads += source is not None
                loaded[work.slot] = root(work.salt) if source is None else self._states[source]
        self._states |= loaded

    def _advance_state(self, work: _Work, values: list[int]) -> None:
        """Check the state before the step's tokens, and leave what it is behind each."""
        item = work.item
        if work.slot is None:
            return
        if values:
            before = values[item.start - 1] if item.start else root(work.salt)
            assert self._states[work.slot] == before, f"{item.sequence.id} goes on from the state of another text"
        for num_tokens, slot in () if item.state is None else item.state.saves:
            assert 0 < num_tokens <= item.num_tokens
            assert slot != work.slot
            self._states[slot] = values[item.start + num_tokens - 1] if values else -1
        self._states[work.slot] = values[work.end - 1] if values else -1

    def _write(self, work: _Work, position: int, value: int) -> None:
        block, offset = divmod(self._slot(work, position), self.block_size)
        self._memory[block][offset] = value, position - work.num_evicted

    def _take(self, share: Share, planned: ScheduledSequence | None) -> _Work:
        sequence, salt = share.sequence, self._salt
        released = [0] * len(sequence.window_tables)
        if planned is not None:
            live, salt = planned.sequence, planned.sequence.salt
            assert (sequence.id, sequence.token_ids) == (live.id, live.token_ids), "the plan tells other tokens"
            tables = [(sequence.block_table, live.block_table)]
            tables += zip(sequence.window_tables, [table.blocks for table in live.window_tables], strict=True)
            # Plans do not tell that blocks behind the last token were taken back.
            assert all(told[: len(held)] == held for told, held in tables), "the plan tells other blocks"
            assert sequence.state_slot == (None if live.state_slot is None else live.state_slot.slot)
            assert (share.start, share.num_tokens, share.samples) == (
                planned.start,
                planned.num_tokens,
                planned.samples,
            )
            assert (share.num_draft_tokens, share.forced) == (planned.num_draft_tokens, planned.forced)
            assert share.state == planned.state
            released = [table.num_released for table in live.window_tables]
        windows = [
            WindowTable(list(blocks), num_released, 0, 0)
            for blocks, num_released in zip(sequence.window_tables, released, strict=True)
        ]
        part = self._parts[sequence.row]
        assert planned is None or part == planned.sequence.part, "the plan tells another part"
        # Blocks of other parts are other memory.
        blocks = [part * PART_STRIDE + block for block in sequence.block_table]
        tables = (list(sequence.token_ids), blocks, [], windows)
        num_evicted, budget, scores = self._evicted[sequence.row], None, None
        if planned is not None and (live_budget := planned.sequence.budget) is not None:
            num_sinks, each = live_budget.num_sinks, live_budget.num_evicted
            budget = (live_budget.num_tokens, num_sinks * self.block_size, each * self.block_size)
            scores = planned.sequence.scores
        return _Work(share, self._rows[sequence], salt, *tables, sequence.state_slot, num_evicted, budget, scores)

    def _draft(self, work: _Work) -> None:
        count = work.item.num_draft_tokens
        if count and work.row.lost_from == math.inf:
            assert self._drafter is not None
            assert work.item.samples
            right, _ = reference_tokens(work.salt, work.token_ids, count, frozenset(), self.vocab_size)
            work.drafts = self._drafter(right)[:count]

    def _expected(self, work: _Work) -> list[int]:
        """KV of all positions up to the last one computed; what the host did not know comes from the row."""
        known, row, salt = work.token_ids, work.row, work.salt
        assert work.end <= len(known) or work.end - 1 == max(row.sampled), "not the token sampled last"
        token_ids = known[: work.end] + [row.sampled[i] for i in range(len(known), work.end)]
        if not row.token_ids or token_ids[: len(row.token_ids)] != row.token_ids:
            row.token_ids, row.expected = token_ids, contents(salt, token_ids)
        new = token_ids[len(row.token_ids) :]
        row.token_ids, row.expected = token_ids, row.expected + contents(salt, new, row.expected[-1])
        return row.expected + contents(salt, work.drafts, row.expected[-1])

    def _slot(self, work: _Work, position: int) -> int:
        place, offset = divmod(position - work.num_evicted, self.block_size)
        return work.block_table[place] * self.block_size + offset

    def _sample(self, work: _Work, values: list[int]) -> SampledTokens:
        item, end = work.item, work.end
        sequence = item.sequence
        if not values:
            return SampledTokens((0,) if item.samples else ())
        expected = values
        if work.budget is not None:
            kept = kept_tokens(item.start, *work.budget, None if work.scores is None else work.scores.decisions)
            assert len(kept) == item.start - work.num_evicted + 1, f"{sequence.id} has evicted too much or too little"
            kept += range(item.start + 1, len(values))
            assert len(kept) <= work.budget[0], f"{sequence.id} computes tokens for which it should evict first"
            expected = [values[token] for token in kept]
        num_blocks = -(-len(expected) // self.block_size)
        blocks = work.block_table[:num_blocks]
        read = list(chain.from_iterable(self._memory[block] for block in blocks))[: len(expected)]
        placed = list(zip(expected, range(len(expected)), strict=True))
        assert read == placed, f"{sequence.id} reads wrong KV at {item.start}"
        prompt_logprobs = ()
        if sequence.sampling.prompt_logprobs is not None:
            seen = work.token_ids[item.start + 1 : min(end + 1, sequence.num_prompt_tokens)]
            prompt_logprobs = tuple(LogprobEntry(token_id, -1.0) for token_id in seen)
        if not item.samples:
            return SampledTokens((), prompt_logprobs=prompt_logprobs)
        assert end >= len(work.token_ids), "a token is sampled that is known already"
        drawn = [value % self.vocab_size for value in values[end - 1 :]]
        work.row.sampled[end] = drawn[0]
        right = [draft == token_id for draft, token_id in zip(work.drafts, drawn, strict=False)]
        num_accepted = [*right, False].index(False)
        if work.slot is not None:
            self._states[work.slot] = values[end - 1 + num_accepted]
        return SampledTokens(
            tuple(drawn[: num_accepted + 1]),
            prompt_logprobs=prompt_logprobs,
            num_drafted=len(work.drafts),
            num_accepted=num_accepted,
        )
