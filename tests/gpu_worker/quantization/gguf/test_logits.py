"""Logits of GGUF files against `transformers` on the weights that the `gguf` package makes of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gpu_worker.models.loader import load_model
from tests.gpu_worker.models.paged_run import PagedRun
from tests.gpu_worker.models.variants import oracle_logits
from tests.gpu_worker.quantization.gguf.conftest import GGUFPair
from tests.gpu_worker.quantization.gguf.gguf_models import VARIANTS, VOCAB_SIZE

CPU = torch.device("cpu")
LENGTHS = (70, 23)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(gguf_pair: Callable[[str], GGUFPair], name: str) -> None:
    pair = gguf_pair(name)
    sequences = [torch.randint(VOCAB_SIZE, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    model = load_model(pair.path, torch.float32, CPU)
    run = PagedRun(model, sequences)
    # A prompt in two chunks beside another, then decodes.
    steps = [{0: 50, 1: 20}, {0: 17}, {0: 1, 1: 1}, {0: 1, 1: 1}, {0: 1, 1: 1}]
    rows: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for step in steps:
        for s, logits in run.step(step).items():
            rows[s].append(logits)
    for s, sequence in enumerate(sequences):
        expected = oracle_logits(pair.oracle, sequence)
        assert expected.std() > 0.5
        torch.testing.assert_close(torch.cat(rows[s]), expected, atol=1e-4 * float(expected.std()), rtol=0)
