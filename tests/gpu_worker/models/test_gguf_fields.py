"""Metadata of a GGUF file that all layers share, or that each has for itself."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpu_worker.models.gguf_fields import ModelFields
from gpu_worker.quantization.gguf.byte_reader import GGUFError
from gpu_worker.quantization.gguf.metadata import Metadata


def fields_of(**fields: Any) -> ModelFields:
    path = Path("model.gguf")
    arrays = {name: np.array(value) if isinstance(value, list) else value for name, value in fields.items()}
    metadata = Metadata(path, {f"llama.{name}": value for name, value in arrays.items()})
    file: Any = SimpleNamespace(path=path, metadata=metadata, tensors={})
    return ModelFields(file, "llama")


@pytest.mark.parametrize(("value", "read"), [(4, [4, 4, 4]), ([1, 0, 2], [1, 0, 2]), ([1, 0, 2, 9], [1, 0, 2])])
def test_number_is_that_of_all_layers_or_one_of_each(value: Any, read: list[int]) -> None:
    assert fields_of(block_count=4, nextn_predict_layers=1, heads=value).by_layer("heads") == read


@pytest.mark.parametrize("value", [[1, 2], [1, -1, 2]])
def test_numbers_of_fewer_layers_or_below_0_are_refused(value: list[int]) -> None:
    told = f"'llama.heads' has {len(value)} numbers; it must have 3, none of them below 0"
    with pytest.raises(GGUFError, match=told):
        fields_of(block_count=3, heads=value).by_layer("heads")


@pytest.mark.parametrize(("kind", "is_read"), [("u1", True), ("i1", True), ("i4", False), ("?", False)])
def test_bytes_are_integers_of_one_byte(kind: str, is_read: bool) -> None:
    metadata = Metadata(Path("model.gguf"), {"table": np.array([1, 0], kind)})
    if is_read:
        assert metadata.octets("table") == b"\1\0"
        return
    with pytest.raises(GGUFError, match="'table' is an array of 2; it must be an array of bytes"):
        metadata.octets("table")
