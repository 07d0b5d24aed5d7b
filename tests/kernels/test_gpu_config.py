from __future__ import annotations

import pytest
import torch

from kernels.gpu_config import Gpu, GpuGeneration, generation_of
from kernels.layer_cache import LayerCache
from kernels.paged_attention import AttentionOptions
from kernels.paged_attention.triton_attention import PagedAttentionBatch, _chunk_config
from kernels.paged_attention.triton_config import LATENT_CHUNK, ChunkConfig, chunk_config, split_config


@pytest.mark.parametrize(
    ("capability", "generation", "max_shared_kb"),
    [
        ((7, 5), GpuGeneration.ADA, 99),
        ((8, 0), GpuGeneration.AMPERE, 163),
        ((8, 6), GpuGeneration.ADA, 99),
        ((8, 7), GpuGeneration.AMPERE, 163),
        ((8, 9), GpuGeneration.ADA, 99),
        ((9, 0), GpuGeneration.HOPPER, 227),
        ((10, 0), GpuGeneration.BLACKWELL, 227),
        ((11, 0), GpuGeneration.BLACKWELL, 227),
        ((12, 0), GpuGeneration.ADA, 99),
    ],
)
def test_capability_belongs_to_generation(
    capability: tuple[int, int], generation: GpuGeneration, max_shared_kb: int
) -> None:
    assert generation_of(*capability) is generation
    assert generation.max_shared_bytes == max_shared_kb * 1024


@pytest.mark.parametrize("generation", GpuGeneration)
@pytest.mark.parametrize("is_8bit_cache", [False, True])
def test_every_size_of_heads_has_launches_and_larger_heads_have_no_larger_tiles(
    generation: GpuGeneration, is_8bit_cache: bool
) -> None:
    sizes = (16, 32, 64, 128, 256, 512)
    splits = [split_config(generation, size, torch.bfloat16, is_8bit_cache) for size in sizes]
    chunks = [chunk_config(generation, size, torch.float16) for size in sizes]
    for widths in ([each.block_n for each in splits], [each.block_m * each.block_n for each in chunks]):
        assert widths == sorted(widths, reverse=True)
    for config in (*splits, *chunks):
        # A tile of a matrix product has at least 16 columns, and a power of two.
        assert config.block_n in (16, 32, 64, 128)
        assert config.num_warps in (4, 8)


@pytest.mark.parametrize("generation", GpuGeneration)
def test_latent_rows_have_a_launch_of_their_own_where_registers_hold_it(generation: GpuGeneration) -> None:
    rows = torch.empty(4, 16, 1, 576, dtype=torch.bfloat16)
    numbers = torch.zeros(2, dtype=torch.int32)

    def launch(size: int = 512, dtype: torch.dtype = torch.bfloat16, **others: torch.Tensor) -> ChunkConfig:
        keys = others.pop("keys", rows)
        query = torch.empty(1, 16, keys.shape[3], dtype=dtype)
        cache = LayerCache(keys, rows[..., :size], **others)
        batch = PagedAttentionBatch(query, cache, numbers, numbers, numbers, AttentionOptions(1.0))
        return _chunk_config(batch, 512, Gpu(generation, 132))

    others = [
        launch(256),
        launch(dtype=torch.float32),
        launch(scales=torch.empty(4, 16, 1, 2, dtype=torch.float16)),
        launch(keys=rows.clone()),
    ]
    assert (launch() == LATENT_CHUNK) == (generation in (GpuGeneration.HOPPER, GpuGeneration.BLACKWELL))
    assert LATENT_CHUNK not in others
