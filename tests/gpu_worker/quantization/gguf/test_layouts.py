"""Logits of files in the layouts that llama.cpp's converter gives families, against `transformers`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_worker.models.loader import load_model
from tests.gpu_worker.models.families.random_models import SIZES
from tests.gpu_worker.models.paged_run import PagedRun
from tests.gpu_worker.models.variants import oracle_logits
from tests.gpu_worker.quantization.gguf.layout_files import write_layout
from tests.gpu_worker.quantization.gguf.llama_cpp_cases import CASES

LENGTH = 40
NAMES = (
    *("arcee", "ministral3", "ernie4_5-moe", "dots1", "hunyuan-dense", "hunyuan-moe", "minimax-m2", "command-r"),
    *("chatglm", "nemotron", "phi2", "gptneox", "stablelm", "llama4", "granitehybrid", "mamba2", "nemotron_h_moe"),
)
# Other options of these, and what takes longest.
MORE_NAMES = (
    *("ernie4_5", "exaone-moe", "gptneox-serial", "stablelm-parallel", "granitehybrid-dense", "bamba", "nemotron_h"),
)


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_NAMES)])
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    oracle = write_layout(path, CASES[name])
    tokens = torch.randint(SIZES["vocab_size"], (LENGTH,), generator=torch.Generator().manual_seed(7))
    expected = oracle_logits(oracle, tokens)
    assert expected.std() > 0.05
    run = PagedRun(load_model(path, torch.float32, torch.device("cpu")), [tokens])
    logits = torch.cat([run.step({0: count})[0] for count in (23, LENGTH - 24, 1)])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
