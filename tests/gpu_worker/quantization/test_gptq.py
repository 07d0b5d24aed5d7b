"""GPTQ checkpoints against `transformers` on the dense weights they stand for, and damaged ones.

AWQ checkpoints against `transformers` on the dense weights they stand for, and damaged ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from gpu_worker.models.json_file import CheckpointError
from gpu_worker.quantization.awq import read_awq
from gpu_worker.quantization.config_fields import QuantizationError
from gpu_worker.quantization.method_reader import read_method
from gpu_worker.quantization.quantization_method import TensorSource
from kernels.linear.forms import DenseWeight, GroupQuantizedWeight
from tests.gpu_worker.quantization.checkpoints import (
    Made,
    Pack,
    assert_equals_oracle,
    but_head,
    logits_of,
    make_checkpoint,
)
from tests.gpu_worker.quantization.packers import PackedLayer, awq, gptq, in_order, shuffled

QUERY_0 = "model.layers.0.self_attn.q_proj"


def config(**fields: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, **fields}


def pack_all(bits: int = 4, group_size: int = 32, **options: Any) -> Pack:
    return but_head(lambda weight: gptq(weight, bits, in_order(weight.shape[1], group_size), **options))


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return make_checkpoint(tmp_path, config(), pack_all())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [-1, 32, 64, 128])
def test_bits_and_groups(tmp_path: Path, bits: int, group_size: int) -> None:
    # 112 inputs of the last projection are not a multiple of 32 or 64; 64 inputs of the others are less than 128.
    pack = pack_all(bits, group_size)
    assert_equals_oracle(make_checkpoint(tmp_path, config(bits=bits, group_size=group_size), pack))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("layout", "version"), [({}, 1), ({"checkpoint_format": "gptq_v2"}, 2), ({"format": "gptq"}, 1)]
)
def test_zero_points(tmp_path: Path, bits: int, layout: dict[str, str], version: int) -> None:
    pack = pack_all(bits, symmetric=False, version=version)
    assert_equals_oracle(make_checkpoint(tmp_path, config(bits=bits, sym=False, **layout), pack))


def test_true_zero_points_of_a_symmetric_file_that_promises_the_first_layout(tmp_path: Path) -> None:
    assert_equals_oracle(make_checkpoint(tmp_path, config(checkpoint_format="gptq"), pack_all(version=2)))


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_act_order(tmp_path: Path, bits: int, is_shared: bool) -> None:
    def pack(name: str, weight: torch.Tensor) -> Any:
        if name == "lm_head":
            return None
        seed = weight.shape[1] if is_shared else sum(name.encode())
        return gptq(weight, bits, shuffled(weight.shape[1], 32, seed), symmetric=False)

    assert_equals_oracle(make_checkpoint(tmp_path, config(bits=bits, desc_act=True, sym=False), pack))


def test_layers_without_group_indices_are_in_order(made: Made) -> None:
    made.change_tensors(lambda t: [t.pop(name) for name in list(t) if name.endswith("g_idx")])
    assert_equals_oracle(made)


def test_quantized_head(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path, config(lm_head=True), lambda _, w: gptq(w, 4, in_order(w.shape[1], 32)))
    assert_equals_oracle(made)


def test_layers_left_alone_and_layers_with_other_settings(tmp_path: Path) -> None:
    def pack(name: str, weight: torch.Tensor) -> Any:
        if name == "lm_head" or ".0.mlp.down" in name or "v_proj" in name:
            return None
        bits, size = (8, 64) if "layers.1.mlp" in name else (4, 32)
        return gptq(weight, bits, in_order(weight.shape[1], size))

    rules = {
        r"-:model\.layers\.0\.mlp\.down": {},
        r"-:.*v_proj": {},
        r"+:.*\.1\.mlp\..*": {"bits": 8, "group_size": 64},
    }
    assert_equals_oracle(make_checkpoint(tmp_path, config(dynamic=rules), pack))


def test_biases_of_a_family_that_has_them(tmp_path: Path) -> None:
    assert_equals_oracle(make_checkpoint(tmp_path, config(), pack_all(), family="Qwen2"))


def test_biases_of_zero_are_dropped_where_the_model_has_none(made: Made) -> None:
    made.change_tensors(lambda t: t.update({f"{QUERY_0}.bias": torch.zeros(64)}))
    assert_equals_oracle(made)


def test_bias_that_is_not_zero_is_refused_where_the_model_has_none(made: Made) -> None:
    made.change_tensors(lambda t: t.update({f"{QUERY_0}.bias": torch.ones(64)}))
    with pytest.raises(CheckpointError, match=r"q_proj\.bias' is not zero"):
        made.load()


def test_tied_embedding_stays_dense(tmp_path: Path) -> None:
    assert_equals_oracle(make_checkpoint(tmp_path, config(), pack_all(), tie_word_embeddings=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(made: Made, dtype: torch.dtype) -> None:
    expected = logits_of(made.load())
    error = (logits_of(made.load(dtype)) - expected).std() / expected.std()
    assert error < (0.05 if dtype is torch.bfloat16 else 0.01)


def test_layers_of_the_same_groups_become_one_form(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    forms = []
    from gpu_worker.layers import layer_packing

    original = layer_packing.pack_panels
    monkeypatch.setattr(
        layer_packing,
        "pack_panels",
        lambda library, form, *rest, **options: forms.append(form) or original(library, form, *rest, **options),
    )
    made.load()
    assert all(isinstance(form, GroupQuantizedWeight) for form in forms)
    assert [form.shape for form in forms[:4]] == [(128, 64), (64, 64), (224, 64), (64, 112)]
    dense = sum(DenseWeight(torch.zeros(form.shape)).num_bytes for form in forms)
    assert sum(form.num_bytes for form in forms) < dense / 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 2}, "field 'quantization_config.bits' is '2'; supported: 4, 8"),
        ({"bits": 3}, "field 'quantization_config.bits' is '3'"),
        ({"bits": "4"}, "field 'quantization_config.bits' cannot be read: Expected `int`"),
        ({"bits": None}, "quantization_config' cannot be read: Object missing required field `bits`"),
        ({"bits": True}, "Expected `int`, got `bool`"),
        ({"group_size": 0}, "field 'quantization_config.group_size' is 0"),
        ({"group_size": -2}, "supported: -1"),
        ({"group_size": 12}, "multiples of 8"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format' is 'marlin'; supported: 'gptq', 'gptq_v2'"),
        ({"is_marlin_format": True}, "is_marlin_format' is true"),
        ({"sym": "yes"}, "quantization_config.sym' cannot be read"),
        ({"dynamic": []}, "quantization_config.dynamic' cannot be read"),
        ({"dynamic": {"+:a": {"bits": 3}}}, r"quantization_config.dynamic.+:a.bits' is '3'"),
        ({"dynamic": {"-:(": {}}}, "is not a regular expression"),
        ({"dynamic": {"-:(.+)+x": {}}}, "no repeated group"),
        ({"dynamic": {"-:" + ".*" * 9: {}}}, "5 repeats"),
        ({"dynamic": {"-:" + "x" * 1001: {}}}, "1000 characters"),
    ],
)
def test_unsupported_field_is_named(made: Made, fields: dict[str, Any], message: str) -> None:
    made.change_config(**fields)
    assert message in made.refusal()


@pytest.mark.parametrize(
    ("end", "tensor", "message"),
    [
        ("qweight", torch.zeros(8, 64, dtype=torch.int64), "stored as torch.int64; its quantization needs torch.int32"),
        ("qweight", torch.zeros(16, 64, dtype=torch.int32), "has shape [16, 64]; config.json calls for [8, 64]"),
        ("qzeros", torch.zeros(2, 64, dtype=torch.int32), "has shape [2, 64]; config.json calls for [2, 8]"),
        ("qzeros", None, "has no tensor"),
        ("scales", torch.ones(64, 2), "has shape [64, 2]; config.json calls for [2, 64]"),
        ("scales", torch.full((2, 64), torch.inf), "not finite"),
        ("scales", torch.full((2, 64), torch.nan), "not finite"),
        ("scales", torch.ones(2, 64, dtype=torch.int32), "scales must be float32, float16, bfloat16 or"),
        ("g_idx", torch.zeros(64, dtype=torch.int32), "groups of unequal size"),
        ("g_idx", torch.arange(64, dtype=torch.int32), "names groups from 0 to 63; there are 0 to 1"),
        ("g_idx", torch.full((64,), -1, dtype=torch.int32), "names groups from -1 to -1"),
        ("g_idx", torch.zeros(32, dtype=torch.int32), "has shape [32]"),
        ("g_idx", torch.zeros(64), "stored as torch.float32"),
    ],
)
def test_damaged_tensor_is_named(made: Made, end: str, tensor: torch.Tensor | None, message: str) -> None:
    assert message in made.refusal_with(f"{QUERY_0}.{end}", tensor)


def test_act_order_without_group_indices_is_refused(made: Made) -> None:
    made.change_config(desc_act=True)
    made.change_tensors(lambda t: t.pop(f"{QUERY_0}.g_idx"))
    with pytest.raises(CheckpointError, match=r"no tensor '.*q_proj\.g_idx'"):
        made.load()


def test_missing_layer_is_named(made: Made) -> None:
    made.change_tensors(lambda t: t.pop(f"{QUERY_0}.qweight"))
    with pytest.raises(CheckpointError, match=r"no tensor '.*q_proj\.weight'"):
        made.load()


def test_sizes_that_words_cannot_hold_are_refused(tmp_path: Path) -> None:
    # 97 scores are not a multiple of the eight that a word holds.
    made = make_checkpoint(tmp_path, config(), pack_all(), vocab_size=97)
    made.change_tensors(lambda t: t.update({"lm_head.qweight": torch.zeros(8, 97, dtype=torch.int32)}))
    with pytest.raises(CheckpointError, match=r"lm_head\.qweight' is of a layer \[97, 64\]"):
        made.load()


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


def awq_config(**fields: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm", **fields}


@pytest.fixture
def awq_made(tmp_path: Path) -> Made:
    return make_checkpoint(tmp_path, awq_config(), but_head(lambda weight: awq(weight, 16)))


@pytest.mark.parametrize("group_size", [-1, 16, 32])
def test_groups(tmp_path: Path, group_size: int) -> None:
    pack = but_head(lambda weight: awq(weight, group_size))
    assert_equals_oracle(make_checkpoint(tmp_path, awq_config(group_size=group_size), pack, intermediate_size=96))


def test_names_that_older_files_use(tmp_path: Path) -> None:
    fields = {"quant_method": "awq", "w_bit": 4, "q_group_size": 16, "version": "GEMM"}
    assert_equals_oracle(make_checkpoint(tmp_path, fields, but_head(lambda weight: awq(weight, 16))))


def test_modules_that_were_not_converted(tmp_path: Path) -> None:
    def pack(name: str, weight: torch.Tensor) -> Any:
        return None if name == "lm_head" or "layers.0.mlp" in name or "k_proj" in name else awq(weight, 16)

    awq_made = make_checkpoint(tmp_path, awq_config(modules_to_not_convert=["lm_head", "layers.0.mlp", "k_proj"]), pack)
    assert_equals_oracle(awq_made)


def test_awq_biases_of_a_family_that_has_them(tmp_path: Path) -> None:
    pack = but_head(lambda weight: awq(weight, 16))
    assert_equals_oracle(make_checkpoint(tmp_path, awq_config(), pack, family="Qwen2"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 8}, "quantization_config.bits' is '8'; supported: 4"),
        ({"bits": None}, "quantization_config.bits' is 'None'; supported: 4"),
        ({"version": "gemv"}, "quantization_config.version' is 'gemv'; supported: 'gemm'"),
        ({"zero_point": False}, "quantization_config.zero_point' is false"),
        ({"group_size": None}, "quantization_config.group_size' is None"),
        ({"group_size": 0}, "quantization_config.group_size' is 0"),
        ({"group_size": "128"}, "quantization_config.group_size' cannot be read"),
    ],
)
def test_awq_unsupported_field_is_named(awq_made: Made, fields: dict[str, Any], message: str) -> None:
    awq_made.change_config(**fields)
    assert message in awq_made.refusal()


@pytest.mark.parametrize(
    ("end", "tensor", "message"),
    [
        ("qweight", torch.zeros(8, 64, dtype=torch.int32), "has shape [8, 64]; config.json calls for [64, 8]"),
        ("qzeros", torch.zeros(4, 8, dtype=torch.uint8), "stored as torch.uint8"),
        ("qzeros", None, "has no tensor"),
        ("scales", torch.full((4, 64), torch.nan), "not finite"),
    ],
)
def test_awq_damaged_tensor_is_named(awq_made: Made, end: str, tensor: torch.Tensor | None, message: str) -> None:
    assert message in awq_made.refusal_with(f"{QUERY_0}.{end}", tensor)


def test_groups_that_do_not_divide_the_inputs_are_refused(awq_made: Made) -> None:
    awq_made.change_config(group_size=48)
    with pytest.raises(CheckpointError, match=r"q_proj\.qweight' is of a layer \[64, 64\]; .* group_size \(48\)"):
        awq_made.load()


@pytest.mark.parametrize("size", [(60, 64), (64, 63)])
def test_layer_whose_size_the_packed_words_cannot_hold_is_refused(size: tuple[int, int]) -> None:
    source = mock.Mock(spec=TensorSource)
    source.error.side_effect = lambda name, problem: ValueError(f"{name} {problem}")
    expected = rf"layer\.qweight is of a layer \[{size[0]}, {size[1]}\]; outputs must be a multiple of 8"
    with pytest.raises(ValueError, match=expected):
        read_awq(awq_config(group_size=-1)).take(source, "layer", *size)
