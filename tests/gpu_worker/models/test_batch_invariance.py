"""A sequence's numbers are the same to the bit whatever is computed beside it, in every kind of layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_worker.models.loader import load_model
from tests.gpu_worker.models.batch_invariance import NAMES, NUMBERS_BESIDE, logits_among, save_named, threads
from tests.gpu_worker.models.pairs import CPU

# Latent attention, a block without gates, per-layer inputs, and the gate of a shared expert beside gated delta nets.
ONCE_DIFFERENT = ("deepseek-v3", "phi", "gemma4-e", "qwen3_next")


@pytest.mark.parametrize("name", ONCE_DIFFERENT)
def test_a_row_is_the_same_alone_and_among_others(tmp_path: Path, name: str) -> None:
    save_named(name, tmp_path)
    model = load_model(tmp_path, torch.float32, CPU)
    alone = logits_among(model, 0, (7, 1))
    for num_beside in (2, 6):
        assert torch.equal(logits_among(model, num_beside, (7, 1)), alone), num_beside


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_family_is_the_same_alone_and_among_others(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    save_named(name, tmp_path)
    model = load_model(tmp_path, dtype, CPU)
    alone = logits_among(model, 0)
    for num_beside in NUMBERS_BESIDE:
        assert torch.equal(logits_among(model, num_beside), alone), num_beside
    with threads(2):
        assert torch.equal(logits_among(model, NUMBERS_BESIDE[-1]), alone)
