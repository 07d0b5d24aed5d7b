"""Quantized experts against `transformers` on the dense weights that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu_worker.quantization.checkpoints import Made, Pack, assert_equals_oracle, but_head, make_checkpoint
from tests.gpu_worker.quantization.packers import (
    FP8_MAX,
    PackedLayer,
    awq,
    ct_packed,
    fp8,
    fp8_blocks,
    gptq,
    in_order,
    int8,
    shuffled,
)
from tests.gpu_worker.quantization.test_compressed_tensors import INT4, config, group

SIZES: dict[str, Any] = {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96,
    "norm_topk_prob": True, "eos_token_id": None,
}  # fmt: skip
BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}


def per_tensor(weight: torch.Tensor) -> PackedLayer:
    return fp8(weight, weight.abs().max() / FP8_MAX)


def experts_alone(pack: Pack) -> Pack:
    """Leave alone whatever is outside of experts."""
    return lambda name, weight: pack(name, weight) if ".experts." in name else None


def score_left_alone(pack: Pack) -> Pack:
    """Leave alone the score of the shared expert, a matrix of one row, as tools do."""
    return lambda name, weight: None if name.endswith("shared_expert_gate") else pack(name, weight)


FP8_CHANNEL = group({"num_bits": 8, "type": "float", "strategy": "channel"})
FP8_TENSOR = group({"num_bits": 8, "type": "float", "strategy": "tensor"})
IGNORED = {"ignore": ["lm_head", "re:.*shared_expert_gate"]}

METHODS: dict[str, tuple[dict[str, Any], Pack]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
        but_head(lambda w: gptq(w, 4, in_order(w.shape[1], 32), symmetric=False)),
    ),
    "gptq with act-order, 8 bits": (
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": True, "sym": True},
        but_head(lambda w: gptq(w, 8, shuffled(w.shape[1], 32, 1))),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32}, but_head(lambda w: awq(w, 32))),
    "awq of experts alone": (
        {"quant_method": "awq", "bits": 4, "group_size": 32}, experts_alone(but_head(lambda w: awq(w, 32))),
    ),
    "compressed-tensors, 4 bits": (
        config("pack-quantized", INT4, **IGNORED),
        but_head(lambda w: ct_packed(w, 4, in_order(w.shape[1], 32), symmetric=True)),
    ),
    "compressed-tensors, int8": (
        config("int-quantized", group({"num_bits": 8, "strategy": "channel"}), **IGNORED), but_head(int8),
    ),
    "fp8, a scale a tensor": (config("float-quantized", FP8_TENSOR, **IGNORED), but_head(per_tensor)),
    "fp8, a scale a channel": (
        config("float-quantized", FP8_CHANNEL, **IGNORED),
        but_head(lambda w: fp8(w, w.abs().amax(dim=1, keepdim=True) / FP8_MAX)),
    ),
    "fp8, blocks": (
        config("float-quantized", group(BLOCKS), **IGNORED), but_head(lambda w: fp8_blocks(w, name="weight_scale")),
    ),
}  # fmt: skip


def make(directory: Path, name: str, **options: Any) -> Made:
    fields, pack = METHODS[name]
    return make_checkpoint(directory, fields, score_left_alone(pack), "Qwen2Moe", **SIZES, **options)


@pytest.mark.parametrize("name", METHODS)
def test_quantized_experts_equal_the_oracle(tmp_path: Path, name: str) -> None:
    assert_equals_oracle(make(tmp_path, name))


def test_blocks_that_gates_and_ups_share_equal_the_oracle(tmp_path: Path) -> None:
    """Where blocks of gates end inside of a block, the two cannot be one matrix."""
    assert_equals_oracle(make(tmp_path, "fp8, blocks", hidden_size=160, head_dim=64))


def test_an_expert_without_scales_is_refused(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight_scale"
    assert "has no tensor" in make(tmp_path, "fp8, a scale a channel").refusal_with(name, None)
