"""Logits of files in the layouts that llama.cpp's converter gives families, against `transformers`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu_worker.quantization.gguf.layout_files import write_layout
from tests.gpu_worker.quantization.gguf.llama_cpp_cases import CASES
from tests.gpu_worker.quantization.gguf.written_file import assert_file_equals

NAMES = (
    *("arcee", "ministral3", "ernie4_5-moe", "dots1", "hunyuan-dense", "hunyuan-moe", "minimax-m2", "command-r"),
    "command-r-plus",
    *("chatglm", "nemotron", "phi2", "gptneox", "stablelm", "llama4", "granitehybrid", "mamba2", "nemotron_h_moe"),
)
# Other options of these, and what takes longest.
MORE_NAMES = (
    *("ernie4_5", "exaone-moe", "gptneox-serial", "stablelm-parallel", "granitehybrid-dense", "bamba", "nemotron_h"),
)


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_NAMES)])
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    assert_file_equals(path, write_layout(path, CASES[name]), (23, 16, 1))
