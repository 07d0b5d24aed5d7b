from __future__ import annotations

from typing import Any

import pytest
import torch

from gpu_worker.layers.placed_experts import ExpertLoads


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
