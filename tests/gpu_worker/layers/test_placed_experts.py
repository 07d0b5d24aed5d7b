from __future__ import annotations

from typing import Any

import pytest
import torch

from gpu_worker.layers import linear
from gpu_worker.layers.adapters import ExpertModules
from gpu_worker.layers.linear import LayerParts
from gpu_worker.layers.placed_experts import ExpertLoads, ExpertShare
from gpu_worker.layers.rotations import Rotations
from kernels.activation.experts import SILU
from kernels.linear import LinearFactory
from kernels.moe import ExpertWeights


def test_loads_of_all_layers_are_one_copy_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy waits for the device once more."""
    copied: list[list[int]] = []

    def copy(self: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        copied.append(self.tolist())
        return self

    for name in ("cpu", "to", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, copy)
    loads = ExpertLoads([torch.tensor(counts) for counts in ([3, 1], [0, 0, 6], [5])])
    by_layer = loads.by_layer()
    assert copied == [[3, 1, 0, 0, 6, 5]]
    assert [layer.tolist() for layer in by_layer] == [[3, 1], [0, 0, 6], [5]]
    assert loads.read().tokens == 15


def test_experts_know_among_how_many_places_of_all_ranks_tokens_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """By that a GPU estimates the rows of each: two experts of eight, one of which is on two ranks."""
    made: list[tuple[Any, ...]] = []
    make = linear.make_experts
    monkeypatch.setattr(linear, "make_experts", lambda *args: made.append(args[4:]) or make(*args))
    share = ExpertShare(8, (*range(8), 3, 5), range(4, 6))
    names = ("gate_proj", "up_proj", "down_proj")
    modules = ExpertModules(("4", "5"), names, 16, 8, 2, "mlp", is_interleaved=False, share=share)
    parts = LayerParts.made_by(LinearFactory(lambda: 0), Rotations([], 8, torch.device("cpu")))
    weights = ExpertWeights.dense(torch.zeros(2, 32, 8)), ExpertWeights.dense(torch.zeros(2, 8, 16))
    parts.experts(*weights, SILU, modules)
    parts.experts(*weights, SILU, None)
    assert made == [(4, 10), (0, None)]
