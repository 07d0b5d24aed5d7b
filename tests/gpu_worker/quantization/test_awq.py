"""AWQ checkpoints against `transformers` on the dense weights they stand for, and damaged ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from gpu_worker.models.errors import CheckpointError
from gpu_worker.quantization.awq import read_awq
from gpu_worker.quantization.quantization_method import TensorSource
from tests.gpu_worker.quantization.checkpoints import Made, assert_equals_oracle, but_head, make_checkpoint
from tests.gpu_worker.quantization.packers import awq

QUERY_0 = "model.layers.0.self_attn.q_proj"


def config(**fields: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm", **fields}


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return make_checkpoint(tmp_path, config(), but_head(lambda weight: awq(weight, 16)))


@pytest.mark.parametrize("group_size", [-1, 16, 32])
def test_groups(tmp_path: Path, group_size: int) -> None:
    pack = but_head(lambda weight: awq(weight, group_size))
    assert_equals_oracle(make_checkpoint(tmp_path, config(group_size=group_size), pack, intermediate_size=96))


def test_names_that_older_files_use(tmp_path: Path) -> None:
    fields = {"quant_method": "awq", "w_bit": 4, "q_group_size": 16, "version": "GEMM"}
    assert_equals_oracle(make_checkpoint(tmp_path, fields, but_head(lambda weight: awq(weight, 16))))


def test_modules_that_were_not_converted(tmp_path: Path) -> None:
    def pack(name: str, weight: torch.Tensor) -> Any:
        return None if name == "lm_head" or "layers.0.mlp" in name or "k_proj" in name else awq(weight, 16)

    made = make_checkpoint(tmp_path, config(modules_to_not_convert=["lm_head", "layers.0.mlp", "k_proj"]), pack)
    assert_equals_oracle(made)


def test_biases_of_a_family_that_has_them(tmp_path: Path) -> None:
    pack = but_head(lambda weight: awq(weight, 16))
    assert_equals_oracle(make_checkpoint(tmp_path, config(), pack, family="Qwen2"))


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
def test_unsupported_field_is_named(made: Made, fields: dict[str, Any], message: str) -> None:
    made.change_config(**fields)
    assert message in made.refusal()


@pytest.mark.parametrize(
    ("end", "tensor", "message"),
    [
        ("qweight", torch.zeros(8, 64, dtype=torch.int32), "has shape [8, 64]; config.json calls for [64, 8]"),
        ("qzeros", torch.zeros(4, 8, dtype=torch.uint8), "stored as torch.uint8"),
        ("qzeros", None, "has no tensor"),
        ("scales", torch.full((4, 64), torch.nan), "not finite"),
    ],
)
def test_damaged_tensor_is_named(made: Made, end: str, tensor: torch.Tensor | None, message: str) -> None:
    assert message in made.refusal_with(f"{QUERY_0}.{end}", tensor)


def test_groups_that_do_not_divide_the_inputs_are_refused(made: Made) -> None:
    made.change_config(group_size=48)
    with pytest.raises(CheckpointError, match=r"q_proj\.qweight' is of a layer \[64, 64\]; .* group_size \(48\)"):
        made.load()


@pytest.mark.parametrize("size", [(60, 64), (64, 63)])
def test_layer_whose_size_the_packed_words_cannot_hold_is_refused(size: tuple[int, int]) -> None:
    source = mock.Mock(spec=TensorSource)
    source.error.side_effect = lambda name, problem: ValueError(f"{name} {problem}")
    expected = rf"layer\.qweight is of a layer \[{size[0]}, {size[1]}\]; outputs must be a multiple of 8"
    with pytest.raises(ValueError, match=expected):
        read_awq(config(group_size=-1)).take(source, "layer", *size)
