"""Which vectors wait for a draft layer, and the tokens that it sees beside them."""

from __future__ import annotations

import torch

from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.execution.drafts.proposer import ComputedTokens
from gpu_worker.speculative.hidden_vectors.proposer import PendingEntries
from shared.sampling import Sampling

TOKENS = list(range(10, 22))


def computed(sequence: BatchSequence, start: int, stop: int) -> ComputedTokens:
    """The tokens from `start` to before `stop`; the vector of each has its position in it."""
    return ComputedTokens(sequence, start, tuple(TOKENS[start : stop + 1]), torch.arange(start, stop)[:, None].float())


def test_vectors_that_continue_are_kept_and_taken_with_the_tokens_behind_them() -> None:
    original = BatchSequence(0, "s", list(TOKENS), 6, Sampling())
    pending = PendingEntries(original)
    pending.add(computed(original, 0, 4))
    pending.add(computed(original, 4, 4))
    pending.add(computed(original, 4, 7))
    assert (pending.start, pending.end, pending.has_prompt) == (0, 7, True)
    assert pending.shifted.token_ids == TOKENS[1:8]
    item, rows = pending.take(5)
    assert (item.start, item.num_tokens, rows[:, 0].tolist()) == (0, 5, [0.0, 1.0, 2.0, 3.0, 4.0])
    assert (pending.start, pending.count, pending.has_prompt) == (5, 2, False)
    assert pending.take(2)[1][:, 0].tolist() == [5.0, 6.0]


def test_vectors_behind_rejected_drafts_replace_those_of_the_drafts() -> None:
    original = BatchSequence(0, "s", list(TOKENS), 6, Sampling())
    pending = PendingEntries(original)
    pending.add(computed(original, 0, 7))
    pending.add(computed(original, 4, 6))
    assert (pending.start, pending.end) == (4, 6)
    assert pending.shifted.token_ids == TOKENS[1:7]
    assert pending.take(2)[1][:, 0].tolist() == [4.0, 5.0]


def test_vectors_behind_a_gap_replace_those_before_it() -> None:
    original = BatchSequence(0, "s", list(TOKENS), 6, Sampling())
    pending = PendingEntries(original)
    pending.add(computed(original, 0, 3))
    # The tokens between came from the prefix cache.
    pending.add(computed(original, 5, 7))
    assert (pending.start, pending.end) == (5, 7)
    assert pending.shifted.token_ids == TOKENS[1:8]
    assert pending.take(2)[1][:, 0].tolist() == [5.0, 6.0]
