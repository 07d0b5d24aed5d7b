"""In which order a head's dimensions are kept, so that one rotation serves all families.

The product of a query and a key does not depend on the order of their dimensions, as long as both have the same. So
rows of the query and key projections are put in an order, once, in which dimension `i` turns with dimension
`i + head_dim / 2`: whichever the checkpoint pairs, and however many of its dimensions turn. Those that do not turn have
an angle of zero (`rotary_embedding.rotary_table`). No kernel knows of it.
"""

from __future__ import annotations

import torch


def head_order(dim: int, turning: int, *, is_interleaved: bool) -> list[int] | None:
    """Return which of the checkpoint's dimensions each of a head's is; None where they stay in order.

    Args:
        dim: Dimensions of a head.
        turning: How many of them turn, the first ones.
        is_interleaved: The checkpoint pairs a dimension with the next.
    """
    if turning == dim and not is_interleaved:
        return None
    half, still = turning // 2, (dim - turning) // 2
    if is_interleaved:
        first, second = range(0, turning, 2), range(1, turning, 2)
    else:
        first, second = range(half), range(half, turning)
    return [*first, *range(turning, turning + still), *second, *range(turning + still, dim)]


def head_rows(order: list[int], num_heads: int, first: int = 0) -> torch.Tensor:
    """Return the rows of a projection to so many heads in their order; `[num_heads * len(order)]` int64."""
    heads = torch.arange(num_heads)[:, None] * len(order)
    return (heads + torch.tensor(order)).flatten() + first


def gated_rows(order: list[int], num_heads: int) -> torch.Tensor:
    """Return the rows of all queries, then all gates, so that the gate of a head stands behind its query."""
    dim, heads = len(order), torch.arange(num_heads)[:, None] * len(order)
    queries, gates = heads + torch.tensor(order), heads + torch.arange(dim) + num_heads * dim
    return torch.cat((queries, gates), dim=1).flatten()


def rows_by_head(order: list[int], num_heads: int) -> torch.Tensor:
    """Return the rows of all queries, then all keys, then all values, which lie as those of a head, then the next's."""
    dim, turned = len(order), torch.tensor(order)
    heads = torch.arange(num_heads)[:, None] * 3 * dim
    parts = (turned, turned + dim, torch.arange(dim) + 2 * dim)
    return torch.cat([(heads + part).flatten() for part in parts])
