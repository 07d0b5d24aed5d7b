# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""How the programs that share a tile of a product, each with a part of the input features, add their parts.

The last program to arrive adds the parts, always in the same order, so the result does not depend on who is last. It
leaves the counter as it was found, at zero: nothing has to be cleared between launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def outputs_and_partials(
    shape: tuple[int, int], out_dtype: torch.dtype, num_splits: int, block_m: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make room for a product, and for the parts of its `num_splits` splits; one split has no parts.

    Shapes:
        shape: `(num_rows, out_features)`
        partials: `[num_splits, num_rows, out_features]` float32
    """
    assert num_splits == 1 or shape[0] <= block_m, "blocks of rows would share the counters of their splits"
    outputs = torch.empty(shape, dtype=out_dtype, device=device)
    if num_splits == 1:
        return outputs, outputs
    return outputs, torch.empty((num_splits, *shape), dtype=torch.float32, device=device)


@triton.jit
def add_splits(sums, partials, counter, places, mask, part_size, split, SPLITS: tl.constexpr):
    """Return the tile's sums, and whether this program is to store them."""
    is_last = True
    if SPLITS > 1:
        tl.store(partials + split * part_size + places, sums, mask=mask)
        # All threads have written before one of them says so.
        tl.debug_barrier()
        num_before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        is_last = num_before == SPLITS - 1
        if is_last:
            tl.store(counter, 0)
            sums = tl.zeros_like(sums)
            for part in tl.static_range(SPLITS):
                sums += tl.load(partials + part * part_size + places, mask=mask, other=0.0, cache_modifier=".cg")
    return sums, is_last
