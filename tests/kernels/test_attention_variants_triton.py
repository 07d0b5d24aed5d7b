"""Every variant of attention in the Triton kernels, against the reference."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton does not support this platform")


from kernels.gpu_config import Gpu, GpuGeneration
from kernels.paged_attention.triton_attention import paged_attention_triton
from kernels.paged_attention.triton_config import ChunkConfig, SplitConfig
from tests.kernels.attention_variants import Options, batch_of, mostly_slow, run_reference
from tests.kernels.paged_batch import PagedBatch, Shape
from tests.kernels.poisoned_memory import poisoned_memory
from tests.kernels.tolerances import assert_close

SPLITS = Gpu(GpuGeneration.HOPPER, 64)
SPLIT = SplitConfig(block_n=16, num_warps=4, num_stages=2, programs_per_multiprocessor=1, min_split_tokens=32)
CHUNK = ChunkConfig(16, 16, 4, 2, programs_per_multiprocessor=2, min_split_tokens=32)
FORMS = {
    "same": Shape(4, 2, 24, 4),
    "smaller values": Shape(4, 2, 48, 8, value_dim=24),
    "larger values": Shape(4, 1, 16, 4, value_dim=40, is_strided=True),
    "latent": Shape(4, 1, 72, 4, value_dim=64, is_latent=True),
    "latent of no power of two": Shape(3, 1, 56, 4, value_dim=40, is_latent=True),
    "latent in int8": Shape(4, 1, 72, 8, torch.float32, torch.int8, 64, is_latent=True),
    "strided fp8": Shape(4, 2, 32, 4, torch.float16, torch.float8_e4m3fn, is_strided=True),
    "latent of DeepSeek": Shape(32, 1, 576, 16, torch.float16, None, 512, is_latent=True),
    "large heads": Shape(4, 2, 512, 16, torch.float16),
}
FAST = {
    ("latent", "all", "mixed"), ("strided fp8", "all", "decodes"),
    *(("same", name, "decodes") for name in ("sinks", "chunk", "gpt-oss")), ("larger values", "plain", "decodes"),
    ("smaller values", "plain", "decodes"), ("latent in int8", "sinks", "decodes"),
    ("latent of DeepSeek", "plain", "decodes"), ("large heads", "cap", "decodes"),
}  # fmt: skip


def run(batch: PagedBatch, options: Options, device: torch.device) -> torch.Tensor:
    moved = batch.moved(device, **options.asked(batch.query.shape[1]))
    with poisoned_memory():
        return paged_attention_triton(moved, batch.max_query_len, SPLITS, SPLIT, CHUNK)


@pytest.mark.parametrize(("shape", "options", "queries"), mostly_slow(FORMS, FAST))
def test_variant_equals_reference(shape: Shape, options: Options, queries: str, device: torch.device) -> None:
    batch = batch_of(shape, queries)
    assert_close(run(batch, options, device), run_reference(batch, options))


def test_heads_that_share_a_kv_head_are_taken_in_parts() -> None:
    parts = batch_of(FORMS["latent of DeepSeek"], "decodes").moved(torch.device("cpu"))
    assert (parts.num_parts, parts.group, parts.num_kv_heads) == (2, 16, 2)
    assert (parts.block_d, parts.block_v, parts.is_latent) == (512, 512, True)
