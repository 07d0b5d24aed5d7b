"""What remains of a step's drafts: the tokens that they brought, and the KV of accepted ones in its place."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Values

import numpy as np

from gpu_worker.core.draft import Draft
from gpu_worker.core.step import LogprobEntry, SampledTokens
from gpu_worker.execution.batch.step_table import HostStep
from gpu_worker.execution.batch.transfers import uploaded
from gpu_worker.execution.memory.kv_cache import KVCache

Accepted = Mapping[int, tuple[int, ...]]
"""The numbers of the accepted draft tokens, by the sequence's place in the step."""

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


def move_accepted(cache: KVCache, layout: HostStep, drafts: Values[Draft], accepted: Accepted) -> None:
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
        moved = uploaded(slots[np.array([source, target])], cache.device)
        group.move(moved[0], moved[1])
