"""Checkpoints of compressed-tensors against `transformers` on the dense weights they stand for, and damaged ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.models.json_file import CheckpointError
from tests.gpu_worker.quantization.checkpoints import (
    Made,
    Pack,
    assert_equals_oracle,
    assert_near_oracle_with_rounded_inputs,
    but_head,
    make_checkpoint,
)
from tests.gpu_worker.quantization.packers import (
    FP8_MAX,
    PackedLayer,
    ct_packed,
    fp8,
    fp8_block_inputs,
    fp8_blocks,
    fp8_inputs,
    in_order,
    int8,
    int8_inputs,
    shuffled,
)

QUERY_0 = "model.layers.0.self_attn.q_proj"
TOKEN_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
TOKEN_FP8 = TOKEN_INT8 | {"type": "float"}


def group(weights: dict[str, Any], inputs: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    defaults = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": None, "dynamic": False, "actorder": None}
    return {"targets": ["Linear"], "weights": defaults | weights, "input_activations": inputs} | fields


def config(layout: str, *groups: dict[str, Any], **fields: Any) -> dict[str, Any]:
    named = {f"group_{index}": one for index, one in enumerate(groups)}
    defaults = {"ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed"}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": named, **defaults, **fields}


INT4 = group({"strategy": "group", "group_size": 32})


def packed(bits: int = 4, group_size: int = 32, *, symmetric: bool = True) -> Pack:
    return but_head(lambda w: ct_packed(w, bits, in_order(w.shape[1], group_size), symmetric=symmetric))


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return make_checkpoint(tmp_path, config("pack-quantized", INT4), packed())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [-1, 32])
def test_packed_groups_and_channels(tmp_path: Path, bits: int, symmetric: bool, group_size: int) -> None:
    strategy = {"strategy": "channel"} if group_size == -1 else {"strategy": "group", "group_size": group_size}
    scheme = group({"num_bits": bits, "symmetric": symmetric, **strategy})
    # 114 inputs fill no whole word.
    pack = packed(bits, group_size, symmetric=symmetric)
    made = make_checkpoint(tmp_path, config("pack-quantized", scheme), pack, intermediate_size=114)
    assert_equals_oracle(made)


def test_packed_scale_a_tensor(tmp_path: Path) -> None:
    def pack(weight: torch.Tensor) -> PackedLayer:
        # The same scale in every row.
        layer = ct_packed(weight.reshape(1, -1), 8, in_order(weight.numel(), -1), symmetric=True)
        words = layer.tensors["weight_packed"].view(weight.shape[0], -1)
        tensors = {"weight_packed": words, "weight_scale": layer.tensors["weight_scale"].view(1)}
        return PackedLayer(tensors, layer.dense.view_as(weight))

    scheme = group({"num_bits": 8, "strategy": "tensor"})
    assert_equals_oracle(make_checkpoint(tmp_path, config("pack-quantized", scheme), but_head(pack)))


@pytest.mark.parametrize("name", ["group", "dynamic", True])
def test_packed_with_input_order(tmp_path: Path, name: str | bool) -> None:
    def pack(weight: torch.Tensor) -> PackedLayer:
        return ct_packed(weight, 4, shuffled(weight.shape[1], 32, 5), symmetric=False, has_order=True)

    scheme = group({"strategy": "group", "group_size": 32, "symmetric": False, "actorder": name})
    assert_equals_oracle(make_checkpoint(tmp_path, config("pack-quantized", scheme), but_head(pack)))


@pytest.mark.parametrize("name", ["weight", "static", False])
def test_order_of_calibration_alone_changes_nothing(made: Made, name: str | bool) -> None:
    made.change_config(config_groups={"group_0": group({"strategy": "group", "group_size": 32, "actorder": name})})
    assert_equals_oracle(made)


@pytest.mark.parametrize("layout", ["int-quantized", "naive-quantized"])
@pytest.mark.parametrize("per_channel", [True, False])
def test_int8_weights_alone(tmp_path: Path, layout: str, per_channel: bool) -> None:
    scheme = group({"num_bits": 8, "strategy": "channel" if per_channel else "tensor"})
    pack = but_head(lambda w: int8(w, per_channel=per_channel))
    assert_equals_oracle(make_checkpoint(tmp_path, config(layout, scheme), pack))


@pytest.mark.parametrize("per_channel", [True, False])
def test_int8_with_inputs_rounded_a_token(tmp_path: Path, per_channel: bool) -> None:
    scheme = group({"num_bits": 8, "strategy": "channel" if per_channel else "tensor"}, TOKEN_INT8)
    pack = but_head(lambda w: int8(w, per_channel=per_channel, inputs=int8_inputs))
    assert_near_oracle_with_rounded_inputs(make_checkpoint(tmp_path, config("int-quantized", scheme), pack))


def test_int8_with_a_static_scale_of_inputs(tmp_path: Path) -> None:
    def pack(weight: torch.Tensor) -> PackedLayer:
        layer = int8(weight, inputs=lambda x: int8_inputs(x, torch.tensor(0.03)))
        layer.tensors["input_scale"] = torch.tensor([0.03])
        return layer

    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
    scheme = group({"num_bits": 8, "strategy": "channel"}, inputs)
    assert_near_oracle_with_rounded_inputs(make_checkpoint(tmp_path, config("int-quantized", scheme), but_head(pack)))


@pytest.mark.parametrize("strategy", ["tensor", "channel"])
def test_float8_with_inputs_rounded_a_token(tmp_path: Path, strategy: str) -> None:
    def pack(weight: torch.Tensor) -> PackedLayer:
        scale = weight.abs().amax(dim=1, keepdim=True) if strategy == "channel" else weight.abs().max().view(1)
        return fp8(weight, scale / FP8_MAX, fp8_inputs)

    scheme = group({"num_bits": 8, "type": "float", "strategy": strategy}, TOKEN_FP8)
    assert_near_oracle_with_rounded_inputs(make_checkpoint(tmp_path, config("float-quantized", scheme), but_head(pack)))


def test_float8_weights_alone(tmp_path: Path) -> None:
    scheme = group({"num_bits": 8, "type": "float", "strategy": "tensor"})
    pack = but_head(lambda w: fp8(w, w.abs().max().view(1) / FP8_MAX))
    assert_equals_oracle(make_checkpoint(tmp_path, config("float-quantized", scheme), pack))


@pytest.mark.parametrize("structure", [[128, 128], "128x128"])
def test_float8_blocks(tmp_path: Path, structure: list[int] | str) -> None:
    inputs = TOKEN_FP8 | {"strategy": "group", "group_size": 128}
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": structure}
    pack = but_head(lambda w: fp8_blocks(w, fp8_block_inputs, "weight_scale"))
    fields = config("float-quantized", group(weights, inputs))
    made = make_checkpoint(tmp_path, fields, pack, hidden_size=160, intermediate_size=272, head_dim=64)
    assert_near_oracle_with_rounded_inputs(made)


def test_schemes_by_name_pattern_and_class(tmp_path: Path) -> None:
    def pack(name: str, weight: torch.Tensor) -> PackedLayer | None:
        if "v_proj" in name or name == "model.layers.1.mlp.up_proj":
            return None
        if name == "model.layers.0.self_attn.q_proj":
            return fp8(weight, weight.abs().max().view(1) / FP8_MAX)
        if ".mlp." in name:
            return int8(weight)
        return ct_packed(weight, 4, in_order(weight.shape[1], 32), symmetric=True)

    fields = config(
        "mixed-precision",
        INT4 | {"format": "pack-quantized"},
        group({"num_bits": 8, "strategy": "channel"}, targets=[r"re:.*\.mlp\..*_proj$"], format="int-quantized"),
        group(
            {"num_bits": 8, "type": "float", "strategy": "tensor"},
            targets=["model.layers.0.self_attn.q_proj"],
            format="float-quantized",
        ),
        ignore=["re:.*v_proj", "model.layers.1.mlp.up_proj"],
    )
    assert_equals_oracle(make_checkpoint(tmp_path, fields, pack))


def test_layers_that_no_group_targets_are_dense(tmp_path: Path) -> None:
    def pack(name: str, weight: torch.Tensor) -> PackedLayer | None:
        return ct_packed(weight, 4, in_order(weight.shape[1], 32), symmetric=True) if ".mlp." in name else None

    fields = config("pack-quantized", INT4 | {"targets": ["re:.*mlp.*"]}, ignore=[])
    assert_equals_oracle(make_checkpoint(tmp_path, fields, pack))


def test_zero_points_that_symmetry_implies_are_ignored(made: Made) -> None:
    made.change_tensors(lambda t: t.update({f"{QUERY_0}.weight_zero_point": torch.zeros(64, 2, dtype=torch.int8)}))
    assert_equals_oracle(made)


WEIGHTS = INT4["weights"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"format": "marlin-24"},
            "config_groups.group_0.format' is 'marlin-24' of int; supported: pack-quantized of int",
        ),
        ({"format": "float-quantized"}, "is 'float-quantized' of int"),
        ({"config_groups": None}, "Object missing required field `config_groups`"),
        ({"config_groups": {"W8A8": ["Linear"]}}, "cannot be read: Expected `object`, got `array`"),
        ({"ignore": "lm_head"}, "quantization_config.ignore' cannot be read"),
        ({"ignore": ["re:("]}, "quantization_config.ignore' has the pattern"),
        ({"ignore": ["re:(a*)*"]}, "no repeated group"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format' is 'sparse-24-bitmask'"),
        ({"transform_config": {"config_groups": {"a": {}}}}, "transform_config' is set"),
        ({"config_groups": {"g": INT4 | {"weights": None}}}, "config_groups.g.weights' is missing"),
        (
            {"config_groups": {"g": INT4 | {"weights": WEIGHTS | {"num_bits": 3}}}},
            "weights.num_bits' is '3'; supported: 4, 8",
        ),
        ({"config_groups": {"g": INT4 | {"weights": WEIGHTS | {"group_size": 0}}}}, "weights.group_size' is 0"),
        ({"config_groups": {"g": INT4 | {"weights": WEIGHTS | {"strategy": "block"}}}}, "weights.strategy' is 'block'"),
        ({"config_groups": {"g": INT4 | {"weights": WEIGHTS | {"actorder": "up"}}}}, "weights.actorder' is 'up'"),
        ({"config_groups": {"g": INT4 | {"input_activations": TOKEN_INT8}}}, "input_activations' is set"),
        (
            {"format": "int-quantized", "config_groups": {"g": group({"num_bits": 8, "strategy": "group"})}},
            "strategy' is",
        ),
        (
            {"format": "int-quantized", "config_groups": {"g": group({"num_bits": 8, "symmetric": False})}},
            "weights.symmetric' is false; supported: packed",
        ),
        ({"config_groups": {"g": INT4 | {"output_activations": TOKEN_INT8}}}, "output_activations' is set"),
    ],
)
def test_unsupported_field_is_named(made: Made, fields: dict[str, Any], message: str) -> None:
    made.change_config(**fields)
    assert message in made.refusal()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"symmetric": False}, "input_activations.symmetric' is 'False'"),
        ({"num_bits": 4}, "input_activations.num_bits' is '4'"),
        ({"type": "float"}, "input_activations.type' is 'float'; supported: 'int'"),
        ({"dynamic": False}, "input_activations.strategy' is 'token'; supported: 'tensor'"),
        ({"dynamic": "local"}, "input_activations.dynamic' is 'local'"),
        ({"dynamic": "", "strategy": "tensor"}, "input_activations.dynamic' is ''"),
        ({"strategy": "group", "group_size": 128}, "input_activations.strategy' is 'group'"),
    ],
)
def test_unsupported_rounding_of_inputs_is_named(made: Made, inputs: dict[str, Any], message: str) -> None:
    scheme = group({"num_bits": 8, "strategy": "channel"}, TOKEN_INT8 | inputs)
    made.change_config(format="int-quantized", config_groups={"g": scheme})
    assert message in made.refusal()


@pytest.mark.parametrize(
    ("end", "tensor", "message"),
    [
        ("weight_packed", torch.zeros(64, 9, dtype=torch.int32), "has shape [64, 9]; config.json calls for [64, 8]"),
        ("weight_packed", torch.zeros(64, 8), "stored as torch.float32"),
        ("weight_shape", torch.tensor([64, 63]), "is [64, 63]; config.json calls for [64, 64]"),
        ("weight_scale", torch.ones(64, 1), "has shape [64, 1]; config.json calls for [64, 2]"),
        ("weight_scale", torch.full((64, 2), -torch.inf), "not finite"),
    ],
)
def test_damaged_tensor_is_named(made: Made, end: str, tensor: torch.Tensor, message: str) -> None:
    assert message in made.refusal_with(f"{QUERY_0}.{end}", tensor)


def test_zero_points_that_the_config_calls_for_and_the_file_lacks_are_named(made: Made) -> None:
    made.change_config(config_groups={"g": group({"strategy": "group", "group_size": 32, "symmetric": False})})
    with pytest.raises(CheckpointError, match=r"no tensor '.*weight_zero_point'"):
        made.load()


def test_quantized_layer_that_the_config_ignores_is_refused(made: Made) -> None:
    made.change_config(ignore=["lm_head", QUERY_0])
    with pytest.raises(CheckpointError, match=r"no tensor '.*q_proj\.weight'"):
        made.load()


@pytest.mark.parametrize("has_tensor", [True, False])
def test_odd_inputs_of_four_bits_are_refused(tmp_path: Path, has_tensor: bool) -> None:
    made = make_checkpoint(tmp_path, config("pack-quantized", INT4), packed(), intermediate_size=113)
    if not has_tensor:
        made.change_tensors(lambda t: t.pop("model.layers.0.mlp.down_proj.weight_packed"))
    assert "down_proj.weight_packed' is of a layer [64, 113]; inputs must be even" in made.refusal()


def test_other_groups_of_inputs_than_blocks_have_are_refused(made: Made) -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    scheme = group(weights, TOKEN_FP8 | {"strategy": "group", "group_size": 64})
    made.change_config(format="float-quantized", config_groups={"g": scheme})
    assert "input_activations.group_size' is '64'; supported: 128" in made.refusal()
