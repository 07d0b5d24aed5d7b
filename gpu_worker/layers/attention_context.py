"""What attention needs to know about a step: where each token's KV goes, and which blocks each sequence reads.

`ScoredTokens` are asked how much they attend to each block of their sequence, over heads and layers: a further pass
over the keys, for these tokens alone. Sequences of a group have as many of them each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct

from gpu_worker.layers.cache_layout import LayerState
from gpu_worker.layers.media_inputs import MediaInputs
from kernels.layer_cache import LayerCache
from kernels.low_rank import AdapterRows
from kernels.paged_attention import AttentionOptions, ExpandedBlocks, block_attention
from kernels.state_rows import StateRows


class ScoredGroup(Struct, frozen=True):
    """Sequences with equally many scored tokens each.

    Attributes:
        first: How many tokens are in the groups before.
        sequences: `[num_seqs]` int64, places in the step.
        contexts: `[num_seqs, num_queries]` int64, tokens that each token sees, itself included.
        attention: `[num_seqs, num_queries, num_blocks]` float32; adds up over layers, of each layer the head with most.
    """

    first: int
    sequences: torch.Tensor
    contexts: torch.Tensor
    attention: torch.Tensor


class ScoredTokens(Struct, frozen=True):
    """All scored tokens of a step.

    Attributes:
        tokens: `[num_scored]` int64, places in the step, group by group.
    """

    tokens: torch.Tensor
    groups: Sequence[ScoredGroup]

    def add(
        self, query: torch.Tensor, cache: LayerCache, block_tables: torch.Tensor, options: AttentionOptions
    ) -> None:
        """Add what the tokens' rotated queries of a layer, `[num_scored, num_heads, head_dim]`, attend to."""
        for group in self.groups:
            num_seqs, num_queries, num_blocks = group.attention.shape
            own = query[group.first : group.first + num_seqs * num_queries]
            queries = own.view(num_seqs, num_queries, *query.shape[1:])
            tables = block_tables[group.sequences, :num_blocks].long()
            group.attention.add_(block_attention(queries, cache, tables, group.contexts, options))


class StepSizes(Struct, frozen=True):
    """The sums of a step, as the host knows them before it is launched.

    Attributes:
        num_pairs: Of a token of the step and one that it sees, itself included.
        num_cached: Tokens of all sequences that are in the cache after the step.
        num_blocks: Blocks that these lie in, each sequence's counted by themselves.
    """

    num_tokens: int
    num_pairs: int
    num_cached: int
    num_blocks: int
    max_model_len: int

    @classmethod
    def of(
        cls, query_lens: npt.ArrayLike, context_lens: npt.ArrayLike, block_size: int, max_model_len: int
    ) -> StepSizes:
        """Add up the tokens of each sequence, and its tokens that are in the cache after the step."""
        queries, contexts = np.asarray(query_lens, dtype=np.int64), np.asarray(context_lens, dtype=np.int64)
        pairs = (queries * (2 * contexts - queries + 1)).sum() // 2
        num_blocks = (-(-contexts // block_size)).sum()
        return cls(int(queries.sum()), int(pairs), int(contexts.sum()), int(num_blocks), max_model_len)


class WindowContext(Struct, frozen=True):
    """Where the tokens of a step lie in a group of layers that keeps the last ones only.

    Attributes:
        slot_mapping: As that of `AttentionContext`, in the group's blocks.
        block_tables: Likewise; at places before a sequence's window, some block that was written to.
    """

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor


class OwnTokens(Struct, frozen=True):
    """The tokens of a step that this rank attends for, where ranks divide sequences among them.

    Attributes:
        places: `[num_own]` int64, among all tokens of the step.
        context: Describes them as if they were all; None where there are none.
    """

    places: torch.Tensor
    context: AttentionContext | None


class AttentionContext(Struct, frozen=True):
    """Describes the batch of one step. Made by the model runner, passed explicitly to every layer.

    Tokens of all sequences are laid end to end. Sequence `s` owns rows `query_starts[s] : query_starts[s + 1]`; they
    are its last tokens, ending at `context_lens[s]`. Sequences of padding have one token, which goes to slot -1, and a
    context of no tokens: their rows of the result mean nothing.

    Attributes:
        caches: Of the layers, in order.
        slot_mapping: `[num_tokens]` int64, `block * block_size + offset` where a token's KV is written; -1 is nowhere.
            This and the tables are of the layers that keep all tokens.
        block_tables: `[num_seqs, max_blocks]` int32; behind a sequence's blocks, any block.
        query_starts: `[num_seqs + 1]` int32.
        context_lens: `[num_seqs]` int32, tokens whose KV is in the cache after this step's write.
        max_query_len: Largest number of query tokens of a sequence; 1 means a pure decode batch.
        max_context_len: Largest of `context_lens`, or a bound of it.
        windows: Of the groups of layers that keep the last tokens; empty where all layers keep all.
        group_of_layer: For each layer 0 where it keeps all tokens, `i + 1` where it belongs to `windows[i]`.
        states: Of the layers, in order; empty of a model without recurrent layers.
        state_rows: The sequences, as kernels with a state take them; likewise None.
        media: Images of the step; None in a step without.
        adapters: Which tokens have an adapter; None where none has.
        scored: Tokens that are asked how they attend; None where none is.
        expanded: Blocks of all sequences, of which attention by latent vectors makes keys and values for the step; None
            where it makes none.
        own: Which of the tokens this rank attends for; None where it does for all.
        observer: Given the modules and the input of each linear layer of blocks before it multiplies: calibration.
    """

    caches: Sequence[LayerCache]
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    max_query_len: int
    max_context_len: int
    windows: Sequence[WindowContext] = ()
    group_of_layer: Sequence[int | None] = ()
    states: Sequence[LayerState | None] = ()
    state_rows: StateRows | None = None
    media: MediaInputs | None = None
    observer: Callable[[tuple[str, ...], torch.Tensor], None] | None = None
    adapters: AdapterRows | None = None
    scored: ScoredTokens | None = None
    expanded: ExpandedBlocks | None = None
    own: OwnTokens | None = None

    @property
    def may_round(self) -> bool:
        """Whether the inputs of linear layers may be rounded where they are made: nothing else reads them."""
        return self.observer is None and self.adapters is None

    def blocks_of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slot mapping and the block tables that a layer goes by."""
        if self.windows and (group := self.group_of_layer[layer]):
            window = self.windows[group - 1]
            return window.slot_mapping, window.block_tables
        return self.slot_mapping, self.block_tables

    def state_of(self, layer: int) -> tuple[LayerState, StateRows]:
        """Return the state of a recurrent layer, and which part of it each sequence has."""
        state, rows = self.states[layer], self.state_rows
        assert state is not None, f"layer {layer} has no state"
        assert rows is not None, "the step describes no states"
        return state, rows
