"""Writes the experts of a random model as llama.cpp's converters do: a stack for each of the three projections."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import torch

from tests.gpu_worker.quantization.gguf.raw_blocks import dequantized, random_rows


def add_expert_fields(writer: Any, config: Any) -> None:
    """Add what metadata say of mixtures, if the model has any."""
    num_experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if not num_experts:
        return
    writer.add_expert_count(num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "gpt_oss":
        writer.add_sliding_window(config.sliding_window)


def add_expert_parameter(writer: Any, kind: str, name: str, parameter: Any, config: Any, seed: int) -> None:
    """Write one of `transformers`' stacks; its matrices become new random ones of the type."""
    block = f"blk.{name.split('.')[2]}"
    is_gpt_oss = config.model_type == "gpt_oss"
    if name.endswith("bias"):
        parts = _parts(parameter.data, is_interleaved=is_gpt_oss) if "gate_up" in name else [parameter.data]
        for part, bias in zip(_names(name), parts, strict=True):
            writer.add_tensor(f"{block}.{part}.bias", np.ascontiguousarray(bias.numpy()))
        return
    # As `[num_experts, out_features, in_features]`, of which the parts are views.
    matrices = parameter.data.mT if is_gpt_oss else parameter.data
    parts = _parts(matrices, is_interleaved=is_gpt_oss) if "gate_up" in name else [matrices]
    for place, (part, matrix) in enumerate(zip(_names(name), parts, strict=True)):
        count, rows, columns = matrix.shape
        raw = random_rows(kind, count * rows, columns, 1.5 / columns**0.5, seed + 1000 * place)
        matrix.copy_(torch.from_numpy(dequantized(kind, raw)).view(count, rows, columns))
        raw = raw.reshape(count, rows, -1)
        writer.add_tensor(f"{block}.{part}.weight", raw, raw_dtype=gguf.GGMLQuantizationType[kind])


def _names(name: str) -> tuple[str, ...]:
    return ("ffn_gate_exps", "ffn_up_exps") if "gate_up" in name else ("ffn_down_exps",)


def _parts(both: torch.Tensor, *, is_interleaved: bool) -> list[torch.Tensor]:
    """Return gates and up projections, as views along the second dimension."""
    if is_interleaved:
        return [both[:, 0::2], both[:, 1::2]]
    return list(both.chunk(2, dim=1))
