from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ops.sizing.model_size import FORMATS, ModelSize, read_model_size
from shared.errors import HeadraceError
from tests.ops.sizing.models import (
    GPT_OSS_120B,
    LLAMA_2_70B,
    LLAMA_31_8B,
    LLAMA_33_70B,
    QWEN3_30B_A3B,
    write_config,
)


def num_weights(size: ModelSize) -> float:
    return size.weight_bytes(FORMATS["bf16"]) / 2


@pytest.mark.parametrize(
    ("fields", "billions"), [(LLAMA_2_70B, 68.98), (LLAMA_33_70B, 70.55), (LLAMA_31_8B, 8.03), (QWEN3_30B_A3B, 30.53)]
)
def test_models_have_as_many_parameters_as_their_makers_say(
    tmp_path: Path, fields: dict[str, Any], billions: float
) -> None:
    assert num_weights(read_model_size(write_config(tmp_path, fields))) / 1e9 == pytest.approx(billions, rel=0.001)


def test_token_meets_the_active_parameters_of_a_mixture(tmp_path: Path) -> None:
    size = read_model_size(write_config(tmp_path, QWEN3_30B_A3B))
    # Its maker says 3.3 billion, the embedding included.
    assert (size.read_weights(1) + size.embedding_weights) / 1e9 == pytest.approx(3.35, rel=0.02)
    assert size.read_weights(1) < size.read_weights(8) < size.read_weights(10_000) <= num_weights(size)


def test_4096_tokens_of_llama_2_70b_take_1_34_gb(tmp_path: Path) -> None:
    size = read_model_size(write_config(tmp_path, LLAMA_2_70B))
    assert size.read_bytes(4096, torch.float16) == 1_342_177_280


def test_windows_bound_what_is_read(tmp_path: Path) -> None:
    fields = LLAMA_31_8B | {"architectures": ["MistralForCausalLM"], "sliding_window": 1024}
    size = read_model_size(write_config(tmp_path, fields))
    assert size.read_bytes(8192) == size.read_bytes(1024) == 8 * size.read_bytes(128)
    assert size.attention_flops(8191, 1) == size.attention_flops(1023, 1)


def test_operations_of_a_forward_pass_are_two_for_each_weight_and_token(tmp_path: Path) -> None:
    size = read_model_size(write_config(tmp_path, LLAMA_2_70B))
    assert size.flops(10, 10) == pytest.approx(2 * 10 * (num_weights(size) - 32000 * 8192), rel=1e-9)
    # Attention of a whole prompt: queries by keys, and scores by values, half of all pairs.
    assert size.attention_flops(0, 2048) == pytest.approx(80 * 4 * 8192 * 2048**2 / 2, rel=0.001)


def test_int4_stores_scales_too_and_leaves_embeddings_alone(tmp_path: Path) -> None:
    size = read_model_size(write_config(tmp_path, LLAMA_2_70B))
    matrices = num_weights(size) - 2 * 32000 * 8192
    assert size.weight_bytes(FORMATS["int4"]) == matrices * 4.25 / 8 + 2 * 32000 * 8192 * 2


def test_gpt_oss_has_all_but_its_experts_in_16_bits(tmp_path: Path) -> None:
    """The published files of openai/gpt-oss-120b have 65.2 * 10**9 bytes."""
    size = read_model_size(write_config(tmp_path, GPT_OSS_120B))
    assert size.weight_bytes(FORMATS["int4"]) == pytest.approx(65.2e9, rel=0.005)
    # A token meets four experts of 128, and all of attention and the head.
    attention, head, experts = 36 * 2880 * 64 * (2 * 64 + 2 * 8), 201088 * 2880, 36 * 4 * 3 * 2880**2
    read = experts * 4.25 / 8 + 2 * (attention + head)
    assert size.step_bytes(FORMATS["int4"], 1) == pytest.approx(read, rel=0.01)


def test_configuration_may_have_any_name(tmp_path: Path) -> None:
    named = read_model_size(write_config(tmp_path, LLAMA_31_8B, "llama-8b.json"))
    assert named.config == read_model_size(write_config(tmp_path, LLAMA_31_8B).parent).config


FLOAT8_CHANNELS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}


@pytest.mark.parametrize(
    ("method", "stored"),
    [
        ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "int4"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4"),
        ({"quant_method": "gptq", "bits": 4}, "int4"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": FLOAT8_CHANNELS}},
            },
            "fp8",
        ),
    ],
)
def test_quantized_checkpoint_is_planned_in_its_own_format_alone(
    tmp_path: Path, method: dict[str, Any], stored: str
) -> None:
    size = read_model_size(write_config(tmp_path, LLAMA_31_8B | {"quantization_config": method}))
    assert (size.stored, size.formats) == (stored, (stored,))
    assert read_model_size(write_config(tmp_path, LLAMA_31_8B)).formats == ("bf16", "fp8", "int4")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (LLAMA_31_8B | {"architectures": ["NobodyForCausalLM"]}, "unsupported architecture"),
        (
            LLAMA_31_8B | {"quantization_config": {"quant_method": "gptq", "bits": 8}},
            "no formula here for how its checkpoint is quantized; a copy of its config.json without",
        ),
        (LLAMA_31_8B | {"num_hidden_layers": None}, "num_hidden_layers"),
    ],
)
def test_what_formulas_do_not_cover_is_unsupported(tmp_path: Path, fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(HeadraceError, match=problem):
        read_model_size(write_config(tmp_path, fields))


def test_mistake_is_told_of_the_file_that_was_given(tmp_path: Path) -> None:
    file = write_config(tmp_path, LLAMA_31_8B | {"num_hidden_layers": -80}, "c4.json")
    with pytest.raises(HeadraceError) as refused:
        read_model_size(file)
    assert str(refused.value).startswith(f"{file}: field 'num_hidden_layers' is -80")
    with pytest.raises(HeadraceError, match="/dev/null is neither a model's directory nor a file"):
        read_model_size(Path("/dev/null"))


def test_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(HeadraceError, match="there is no directory or file"):
        read_model_size(tmp_path / "none")
