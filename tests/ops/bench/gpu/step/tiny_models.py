"""The benched models at tiny sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ops.bench.gpu.shapes import (
    DEEPSEEK_V2_LITE,
    GPT_OSS_20B,
    LLAMA3_8B,
    QWEN3_06B,
    QWEN3_30B_A3B,
    QWEN3_NEXT_80B,
    ModelShape,
)

CPU = torch.device("cpu")
CODES = "quantization_config"
_COMMON = {"hidden_size": 64, "vocab_size": 300, "num_attention_heads": 4, "head_dim": 16}


def with_fields(shape: ModelShape, **fields: Any) -> ModelShape:
    """Return the same with other fields."""
    return replace(shape, fields={**shape.fields, **fields})


def _tiny(shape: ModelShape, num_layers: int, num_key_value_heads: int = 2, **fields: Any) -> ModelShape:
    tiny = with_fields(shape, **_COMMON, num_key_value_heads=num_key_value_heads, **fields)
    return replace(tiny, name=f"tiny {shape.name}", num_layers=num_layers)


QWEN = _tiny(QWEN3_06B, 2, intermediate_size=96)
LLAMA = _tiny(LLAMA3_8B, 2, intermediate_size=96)
DENSE = {"qwen": QWEN, "llama": LLAMA}
OTHER = {
    "moe": _tiny(QWEN3_30B_A3B, 2, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=3),
    "oss": _tiny(GPT_OSS_20B, 2, intermediate_size=96, num_local_experts=6, num_experts_per_tok=2, sliding_window=7),
    "mla": _tiny(
        DEEPSEEK_V2_LITE,
        3,
        intermediate_size=96,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=3,
        num_key_value_heads=4,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
    ),
    "next": _tiny(
        QWEN3_NEXT_80B,
        4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        num_experts=8,
        num_experts_per_tok=3,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=12,
        linear_value_head_dim=20,
    ),
}
