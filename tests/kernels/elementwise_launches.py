"""The launches of the memory-bound kernels that compile checks look at, in the shapes of Llama-3-8B and Qwen3.

Those of the sampler have the vocabularies of Llama 3 and Qwen 3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kernels.activation import Activation
from kernels.activation.triton_kernel import gated_rounded_triton, gated_triton
from kernels.gpu_config import Gpu, GpuGeneration
from kernels.layer_cache import is_quantized, scales_shape
from kernels.linear.rounding import InputRounding
from kernels.logits_bitmask.triton_kernel import forbid_tokens_triton
from kernels.rms_norm.triton_kernel import rms_norm_rounded_triton, rms_norm_triton
from kernels.rope_kv_write.reference import HeadNormWeights
from kernels.rope_kv_write.triton_kernel import rope_kv_write_triton
from kernels.sampling.config import sampling_config
from kernels.sampling.parameters import PenaltyTable, SamplingParameters
from kernels.sampling.triton_kernel import apply_penalties_triton, count_tokens_triton, sample_tokens_triton


def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype)


def launch_norm(size: int) -> torch.Tensor:
    return rms_norm_triton(empty(16, size), empty(size), 1e-6, empty(16, size))


def launch_rope(has_norm: bool, cache_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    weights = HeadNormWeights(empty(128), empty(128), 1e-6) if has_norm else None
    indices = empty(16, dtype=torch.int64)
    angles = empty(64, 128, dtype=torch.float32)
    cache = empty(2, 16, 8, 128, dtype=cache_dtype)
    scales = empty(*scales_shape(2, 16, 8), dtype=torch.float16) if is_quantized(cache_dtype) else None
    inputs = (empty(16, 48, 128), indices, angles, cache, torch.empty_like(cache), indices, weights)
    return rope_kv_write_triton(*inputs, scales)


def launches(gpu: Gpu) -> dict[str, Callable[[], object]]:
    return {
        "norm_4096": partial(launch_norm, 4096),
        "norm_5120": partial(launch_norm, 5120),
        "norm_16384": partial(launch_norm, 16384),
        "rope": partial(launch_rope, False),
        "rope_norm": partial(launch_rope, True),
        "silu_mul": lambda: gated_triton(empty(16, 2 * 14336), Activation.SILU),
        "gelu_mul": lambda: gated_triton(empty(16, 2 * 14336), Activation.GELU_TANH),
        "gelu_erf_mul": lambda: gated_triton(empty(16, 2 * 14336), Activation.GELU),
    } | rounded_launches(gpu)


def rounded_launches(gpu: Gpu) -> dict[str, Callable[[], object]]:
    """Those that round their results to eight bits: an 8B's, and a 70B's widest rows."""
    roundings = {"int8": InputRounding(torch.int8)}
    if gpu.generation is not GpuGeneration.AMPERE:
        float8 = torch.float8_e4m3fn
        roundings |= {
            "fp8": InputRounding(float8),
            "fp8_static": InputRounding(float8, empty(1, dtype=torch.float32)[0]),
            "fp8_blocks": InputRounding(float8, has_blocks=True),
        }
    found: dict[str, Callable[[], object]] = {}
    for name, rounding in roundings.items():
        for size in (4096, 5120, 8192):
            rows = empty(16, size), empty(size), 1e-6, empty(16, size)
            found[f"norm_{name}_{size}"] = partial(rms_norm_rounded_triton, *rows, rounding)
        for size in (14336, 28672):
            found[f"silu_mul_{name}_{size}"] = partial(
                gated_rounded_triton, empty(16, 2 * size), Activation.SILU, rounding
            )
    return found


def launch_draw(gpu: Gpu, vocab_size: int, may_truncate: bool, *, is_marked: bool = False) -> torch.Tensor:
    slots = torch.arange(2)
    column, numbers = torch.ones(2), torch.ones(2, dtype=torch.int64)
    parameters = SamplingParameters(column, column, numbers.int(), column, numbers)
    logits = torch.empty(2, vocab_size)
    config, marks = sampling_config(gpu.generation), numbers if is_marked else None
    return sample_tokens_triton(logits, slots, slots, parameters, may_truncate, config, marks)


def launch_penalties(vocab_size: int) -> torch.Tensor:
    table = torch.zeros(2, vocab_size, dtype=torch.int32)
    column, places = torch.ones(2), torch.arange(2)
    penalties = PenaltyTable(column, column, column, table, table[:, : -(-vocab_size // 32)])
    apply_penalties_triton(torch.empty(2, vocab_size), places, penalties, None)
    count_tokens_triton(penalties, places, places)
    return table


def sampling(gpu: Gpu) -> dict[str, Callable[[], torch.Tensor]]:
    return {
        "llama3": partial(launch_draw, gpu, 128_256, True),
        "qwen3": partial(launch_draw, gpu, 151_936, False),
        "watermark": partial(launch_draw, gpu, 151_936, True, is_marked=True),
        "penalties": partial(launch_penalties, 151_936),
    }


def bitmask(gpu: Gpu) -> dict[str, Callable[[], None]]:
    logits = torch.empty(2, 128_256)
    masks = torch.empty(2, 128_256 // 32, dtype=torch.int32)
    return {"llama3": partial(forbid_tokens_triton, logits, torch.arange(2), masks)}
