from __future__ import annotations

import pytest
import torch

from kernels.layer_cache import LayerCache, StackedCaches, allocate_layer_caches
from tests.kernels.layer_caches import EIGHT_BITS

NUM_LAYERS, NUM_BLOCKS, NUM_KV_HEADS, HEAD_DIM = 2, 8, 3, 10
DTYPES = [torch.float32, torch.bfloat16, torch.float16, *EIGHT_BITS]


def caches_of_any_bytes(block_size: int, dtype: torch.dtype, device: torch.device) -> StackedCaches:
    caches = allocate_layer_caches(NUM_LAYERS, NUM_BLOCKS, block_size, NUM_KV_HEADS, HEAD_DIM, dtype, device)
    generator = torch.Generator().manual_seed(2)
    for tensor in (tensor for layer in caches.layers() for tensor in layer.tensors):
        content = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8, generator=generator)
        tensor.view(torch.uint8).copy_(content.view_as(tensor.view(torch.uint8)))
    return caches


def bytes_of(cache: LayerCache, slot: int) -> list[bytes]:
    """Return what a token has left behind in each tensor."""
    block, offset = divmod(slot, cache.keys.shape[1])
    parts = [cache.keys[block, offset], cache.values[block, offset]]
    if cache.scales is not None:
        parts.append(cache.scales[block, :, offset])
    return [part.cpu().contiguous().view(torch.uint8).numpy().tobytes() for part in parts]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param([9], [4], id="one"),
        pytest.param([7, 10, 13], [5, 6, 7], id="into-a-source"),
        pytest.param([3, 4, 5, 6], [2, 3, 4, 5], id="by-one"),
        pytest.param([2, 3], [2, 3], id="in-place"),
        pytest.param([], [], id="none"),
    ],
)
@pytest.mark.parametrize("block_size", [2, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moved_slots_hold_what_their_sources_held(
    dtype: torch.dtype, block_size: int, source: list[int], target: list[int], device: torch.device
) -> None:
    caches = caches_of_any_bytes(block_size, dtype, device)
    slots = range(NUM_BLOCKS * block_size)
    before = [[bytes_of(layer, slot) for slot in slots] for layer in caches.layers()]
    caches.move(
        torch.tensor(source, dtype=torch.int64, device=device), torch.tensor(target, dtype=torch.int64, device=device)
    )
    came_from = dict(zip(target, source, strict=True))
    after = [[bytes_of(layer, slot) for slot in slots] for layer in caches.layers()]
    assert after == [[layer[came_from.get(slot, slot)] for slot in slots] for layer in before]
