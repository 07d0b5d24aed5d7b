"""FP8 checkpoints against `transformers` on the dense weights they stand for, inputs rounded alike; damaged ones.

Checkpoints of NVIDIA's Model Optimizer against `transformers` on the dense weights, inputs rounded alike.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.models.json_file import CheckpointError
from tests.gpu_worker.quantization.checkpoints import (
    Made,
    Pack,
    assert_near_oracle_with_rounded_inputs,
    but_head,
    make_checkpoint,
)
from tests.gpu_worker.quantization.packers import FP8_MAX, PackedLayer, fp8, fp8_block_inputs, fp8_blocks, fp8_inputs

QUERY_0 = "model.layers.0.self_attn.q_proj"
# Several blocks a matrix, the last ones cut; key and value heads are one whole block of rows.
BLOCK_SIZES = {"hidden_size": 160, "intermediate_size": 272, "head_dim": 64, "num_key_value_heads": 2}


def config(**fields: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", **fields}


def per_tensor(weight: torch.Tensor) -> PackedLayer:
    return fp8(weight, weight.abs().max() / FP8_MAX, fp8_inputs)


def static(scale: float, name: str = "input_scale", weight_name: str = "weight_scale") -> Any:
    def pack(weight: torch.Tensor) -> PackedLayer:
        value = torch.tensor(scale)
        layer = fp8(weight, weight.abs().max() / FP8_MAX, lambda x: fp8_inputs(x, value), weight_name)
        layer.tensors[name] = value
        return layer

    return pack


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return make_checkpoint(tmp_path, config(), but_head(per_tensor))


def test_scale_a_tensor_different_in_parts_of_one_projection(made: Made) -> None:
    made.change_config(fmt="float8_e4m3fn", activation_scheme="Dynamic")
    assert_near_oracle_with_rounded_inputs(made)


@pytest.mark.parametrize("is_flat", [True, False])
def test_scale_a_row(tmp_path: Path, is_flat: bool) -> None:
    def pack(weight: torch.Tensor) -> PackedLayer:
        layer = fp8(weight, weight.abs().amax(dim=1, keepdim=True) / FP8_MAX, fp8_inputs)
        if is_flat:
            layer.tensors["weight_scale"] = layer.tensors["weight_scale"].flatten()
        return layer

    assert_near_oracle_with_rounded_inputs(make_checkpoint(tmp_path, config(), but_head(pack)))


@pytest.mark.parametrize("options", [BLOCK_SIZES, BLOCK_SIZES | {"head_dim": 40}, {}])
def test_scale_a_block(tmp_path: Path, options: dict[str, int]) -> None:
    # Heads of 40 leave no boundary between projections on one between blocks.
    pack = but_head(lambda weight: fp8_blocks(weight, fp8_block_inputs))
    made = make_checkpoint(tmp_path, config(weight_block_size=[128, 128]), pack, **options)
    assert_near_oracle_with_rounded_inputs(made)


@pytest.mark.parametrize("names", [("input_scale", "weight_scale"), ("activation_scale", "weight_scale_inv")])
def test_static_scale_of_inputs(tmp_path: Path, names: tuple[str, str]) -> None:
    made = make_checkpoint(tmp_path, config(activation_scheme="static"), but_head(static(0.02, *names)))
    assert_near_oracle_with_rounded_inputs(made)


def test_static_scales_different_in_parts_of_one_projection(tmp_path: Path) -> None:
    def pack(name: str, weight: torch.Tensor) -> Any:
        return None if name == "lm_head" else static(0.01 + 0.01 * (sum(name.encode()) % 5))(weight)

    assert_near_oracle_with_rounded_inputs(make_checkpoint(tmp_path, config(activation_scheme="static"), pack))


def test_layers_left_alone(tmp_path: Path) -> None:
    def pack(name: str, weight: torch.Tensor) -> Any:
        return None if name == "lm_head" or "q_proj" in name or "layers.1.mlp" in name else per_tensor(weight)

    fields = config(ignored_layers=["lm_head", "model.layers.1.mlp.down_proj"])
    assert_near_oracle_with_rounded_inputs(make_checkpoint(tmp_path, fields, pack))


def test_scales_of_a_quantized_cache_are_ignored(made: Made) -> None:
    scales = {f"model.layers.0.self_attn.{name}": torch.tensor(0.5) for name in ("k_scale", "v_scale", "kv_scale")}
    made.change_tensors(lambda t: t.update(scales))
    assert_near_oracle_with_rounded_inputs(made)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"activation_scheme": "none"}, "activation_scheme' is 'none'; supported: 'dynamic', 'static'"),
        ({"weight_block_size": [64, 64]}, "weight_block_size' is '[64, 64]'; supported: None, [128, 128]"),
        ({"weight_block_size": "128x128"}, "weight_block_size' cannot be read"),
        ({"weight_block_size": [128, 128], "activation_scheme": "static"}, "'static'; supported: 'dynamic'"),
        ({"fmt": "e5m2"}, "fmt' is 'e5m2'"),
    ],
)
def test_unsupported_field_is_named(made: Made, fields: dict[str, Any], message: str) -> None:
    made.change_config(**fields)
    assert message in made.refusal()


@pytest.mark.parametrize(
    ("end", "tensor", "message"),
    [
        ("weight", torch.zeros(64, 64).to(torch.float8_e5m2), "needs torch.float8_e4m3fn"),
        ("weight", torch.zeros(64, 32).to(torch.float8_e4m3fn), "has shape [64, 32]"),
        ("weight", torch.full((64, 64), torch.nan).to(torch.float8_e4m3fn), "values that are not numbers"),
        ("weight_scale", torch.ones(3), "has shape [3]; config.json calls for [] or [1] or [1, 1] or [64] or [64, 1]"),
        ("weight_scale", torch.tensor(torch.inf), "not finite"),
        ("weight_scale", torch.zeros((), dtype=torch.uint8), "scales must be float32"),
    ],
)
def test_damaged_tensor_is_named(made: Made, end: str, tensor: torch.Tensor, message: str) -> None:
    assert message in made.refusal_with(f"{QUERY_0}.{end}", tensor)


def test_missing_scale_is_refused(made: Made) -> None:
    made.change_tensors(lambda t: t.pop(f"{QUERY_0}.weight_scale"))
    with pytest.raises(CheckpointError, match=r"q_proj\.weight' is stored as torch\.float8_e4m3fn; supported: float32"):
        made.load()


@pytest.mark.parametrize("scale", [0.0, -1.0, torch.nan])
def test_scale_of_inputs_that_cannot_divide_is_refused(tmp_path: Path, scale: float) -> None:
    made = make_checkpoint(tmp_path, config(activation_scheme="static"), but_head(static(0.02)))
    made.change_tensors(lambda t: t.update({f"{QUERY_0}.input_scale": torch.tensor(scale)}))
    with pytest.raises(CheckpointError, match=r"q_proj\.input_scale'"):
        made.load()


def test_blocks_where_the_config_has_none_are_refused(tmp_path: Path) -> None:
    pack: Pack = but_head(lambda weight: fp8_blocks(weight))
    made = make_checkpoint(tmp_path, config(), pack, **BLOCK_SIZES)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight_scale_inv' has shape \[2, 2\]"):
        made.load()


FIELDS = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}


@pytest.fixture
def modelopt_made(tmp_path: Path) -> Made:
    modelopt_made = make_checkpoint(tmp_path, FIELDS, but_head(static(0.02)))
    scales = {f"model.layers.{i}.self_attn.{part}.{part[0]}_scale" for i in range(2) for part in ("k_proj", "v_proj")}
    modelopt_made.change_tensors(lambda tensors: tensors.update({name: torch.tensor(0.5) for name in scales}))
    return modelopt_made


def move_configuration(modelopt_made: Made, quantization: object) -> None:
    """Put it where the tool's first versions have it."""
    path = modelopt_made.directory / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    (modelopt_made.directory / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))


def test_float8_equals_the_oracle(modelopt_made: Made) -> None:
    assert_near_oracle_with_rounded_inputs(modelopt_made)


def test_configuration_may_be_a_file_of_its_own(modelopt_made: Made) -> None:
    move_configuration(
        modelopt_made, {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    )
    assert_near_oracle_with_rounded_inputs(modelopt_made)


def test_another_algorithm_is_refused_by_its_field(modelopt_made: Made) -> None:
    modelopt_made.change_config(quant_algo="NVFP4")
    assert "config.json: field 'quantization_config.quant_algo' is 'NVFP4'; supported: 'FP8'" in modelopt_made.refusal()


@pytest.mark.parametrize("quantization", [["FP8"], {"exclude_modules": []}, None])
def test_a_damaged_file_is_refused(modelopt_made: Made, quantization: object) -> None:
    move_configuration(modelopt_made, quantization)
    assert "hf_quant_config.json: field 'quantization" in modelopt_made.refusal()
