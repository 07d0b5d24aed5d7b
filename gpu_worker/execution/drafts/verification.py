"""What remains of a step's drafts: the KV of accepted tokens in its place, and what the proposer may know of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from collections.abc import Sequence as Values

import numpy as np
import torch
from msgspec import Struct

from gpu_worker.core.draft import Draft
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import LogprobEntry, SampledTokens, ScheduledSequence
from gpu_worker.execution.batch.layout import Int64s, StepLayout
from gpu_worker.execution.batch.transfers import Upload
from gpu_worker.execution.drafts.proposer import ComputedTokens
from gpu_worker.execution.memory.kv_cache import KVCache

Accepted = Mapping[int, tuple[int, ...]]
"""The numbers of the accepted draft tokens, by the sequence's place in the step."""

_FEW_ROWS = 64
"""Of a sequence: more draft tokens than a step verifies, fewer tokens than most chunks of a prompt."""

Entries = dict[int, tuple[LogprobEntry, ...]]
"""The log probabilities of a row's token, for the rows that report them."""


def accepted_tokens(drafts: Values[Draft], token_ids: Values[int], entries: Entries) -> list[SampledTokens]:
    """Return the tokens of each sequence: those sampled behind accepted draft tokens, and at the end one more.

    Args:
        drafts: Of each sequence.
        token_ids: What was sampled in the rows of these drafts.
        entries: Of these rows.
    """
    sampled, first = [], 0
    for draft in drafts:
        path = draft.accepted(token_ids[first : first + len(draft) + 1])
        rows = (first, *(first + number + 1 for number in path))
        reported = tuple(entry for row in rows for entry in entries.get(row, ()))
        sampled.append(SampledTokens(tuple(token_ids[row] for row in rows), reported, (), len(draft), path))
        first += len(draft) + 1
    return sampled


def move_accepted(cache: KVCache, layout: StepLayout, drafts: Values[Draft], accepted: Accepted) -> None:
    """Move the KV of accepted draft tokens to where that of the sequence's next tokens belongs."""
    source: list[int] = []
    target: list[int] = []
    for place, path in accepted.items():
        if path == tuple(range(len(path))):
            continue
        first = int(layout.query_starts[place + 1]) - len(drafts[place])
        source += [first + number for number in path]
        target += range(first, first + len(path))
    if not source:
        return
    for group, slots in zip(cache.groups, (layout.slots, *layout.window_slots), strict=True):
        moved = _uploaded(slots[np.array([source, target])], cache.device)
        group.move(moved[0], moved[1])


class ComputedStep(Struct, frozen=True, gc=False):
    """What a step left behind of each sequence that goes on, worked out when somebody asks for it.

    Attributes:
        hidden: `[num_tokens, hidden_size]`, of all tokens of the layout.
        departed: Sequences that have left the batch since the step was submitted.
    """

    scheduled: Values[ScheduledSequence]
    layout: StepLayout
    hidden: torch.Tensor
    sampled: Values[SampledTokens]
    accepted: Accepted
    departed: Set[Sequence] = frozenset()

    def __iter__(self) -> Iterator[ComputedTokens]:
        """Return what is known of each sequence."""
        places = [place for place in range(len(self.scheduled)) if self._goes_on(place)]
        if self.layout.max_query_len == 1 and all(self.sampled[place].token_ids for place in places):
            return iter(self._decodes(places))
        return iter(self._chunks(places))

    def _goes_on(self, place: int) -> bool:
        """Say whether the proposer is to know: not where the step before failed, and so what this one computed."""
        item = self.scheduled[place]
        is_known = item.start + item.num_tokens <= len(item.sequence.token_ids)
        return is_known and self.sampled[place].error is None and item.sequence not in self.departed

    def _decodes(self, places: list[int]) -> list[ComputedTokens]:
        """Return what is known of a step of one token a sequence, which is the usual one."""
        computed, rows = [], self.hidden[:, None].unbind()
        for place in places:
            item = self.scheduled[place]
            token_ids = (item.sequence.token_ids[item.start], self.sampled[place].token_ids[0])
            computed.append(ComputedTokens(item.sequence, item.start, token_ids, rows[place]))
        return computed

    def _chunks(self, places: list[int]) -> list[ComputedTokens]:
        """Do the same for any step."""
        token_ids, rows = [], []
        for place in places:
            item = self.scheduled[place]
            first, end = int(self.layout.query_starts[place]), item.start + item.num_tokens
            following = self.sampled[place].token_ids or tuple(item.sequence.token_ids[end : end + 1])
            token_ids.append((*item.sequence.token_ids[item.start : end], *following))
            path = self.accepted.get(place, ())
            num_known = len(token_ids[-1]) - 1 - len(path)
            rows.append([*range(first, first + num_known), *(first + item.num_tokens + draft for draft in path)])
        vectors = _apart(self.hidden, rows)
        items = [self.scheduled[place] for place in places]
        columns = zip(items, token_ids, vectors, strict=True)
        return [ComputedTokens(item.sequence, item.start, tokens, vector) for item, tokens, vector in columns]


def _apart(hidden: torch.Tensor, places: list[list[int]]) -> list[torch.Tensor]:
    """Return the rows at these places, a part each: many are views, the few of all others are copied together.

    A view keeps the whole step in memory, and may be kept for long.
    """
    few = [part for part in places if len(part) <= _FEW_ROWS]
    rows = _uploaded(np.array([row for part in few for row in part], dtype=np.int64), hidden.device)
    copies = iter(hidden.index_select(0, rows).split_with_sizes([len(part) for part in few]))
    return [next(copies) if len(part) <= _FEW_ROWS else hidden[part[0] : part[-1] + 1] for part in places]


def _uploaded(numbers: Int64s, device: torch.device) -> torch.Tensor:
    """Return them on the device, which nothing waits for."""
    upload = Upload(device)
    staged = upload.add(numbers)
    upload.send()
    return staged.tensor
