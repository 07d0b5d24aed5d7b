"""How linear layers are taken from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu_worker.layers.layer_source import Projections
from gpu_worker.models.errors import CheckpointError


class Empty:
    """A checkpoint without a tensor of such a size."""

    def take_rows(self, names: list[str], shapes: list[tuple[int, ...]]) -> Any:
        raise CheckpointError(Path("model.safetensors"), f"{names[0]} is not {shapes[0]}")


def test_factors_of_features_that_a_checkpoint_does_not_have_are_not_made() -> None:
    width = 1 << 48
    projections = Projections(Empty())  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="up_proj"):
        projections.take(["up_proj"], [width], 64, scales=[(width, 0.5)])
