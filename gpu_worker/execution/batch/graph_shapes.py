"""The sizes at which steps are captured: decodes of any batch, decodes with drafts, and small steps with prompt tokens.

Each graph costs time at the start and a little memory. So steps with drafts have few: batches in powers of two, and as
many tokens as are still bound by reading the weights. So have steps with prompt tokens: up to 512 tokens, of batches in
powers of four, and up to 2,048 of models whose layers are many small kernels. Larger steps hide their launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from kernels.paged_attention import MOST_FREE_ENDS

MAX_VERIFIED_ROWS = 256
"""Tokens of a captured step with drafts at most, and rows of logits that are made at once."""

# Up to some 256 tokens a step is bound by reading the weights, and padding costs little. Above, it costs computing.
_MIXED_TOKENS = (64, 128, 256, 384, 512)
# How far attention divides the cached tokens of a sequence follows from the captured number of sequences, so a step of
# few sequences must not be padded to many.
_MIXED_SEQS = (4, 16, 64, 256)
# Of models with many launches: the host takes some 10 ms for a step, in which a GPU computes 1,000 to 2,000 tokens of a
# few billion weights each. At this size attention is not divided further, and padding sequences costs nothing.
_LARGE_MIXED_TOKENS = (768, 1024, 1536, 2048)
_LARGE_MIXED_SEQS = (16, 256)
# New prompts whose keys and values are made, where attention takes latent vectors: such a graph has room for the step's
# own tokens alone, since it makes what it has room for. Smaller steps save nothing, and are padded to these at most.
_EXPANDED_TOKENS = (384, 512, *_LARGE_MIXED_TOKENS)
_EXPANDED_SEQS = MOST_FREE_ENDS


class CapturedSteps(StrEnum):
    """Which steps are captured."""

    OFF = "off"
    DECODE = "decode"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class GraphShape:
    """Room for a step.

    Attributes:
        query_len: Tokens of one sequence at most.
        has_drafts: Whether sequences may verify drafts.
        num_expanded_blocks: Blocks of all sequences at most, of which attention by latent vectors makes keys and
            values; 0 where it makes none.
        has_logits: Whether all tokens are sampled behind. Else the graph ends with hidden vectors: what becomes of them
            depends on which sequences sample.
    """

    num_tokens: int
    num_seqs: int
    query_len: int
    has_drafts: bool
    has_logits: bool
    num_expanded_blocks: int = 0

    def holds(self, num_tokens: int, num_seqs: int, query_len: int, num_expanded_blocks: int = 0) -> bool:
        """Return whether a step fits, padded, in the form that makes keys and values or in the one that does not."""
        if (num_expanded_blocks > 0) != (self.num_expanded_blocks > 0):
            return False
        is_within = num_tokens <= self.num_tokens and num_expanded_blocks <= self.num_expanded_blocks
        return is_within and num_seqs <= self.num_seqs and query_len <= self.query_len


def decode_shape(num_seqs: int, query_len: int = 1) -> GraphShape:
    """Return the shape of decodes of `query_len` tokens each, drafts included."""
    return GraphShape(num_seqs * query_len, num_seqs, query_len, has_drafts=query_len > 1, has_logits=True)


def mixed_shape(num_tokens: int, num_seqs: int, *, has_drafts: bool) -> GraphShape:
    """Return the shape of whatever chunks and decodes."""
    return GraphShape(num_tokens, num_seqs, num_tokens, has_drafts, has_logits=False)


def graph_shapes(
    captured: CapturedSteps,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_draft_tokens: int,
    *,
    has_many_launches: bool = False,
    expanded_block_size: int | None = None,
) -> list[GraphShape]:
    """Return what to capture; `expanded_block_size` is that of models with steps that make keys and values."""
    if captured is CapturedSteps.OFF:
        return []
    shapes = [decode_shape(size) for size in bucket_sizes(max_num_seqs)]
    for query_len in powers_of_two(1 + max_draft_tokens)[1:]:
        most = min(max_num_seqs, MAX_VERIFIED_ROWS // query_len)
        shapes += [decode_shape(size, query_len) for size in powers_of_two(most)]
    if captured is CapturedSteps.ALL:
        sizes = _MIXED_TOKENS + (_LARGE_MIXED_TOKENS if has_many_launches else ())
        for num_tokens in _up_to(sizes, max_num_batched_tokens):
            batches: Sequence[int] = _MIXED_SEQS if num_tokens <= _MIXED_TOKENS[-1] else _LARGE_MIXED_SEQS
            for num_seqs in _up_to(batches, min(max_num_seqs, num_tokens)):
                shapes.append(mixed_shape(num_tokens, num_seqs, has_drafts=max_draft_tokens > 0))
        if expanded_block_size is not None:
            for num_tokens in _up_to(_EXPANDED_TOKENS, max_num_batched_tokens):
                num_seqs = min(_EXPANDED_SEQS, max_num_seqs, num_tokens)
                shape = mixed_shape(num_tokens, num_seqs, has_drafts=max_draft_tokens > 0)
                num_blocks = num_tokens // expanded_block_size + num_seqs
                shapes.append(replace(shape, num_expanded_blocks=num_blocks))
    return shapes


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture: close together where padding costs most in proportion."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 32)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def _up_to(sizes: Sequence[int], most: int) -> list[int]:
    """Return the sizes below `most`, and `most` where there are larger ones."""
    return [*(size for size in sizes if size < most), *([most] if most <= sizes[-1] else [])]


def powers_of_two(most: int) -> list[int]:
    """Return those below `most`, and `most`."""
    return [*(1 << exponent for exponent in range((most - 1).bit_length())), most]
