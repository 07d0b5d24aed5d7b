"""A step's plan: everything needed to compute the step, as values that can be sent to another process.

A plan names sequences by their row in the batch. It describes new sequences in full, and otherwise only the changes
since the previous plan: tokens that became known, blocks that were added. So plans have to be applied in order, from
the first one on (`batch_sequences`). They hold no clocks and no priorities: those stay with the scheduler.
"""

from __future__ import annotations

from msgspec import Struct

from gpu_worker.core.media import MediaSpan
from gpu_worker.core.pooling import PoolingPlan
from shared.sampling import Sampling

UNKNOWN_TOKEN = -1
"""In the place of a token that a step in flight is sampling: only the device has it."""


class StateWork(Struct, frozen=True, gc=False, array_like=True):
    """What the runner does with the state of a sequence in its share of a step, besides going on in its slot.

    Before any slot is written in a step, all `source` slots are read.

    Attributes:
        is_first: The state in the sequence's slot is not its own yet: it becomes a copy of that in `source`, or what
            a state is before the first token.
        source: The slot of the checkpoint that the sequence starts from, which may be its own; None starts anew.
        saves: Where to copy the state: after how many of the share's tokens, in order, and to which slot. Draft tokens
            come behind all of these.
    """

    is_first: bool
    source: int | None = None
    saves: tuple[tuple[int, int], ...] = ()


class EncodeWork(Struct, frozen=True, gc=False, array_like=True):
    """The passes that encode an image in a step, before the model computes the step's tokens.

    The patches of one embedding after the other pass the first stage of the vision tower, then the second one.

    Attributes:
        first: Number of passes done before; 0 begins anew.
        end: Number of passes done after it, `num_stages * num_rows` at the end.
    """

    digest: bytes
    first: int
    end: int


class NewSequence(Struct, frozen=True, gc=False, omit_defaults=True):
    """A sequence that enters the batch, for the first time or again.

    Attributes:
        row: Its place in the batch, which it keeps until it departs. The previous sequence there has departed.
        num_windows: Groups of layers that keep the last tokens.
        num_evicted: Tokens that are not in its blocks any more.
        scored_from: From which place in the cache on the result tells how its tokens attend; None for none of them.
        part: Of the blocks, to which its table's belong.
    """

    row: int
    id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: Sampling
    stop_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    prediction: tuple[int, ...] = ()
    pooling: PoolingPlan | None = None
    num_windows: int = 0
    state_slot: int | None = None
    media: tuple[MediaSpan, ...] = ()
    adapter: int | None = None
    num_evicted: int = 0
    scored_from: int | None = None
    part: int = 0


class Eviction(Struct, frozen=True, gc=False, array_like=True):
    """Tokens that have left the cache. `StepPlan.blocks` tells the table of those that stay.

    All sources are read before a target is written. Evictions of a plan come one after another, before its tokens.

    Attributes:
        row: None of a sequence that has no row yet: its `NewSequence` tells the rest.
        num_evicted: Tokens of the sequence that have left, altogether: its next tokens are as many places nearer.
        moves: Of each block that stays, behind one that leaves: whose content goes to which block, the keys turned back
            by how many positions. Source and target may be the same.
    """

    row: int | None
    num_evicted: int
    moves: list[tuple[int, int, int]]


class Written(Struct, frozen=True, gc=False, array_like=True):
    """Tokens or blocks of a row from place `first` on; there is nothing behind them.

    Attributes:
        ids: Of tokens, or of blocks.
        group: Of layers whose blocks these are: 0 keeps all tokens, the others the last ones.
    """

    row: int
    first: int
    ids: list[int]
    group: int = 0


class StepPlan(Struct, frozen=True, gc=False, omit_defaults=True):
    """All work of one step, decodes first: columns with an entry for each scheduled sequence.

    A decode computes the last token and samples the next one. The tables of `blocks` cover all scheduled tokens, drafts
    included.

    Attributes:
        starts: How many of its tokens were computed before: the position of the first token to compute.
        num_tokens: Sum of the scheduled tokens, drafts not counted.
        token_ids: Of each decode, the token that became known since the plan before, `UNKNOWN_TOKEN` where there is
            none. It follows those of `tokens`.
        lengths: How many tokens each of the others computes.
        samples: Whether each of the others samples a token behind its last one.
        num_drafts: How many draft tokens each decode may verify; empty where none does.
        forced: Places of decodes whose constraint forces tokens, and those tokens: they are verified as drafts.
        states: Of a model with recurrent layers: the places where the state does more than go on.
        departed: Rows that have left the batch; they are applied first. Some the runner may never have seen.
        tokens: Tokens that became known, and are not in `token_ids`.
        blocks: Blocks added to block tables.
        forgotten: Images whose embeddings are not kept any more; they are dropped first.
        evictions: Of sequences with a budget, also of some that the plan does not schedule.
    """

    step: int
    rows: list[int]
    starts: list[int]
    num_tokens: int
    num_decodes: int = 0
    token_ids: list[int] = []
    lengths: list[int] = []
    samples: list[bool] = []
    num_drafts: list[int] = []
    forced: list[tuple[int, tuple[int, ...]]] = []
    states: list[tuple[int, StateWork]] = []
    departed: list[int] = []
    new: list[NewSequence] = []
    tokens: list[Written] = []
    blocks: list[Written] = []
    forgotten: list[bytes] = []
    encodes: list[EncodeWork] = []
    evictions: list[Eviction] = []


NOTHING = StepPlan(0, [], [], 0)
"""Of a step that computes nothing."""
