from __future__ import annotations

import pytest
import torch

from kernels.layer_cache import CacheShape, allocate_caches, dequantize_heads, quantize_heads
from tests.kernels.layer_caches import EIGHT_BITS

NUM_LAYERS, NUM_BLOCKS, NUM_KV_HEADS, HEAD_DIM = 2, 8, 3, 10
DTYPES = [torch.float32, torch.bfloat16, torch.float16, *EIGHT_BITS]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_may_have_a_size_of_their_own(dtype: torch.dtype, device: torch.device) -> None:
    caches = allocate_caches(NUM_LAYERS, NUM_BLOCKS, 4, CacheShape(NUM_KV_HEADS, 12, 8), dtype, device)
    layer = caches.layers()[1]
    assert layer.keys.shape == (NUM_BLOCKS, 4, NUM_KV_HEADS, 12)
    assert layer.values.shape == (NUM_BLOCKS, 4, NUM_KV_HEADS, 8)
    assert layer.block_bytes * NUM_BLOCKS == sum(tensor.nbytes for tensor in layer.tensors)


def test_keys_of_a_cpu_lie_transposed_where_its_kernels_read_them_so() -> None:
    def keys(block_size: int, shape: CacheShape, device: str = "cpu") -> torch.Tensor:
        return allocate_caches(2, 5, block_size, shape, torch.bfloat16, torch.device(device)).layers()[1].keys

    shape = CacheShape(3, 10, 8)
    assert keys(32, shape).permute(0, 2, 3, 1).is_contiguous()
    assert keys(32, shape).shape == keys(32, shape, "meta").shape == (5, 32, 3, 10)
    assert keys(8, shape).is_contiguous()
    assert keys(32, CacheShape(3, 9, 8)).is_contiguous()
    assert keys(32, CacheShape(1, 10, 8, is_latent=True)).is_contiguous()
    assert keys(32, shape, "meta").is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_latent_values_are_the_first_numbers_of_the_keys(dtype: torch.dtype, device: torch.device) -> None:
    caches = allocate_caches(NUM_LAYERS, NUM_BLOCKS, 4, CacheShape(1, 12, 8, is_latent=True), dtype, device)
    layers = caches.layers()
    for number, layer in enumerate(layers):
        layer.keys.view(torch.uint8).fill_(number + 1)
        assert layer.values.data_ptr() == layer.keys.data_ptr()
        assert (layer.values.contiguous().view(torch.uint8) == number + 1).all()
    num_bytes = 4 * 12 * dtype.itemsize + (4 * 2 * 2 if dtype in EIGHT_BITS else 0)
    assert layers[0].block_bytes == num_bytes
    layers[1].keys[3, 2].view(torch.uint8).fill_(9)
    assert (layers[1].values[3, 2].contiguous().view(torch.uint8) == 9).all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_head_too_large_for_its_scale_stays_finite(dtype: torch.dtype) -> None:
    heads = torch.tensor([[1e9, -1e9, 0.0], [1.0, -2.0, 0.5]])
    back = dequantize_heads(*quantize_heads(heads, dtype))
    assert back.isfinite().all()
    assert back[0].sign().tolist() == [1.0, -1.0, 0.0]
    torch.testing.assert_close(back[1], heads[1], rtol=0.07, atol=0.01)
