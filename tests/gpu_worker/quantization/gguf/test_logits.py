"""Logits of GGUF files against `transformers` on the weights that the `gguf` package makes of them.

The oracle computes in float64, and in float32 as we do: some of these random models multiply every rounding, so what is
allowed to us is a few times the error that `transformers` itself makes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from gpu_worker.models.loader import load_model
from tests.gpu_worker.models.paged_run import PagedRun
from tests.gpu_worker.models.variants import oracle_logits
from tests.gpu_worker.quantization.gguf.conftest import GGUFPair
from tests.gpu_worker.quantization.gguf.gguf_models import VARIANTS
from tests.gpu_worker.quantization.gguf.written_file import VOCAB_SIZE

CPU = torch.device("cpu")
LENGTHS = (70, 23)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(gguf_pair: Callable[[str], GGUFPair], name: str) -> None:
    pair = gguf_pair(name)
    sequences = [torch.randint(VOCAB_SIZE, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    model = load_model(pair.path, torch.float32, CPU)
    run = PagedRun(model, sequences)
    # A prompt in two chunks beside another, then decodes.
    computed = run.steps([{0: 50, 1: 20}, {0: 17}, {0: 1, 1: 1}, {0: 1, 1: 1}, {0: 1, 1: 1}])
    exact_oracle = copy.deepcopy(pair.oracle).double()
    for logits, sequence in zip(computed, sequences, strict=True):
        exact = oracle_logits(exact_oracle, sequence).double()
        assert exact.std() > 0.5
        rounding = (oracle_logits(pair.oracle, sequence) - exact).abs().max()
        assert rounding < 1e-3
        assert (logits - exact).abs().max() < 4 * rounding
