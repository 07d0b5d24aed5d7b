"""In which order a head's dimensions are kept, so that one rotation serves all families.

The product of a query and a key does not depend on the order of their dimensions, as long as both have the same. So
rows of the query and key projections are put in an order, once, in which dimension `i` turns with dimension
`i + head_dim / 2`: whichever the checkpoint pairs, and however many of its dimensions turn. Those that do not turn have
an angle of zero (`rotary_embedding.rotary_table`). No kernel knows of it.
"""

from __future__ import annotations

import torch

from gpu_worker.layers.layer_traits import AttentionShape


def head_order(shape: AttentionShape) -> list[int] | None:
    """Return which of the checkpoint's dimensions each of a head's is; None where they stay in order."""
    dim, turning = shape.head_dim, shape.rotary_dim or shape.head_dim
    if shape.rotary is None or (turning == dim and not shape.interleaved):
        return None
    half, still = turning // 2, (dim - turning) // 2
    if shape.interleaved:
        first, second = range(0, turning, 2), range(1, turning, 2)
    else:
        first, second = range(half), range(half, turning)
    return [*first, *range(turning, turning + still), *second, *range(turning + still, dim)]


def head_rows(order: list[int], num_heads: int, first: int = 0) -> torch.Tensor:
    """Return the rows of a projection to so many heads in their order; `[num_heads * len(order)]` int64."""
    heads = torch.arange(num_heads)[:, None] * len(order)
    return (heads + torch.tensor(order)).flatten() + first
