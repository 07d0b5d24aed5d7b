"""The launches of whole steps of published models beyond the dense decoder: in 16 bits, and as they are checked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kernels.activation.experts import SILU, clamped_swiglu
from kernels.gpu_config import Gpu
from kernels.linear.forms import FLOAT4
from kernels.moe import RoutingRule
from kernels.moe.triton_route import route_triton
from tests.kernels import attention_launches, moe_launches, recurrent_launches

CHECKED = "float32"
"""In the names of launches that serve exactness: registers may spill there."""

# Query heads, KV heads, sizes of keys and of values.
_ATTENTION: dict[str, tuple[tuple[int, int, int, int], dict[str, Any]]] = {
    "qwen3_a3b": ((32, 4, 128, 128), {}),
    "gpt_oss": ((64, 8, 64, 64), {"has_sinks": True}),
    "gpt_oss_window": ((64, 8, 64, 64), {"has_sinks": True, "sliding_window": 128}),
    "deepseek_lite": ((16, 1, 576, 512), {}),
    "qwen3_next": ((16, 2, 256, 256), {}),
}
# Experts, of a token, features of the stream, and between an expert's matrices.
_EXPERTS = {
    "qwen3_a3b": ((128, 8, 2048, 768), SILU),
    "gpt_oss": ((32, 4, 2880, 2880), clamped_swiglu(1.702, 7.0)),
    "deepseek_lite": ((64, 6, 2048, 1408), SILU),
    "qwen3_next": ((512, 10, 2048, 512), SILU),
}
_RULES = {
    "qwen3_a3b": (128, RoutingRule(8, renormalize=True)),
    "gpt_oss": (32, RoutingRule(4, "softmax_after_topk")),
    "deepseek_lite": (64, RoutingRule(6)),
    "qwen3_next": (512, RoutingRule(10, renormalize=True)),
}


def launches(gpu: Gpu) -> dict[str, Callable[[], object]]:
    named: dict[str, Callable[[], object]] = {}
    for dtype in (torch.bfloat16, torch.float32):
        label = CHECKED if dtype is torch.float32 else "bfloat16"
        for name, (sizes, options) in _ATTENTION.items():
            attend = partial(attention_launches.launch, gpu, cache_dtype=dtype, **options)
            named[f"{name} decode {label}"] = partial(attend, 64, 1, *sizes)
            named[f"{name} chunk {label}"] = partial(attend, 1, 128, *sizes)
        for name in _EXPERTS:
            for tokens in (1, 128) if dtype is torch.float32 else (1, 64, 256, 8192):
                named[f"{name} experts {tokens} {label}"] = _experts(gpu, name, tokens, dtype)
        named[f"qwen3_next delta decode {label}"] = partial(recurrent_launches.launch_delta, gpu, 1, dtype=dtype)
        named[f"qwen3_next delta chunk {label}"] = partial(recurrent_launches.launch_delta, gpu, 128, dtype=dtype)
        named[f"qwen3_next conv {label}"] = partial(recurrent_launches.launch_conv, 128, dtype=dtype)
    for name, (num_experts, rule) in _RULES.items():
        named[f"{name} route"] = partial(route_triton, torch.zeros(4, num_experts), rule)
    return named


def _experts(gpu: Gpu, name: str, num_tokens: int, dtype: torch.dtype) -> Callable[[], object]:
    (num_experts, top_k, hidden, inner), activation = _EXPERTS[name]
    shapes = (2 * inner, hidden), (hidden, inner)
    if name == "gpt_oss" and dtype is torch.bfloat16:
        gate_up, down = (moe_launches.packed(FLOAT4, num_experts, *shape, 32) for shape in shapes)
        return partial(moe_launches.launch, gpu, num_tokens, top_k, gate_up, down, activation)
    stacks = [moe_launches.dense(num_experts, *shape, dtype) for shape in shapes]
    return partial(moe_launches.launch, gpu, num_tokens, top_k, stacks[0], stacks[1], activation, dtype)
