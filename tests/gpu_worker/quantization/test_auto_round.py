"""AutoRound checkpoints against `transformers` on the dense weights that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.quantization.config_fields import QuantizationError
from gpu_worker.quantization.method_reader import read_method
from tests.gpu_worker.quantization.checkpoints import assert_equals_oracle, but_head, make_checkpoint
from tests.gpu_worker.quantization.packers import PackedLayer, awq, gptq, in_order

EIGHT, PLAIN = "model.layers.0.mlp.down_proj", "model.layers.1.self_attn.o_proj"
FIELDS = {"quant_method": "auto-round", "bits": 4, "group_size": 16, "sym": True, "iters": 200, "data_type": "int"}
SIZES = {"intermediate_size": 128}


def test_layers_of_several_bits_in_the_layout_of_gptq(tmp_path: Path) -> None:
    def pack(name: str, weight: torch.Tensor) -> PackedLayer | None:
        if name in ("lm_head", PLAIN):
            return None
        bits, size = (8, 32) if name == EIGHT else (4, 16)
        return gptq(weight, bits, in_order(weight.shape[1], size))

    own = {EIGHT: {"bits": 8, "group_size": 32}, PLAIN: {"bits": 16, "data_type": "fp"}, "lm_head": {"bits": 16}}
    fields = {**FIELDS, "packing_format": "auto_round:auto_gptq", "extra_config": own}
    assert_equals_oracle(make_checkpoint(tmp_path, fields, pack, **SIZES))


def test_the_layout_of_awq(tmp_path: Path) -> None:
    fields = {**FIELDS, "sym": False, "packing_format": "auto_round:auto_awq"}
    assert_equals_oracle(make_checkpoint(tmp_path, fields, but_head(lambda weight: awq(weight, 16)), **SIZES))


@pytest.mark.parametrize(
    ("changes", "field", "problem"),
    [
        ({"packing_format": "auto_round:llm_compressor"}, "packing_format", "supported: 'auto_round:auto_gptq', "),
        ({"data_type": "mx_fp"}, "data_type", "supported: 'int'"),
        ({"bits": 2}, "bits", "supported: 4, 8"),
        ({"extra_config": {"x": {"bits": 3}}}, "extra_config.x.bits", "supported: 4, 8"),
        (
            {"extra_config": {"x": {"bits": 8}}, "packing_format": "auto_round:auto_awq"},
            "extra_config.x",
            "in another way",
        ),
        ({"extra_config": []}, "extra_config", "cannot be read"),
    ],
)
def test_what_is_not_served_is_refused_by_its_field(changes: dict[str, Any], field: str, problem: str) -> None:
    with pytest.raises(QuantizationError) as raised:
        read_method({"quantization_config": {**FIELDS, **changes}})
    assert raised.value.field == f"quantization_config.{field}"
    assert problem in raised.value.problem
