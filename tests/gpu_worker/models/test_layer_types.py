"""Tests for the kinds of layers, and their windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu_worker.models.errors import CheckpointError
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.layer_types import all_but_every, read_layer_types, read_optional_windows, read_windows


def make_file(**fields: Any) -> JsonFile:
    return JsonFile(Path("config.json"), {"num_hidden_layers": 4, **fields})


def test_absent_types_follow_the_pattern() -> None:
    kinds = read_layer_types(make_file(), ("conv", "attention"), lambda layer: "conv" if layer else "attention")
    assert kinds == ("attention", "conv", "conv", "conv")


@pytest.mark.parametrize("types", [["dense"] * 3, ["dense"] * 5, ["dense", "dense", "dense", "other"]])
def test_wrong_types_are_refused_by_the_name_of_their_field(types: list[str]) -> None:
    file = make_file(mlp_layer_types=types)
    with pytest.raises(CheckpointError, match=r"'mlp_layer_types' must name dense or sparse for each of .* \(4\)"):
        read_layer_types(file, ("dense", "sparse"), lambda _layer: "dense", "mlp_layer_types")


def test_windows_are_where_types_say_and_else_where_the_pattern_does() -> None:
    types = ["sliding_attention", "full_attention", "full_attention", "full_attention"]
    assert read_windows(make_file(layer_types=types), all_but_every(2), 8) == (8, None, None, None)
    assert read_windows(make_file(sliding_window=5), all_but_every(2), 8) == (5, None, 5, None)
    assert read_windows(make_file(sliding_window=None), all_but_every(2), 8) == (None,) * 4


def test_optional_windows_count_only_when_they_are_switched_on() -> None:
    fields = {"sliding_window": 16, "max_window_layers": 3}
    assert read_optional_windows(make_file(**fields)) is None
    assert read_optional_windows(make_file(use_sliding_window=True, **fields)) == (None, None, None, 16)
