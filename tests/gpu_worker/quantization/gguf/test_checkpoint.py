"""Linear layers of a GGUF file that are not quantized."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from gpu_worker.quantization.gguf.checkpoint import GGUFMethod
from gpu_worker.quantization.gguf.tensor_types import F16, TensorType
from kernels.linear.forms import DenseWeight


@pytest.mark.parametrize("types", [{}, {"layer.weight": F16}])
def test_layer_that_is_not_quantized_is_taken_by_its_outputs_and_inputs(types: dict[str, TensorType]) -> None:
    weight = torch.randn(6, 4)
    source = Mock(take=Mock(return_value=weight))
    taken = GGUFMethod(types).take(source, "layer", 6, 4)
    assert isinstance(taken, DenseWeight)
    assert taken.weight is weight
    source.take.assert_called_once_with("layer.weight", 6, 4)
