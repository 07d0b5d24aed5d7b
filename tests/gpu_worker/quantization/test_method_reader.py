"""The served quantizations, and the errors for the others."""

from __future__ import annotations

import time
from typing import Any

import pytest

from gpu_worker.quantization.config_fields import OTHER_FORMS, QuantizationError, compile_pattern
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


NAME = "model.layers.31.self_attn.q_proj"


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        (r".*self_attn.*", True),
        (r".*lm_head", False),
        (r".*\.(?:1[0-5]|20|31)\..*(?:gate|q)_proj", True),
        (r"model\.layers\.\d+\.self_attn\.[qkv]_proj$", True),
        (r"(?!model\.layers\.31\.).*", False),
        (r"self_attn", False),
        (r"[](|?*+]*model", True),
    ],
)
def test_patterns_match_from_the_beginning(text: str, matches: bool) -> None:
    assert bool(compile_pattern("ignore", text).match(NAME)) is matches


@pytest.mark.parametrize(
    "text",
    [
        "(.+)+x",
        "(a*){9}",
        ".*" * 9,
        ".{,40}" * 9,
        ".?" * 30 + "Z",
        ".??" * 30 + "Z",
        "(.|.)" * 30 + "Z",
        "(?:.|.|.)" * 20 + "[Z]",
        # A comment that hides the repeats behind what looks like a class of characters.
        "(?x)#[\n" + ".?" * 30 + "Z",
        "(?#[)" + ".?" * 30 + "Z",
        "x" * 1001,
    ],
)
def test_pattern_that_may_take_forever_is_refused(text: str) -> None:
    with pytest.raises(QuantizationError, match="no repeated group") as raised:
        compile_pattern("ignore", text)
    assert raised.value.field == "quantization_config.ignore"


@pytest.mark.parametrize("text", [".?" * 20 + "Z", "(.|.)" * 20 + "[Z]", ".*" * 5 + "[YZ]", ".*.*.*(.|.)(.|.)[YZ]"])
def test_the_slowest_patterns_that_are_let_through_end_soon(text: str) -> None:
    started = time.process_time()
    assert compile_pattern("ignore", text).match(NAME) is None
    assert time.process_time() - started < 1


@pytest.mark.parametrize("text", ["(", "[", "a{2,1}", "*"])
def test_what_is_no_pattern_is_refused(text: str) -> None:
    with pytest.raises(QuantizationError, match="is not a regular expression"):
        compile_pattern("ignore", text)
