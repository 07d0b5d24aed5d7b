"""The products with experts that compile checks look at: Qwen3-30B-A3B, gpt-oss-20b, Nemotron 3 Nano, odd sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from kernels.activation.experts import RELU_SQUARED, SILU, ExpertActivation, clamped_swiglu
from kernels.gpu_config import Gpu, GpuGeneration
from kernels.linear.forms import FLOAT4, FLOAT8, INT4, Number
from kernels.linear.gpu_packed.group_numbers import GroupLayout
from kernels.linear.gpu_packed.matrix import ROW_MULTIPLE, TILE_ROWS, num_planes
from kernels.moe import RoutingRule
from kernels.moe.gpu import GpuExperts
from kernels.moe.stacks import DenseStack, ExpertStack, PackedStack
from kernels.moe.triton_route import route_triton
from tests.kernels.packed_linear_launches import describe_groups

BFLOAT16 = torch.bfloat16


def dense(num_experts: int, rows: int, columns: int, dtype: torch.dtype = BFLOAT16) -> DenseStack:
    """Return a stack of the right shape; the compiler asks for no values, so it has little memory."""
    return DenseStack(torch.empty(1, dtype=dtype).expand(num_experts, rows, columns), None)


def packed(
    number: Number, num_experts: int, rows: int, columns: int, group_size: int, *, has_offsets: bool = False
) -> PackedStack:
    plane = 64 if group_size % 64 == 0 else 32
    num_tiles = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE // TILE_ROWS
    num_blocks = -(-columns // (num_planes(number) * plane))
    words = torch.empty(plane, dtype=torch.int16).expand(num_experts, num_tiles, num_blocks, TILE_ROWS, plane)
    layout = GroupLayout(group_size, plane, num_planes(number), num_blocks)
    one = describe_groups(layout, num_tiles * TILE_ROWS, "E8M0" if number is FLOAT4 else "FP16")
    scales = replace(one, words=one.words.expand(num_experts, *one.words.shape))
    offsets = None
    if has_offsets:
        wide = describe_groups(layout, num_tiles * TILE_ROWS, "FP32")
        offsets = replace(wide, words=wide.words.expand(num_experts, *wide.words.shape))
    bias = torch.empty(num_experts, rows, dtype=BFLOAT16) if number is FLOAT4 else None
    return PackedStack(number, words, scales, offsets, group_size, rows, columns, None, bias)


def launch(
    gpu: Gpu,
    num_tokens: int,
    top_k: int,
    gate_up: ExpertStack,
    down: ExpertStack,
    activation: ExpertActivation,
    dtype: torch.dtype = BFLOAT16,
) -> torch.Tensor:
    experts = GpuExperts(gate_up, down, activation, 0, gpu, has_float8=gpu.generation is not GpuGeneration.AMPERE)
    ids = torch.zeros(num_tokens, top_k, dtype=torch.int32)
    return experts(torch.empty(num_tokens, gate_up.shape[2], dtype=dtype), ids, torch.zeros(num_tokens, top_k))


def launches(gpu: Gpu) -> dict[str, Callable[[], object]]:
    qwen = dense(128, 1536, 2048), dense(128, 2048, 768)
    gpt_oss = packed(FLOAT4, 32, 5760, 2880, 32), packed(FLOAT4, 32, 2880, 2880, 32)
    int4 = packed(INT4, 128, 1536, 2048, 128), packed(INT4, 128, 2048, 768, 128)
    offsets = tuple(packed(INT4, 128, *shape, 128, has_offsets=True) for shape in ((1536, 2048), (2048, 768)))
    fp8 = packed(FLOAT8, 128, 1536, 2048, 128), packed(FLOAT8, 128, 2048, 768, 128)
    named: dict[str, Callable[[], object]] = {}
    for tokens in (1, 512, 8192):
        named[f"qwen_{tokens}"] = partial(launch, gpu, tokens, 8, *qwen, SILU)
        named[f"gpt_oss_{tokens}"] = partial(launch, gpu, tokens, 4, *gpt_oss, clamped_swiglu(1.702, 7.0))
    for tokens in (1, 512):
        named[f"int4_{tokens}"] = partial(launch, gpu, tokens, 8, *int4, SILU)
        named[f"int4_offsets_{tokens}"] = partial(launch, gpu, tokens, 8, offsets[0], offsets[1], SILU)
        named[f"fp8_{tokens}"] = partial(launch, gpu, tokens, 8, *fp8, SILU)
    rounded = [replace(stack, rounds_inputs=True) for stack in fp8]
    for tokens in (1024, 8192):
        named[f"fp8_rounded_{tokens}"] = partial(launch, gpu, tokens, 8, rounded[0], rounded[1], SILU)
    nemotron = dense(128, 1856, 2688), dense(128, 2688, 1856)
    for tokens in (1, 512):
        named[f"nemotron_{tokens}"] = partial(launch, gpu, tokens, 6, *nemotron, RELU_SQUARED)
    named["odd_3"] = partial(launch, gpu, 3, 2, dense(5, 46, 70), dense(5, 70, 23), SILU)
    plain = RoutingRule(8, renormalize=True)
    grouped = RoutingRule(8, "sigmoid", True, torch.zeros(256), 8, 4, "top2", 2.5)
    named["route_plain"] = partial(route_triton, torch.zeros(4, 128), plain)
    named["route_groups"] = partial(route_triton, torch.zeros(4, 256), grouped)
    named["route_after"] = partial(route_triton, torch.zeros(4, 32), RoutingRule(4, "softmax_after_topk"))
    return named


def hot(gpu: Gpu) -> dict[str, Callable[[], object]]:
    """Return those that every run of the tests compiles."""
    named = launches(gpu)
    return {name: named[name] for name in ("qwen_1", "gpt_oss_512")}
