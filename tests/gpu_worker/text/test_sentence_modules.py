"""The matrices behind a pooling: what they compute against torch, and which files are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gpu_worker.text.sentence_modules import DenseModule, read_dense
from shared.errors import ConfigError


def save(folder: Path, activation: str | None = None, **tensors: torch.Tensor) -> None:
    fields: dict[str, Any] = {} if activation is None else {"activation_function": f"torch.nn.modules.{activation}"}
    (folder / "config.json").write_text(json.dumps(fields))
    save_file({f"linear.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("activation", "function"), [(None, torch.tanh), ("linear.Identity", lambda out: out)])
def test_a_module_computes_what_a_layer_of_torch_does(
    tmp_path: Path, dtype: torch.dtype, activation: str | None, function: Any
) -> None:
    weight, bias, values = torch.randn(5, 3).to(dtype), torch.randn(5).to(dtype), torch.randn(3)
    save(tmp_path, activation, weight=weight, bias=bias)
    module = read_dense(tmp_path, 3)
    assert isinstance(module, DenseModule)
    expected = function(torch.nn.functional.linear(values, weight.float(), bias.float())).numpy()
    np.testing.assert_allclose(module(values.double().numpy()), expected, atol=1e-6, rtol=0)


def test_what_is_not_served_says_why(tmp_path: Path) -> None:
    (tmp_path / "2_Dense").mkdir()
    assert "2_Dense has no model.safetensors" in str(read_dense(tmp_path / "2_Dense", 3))
    save(tmp_path, "activation.GELU", weight=torch.zeros(2, 3))
    assert "ends with GELU; served are Identity and Tanh" in str(read_dense(tmp_path, 3))


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"weight": torch.zeros(2, 4)}, r"is of shape \[2, 4\]; it must take 3 numbers"),
        ({"bias": torch.zeros(2)}, "is missing; it must take 3 numbers"),
        ({"weight": torch.zeros(2, 3), "bias": torch.zeros(3)}, r"linear.bias in .* is of shape \[3\]"),
        ({"weight": torch.zeros(2, 3, dtype=torch.int8)}, "is not usable"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, tensors: dict[str, torch.Tensor], problem: str) -> None:
    save(tmp_path, **tensors)
    with pytest.raises(ConfigError, match=problem):
        read_dense(tmp_path, 3)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]"])
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="is not usable"):
        read_dense(tmp_path, 3)
