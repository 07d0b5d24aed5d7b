"""The sizes at which decode steps are captured: plain ones of any batch, and ones with drafts of batches not too large.

Each graph costs time at the start and a little memory, so steps with drafts have few: batches in powers of two, and
as many tokens as are still bound by reading the weights. Larger steps are launched one kernel after the other, which
their length hides.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpu_worker.execution.batch.layout import StepLayout

MAX_VERIFIED_ROWS = 256
"""Tokens of a captured step with drafts at most, and rows of logits that are made at once."""


@dataclass(frozen=True, slots=True)
class GraphShape:
    """Room for `num_seqs` sequences of at most `query_len` tokens."""

    num_seqs: int
    query_len: int = 1

    @property
    def num_tokens(self) -> int:
        """Tokens that the graph computes."""
        return self.num_seqs * self.query_len

    def holds(self, layout: StepLayout) -> bool:
        """Say whether a step fits, padded."""
        return len(layout.rows) <= self.num_seqs and layout.max_query_len <= self.query_len


def graph_shapes(max_num_seqs: int, max_draft_tokens: int) -> list[GraphShape]:
    """Return what to capture for batches of up to `max_num_seqs`, each with up to `max_draft_tokens` drafts."""
    shapes = [GraphShape(size) for size in bucket_sizes(max_num_seqs)]
    for query_len in _powers_of_two(1 + max_draft_tokens)[1:]:
        most = min(max_num_seqs, MAX_VERIFIED_ROWS // query_len)
        shapes += [GraphShape(size, query_len) for size in _powers_of_two(most)]
    return shapes


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture: close together where padding costs most in proportion."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 32)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def _powers_of_two(most: int) -> list[int]:
    """Return those below `most`, and `most`."""
    return [*(1 << exponent for exponent in range((most - 1).bit_length())), most]
