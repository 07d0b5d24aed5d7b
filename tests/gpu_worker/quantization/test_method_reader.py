"""Which quantizations are served, and what is said of the others."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_worker.quantization.config_fields import OTHER_FORMS, QuantizationError
from gpu_worker.quantization.method_reader import read_method


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}])
def test_dense_model_has_no_method(config: dict[str, Any]) -> None:
    assert read_method(config) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "awq", "bits": 4, "group_size": 128},
        {"quant_method": "fp8"},
        {"quant_method": "compressed-tensors", "config_groups": {}},
    ],
)
def test_method_is_the_one_that_is_named(fields: dict[str, Any]) -> None:
    method = read_method({"quantization_config": fields})
    assert method is not None
    assert method.name == fields["quant_method"]


@pytest.mark.parametrize("name", ["bitsandbytes", "GPTQ", "", None, 4, ["gptq"]])
def test_other_method_is_refused_with_those_that_are_supported(name: object) -> None:
    with pytest.raises(QuantizationError) as raised:
        read_method({"quantization_config": {"quant_method": name, "bits": 4}})
    assert raised.value.field == "quantization_config.quant_method"
    assert "supported: 'gptq', 'awq', 'fp8', 'compressed-tensors'" in raised.value.problem
    assert raised.value.problem.endswith(OTHER_FORMS)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float"}}},
            },
            "config_groups.group_0.format",
        ),
    ],
)
def test_four_bits_of_nvidia_are_refused_with_what_helps(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(QuantizationError) as raised:
        read_method({"quantization_config": fields})
    assert raised.value.field == f"quantization_config.{field}"
    assert raised.value.problem.endswith(OTHER_FORMS)


@pytest.mark.parametrize("fields", [[], "gptq", 1])
def test_config_that_is_no_object_is_refused(fields: object) -> None:
    with pytest.raises(QuantizationError) as raised:
        read_method({"quantization_config": fields})
    assert raised.value.field == "quantization_config"
