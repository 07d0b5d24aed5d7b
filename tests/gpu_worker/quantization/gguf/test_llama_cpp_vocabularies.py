"""Real vocabularies that come with llama.cpp's sources, and the ids that the models' own tokenizers gave texts."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from gpu_worker.quantization.gguf.file import GGUFFile
from gpu_worker.text.gguf_tokenizer import tokenizer_json
from tests.gpu_worker.quantization.gguf.llama_cpp import VARIABLE, find_llama_cpp

pytestmark = pytest.mark.slow

NAMES = (
    "command-r",
    "deepseek-coder",
    "deepseek-llm",
    "gemma-4",
    "gpt-2",
    "llama-bpe",
    "llama-spm",
    "mpt",
    "phi-3",
    "qwen2",
    "qwen35",
    "refact",
    "starcoder",
)
_BETWEEN = "\n__ggml_vocab_test__\n"


@pytest.mark.parametrize("name", NAMES)
def test_texts_get_the_ids_of_the_models_own_tokenizers(name: str) -> None:
    tools = find_llama_cpp()
    if tools is None:
        pytest.skip(f"llama.cpp's sources are not on this machine: set {VARIABLE} to their folder")
    path = tools.sources / "models" / f"ggml-vocab-{name}.gguf"
    with GGUFFile(path) as file:
        tokenizer = Tokenizer.from_str(tokenizer_json(file.metadata).decode())
    texts = Path(f"{path}.inp").read_text().split(_BETWEEN)
    lines = Path(f"{path}.out").read_text().split("\n")
    checked = 0
    for text, line in zip(texts, lines, strict=False):
        # llama.cpp composes no characters, which Qwen's own tokenizer does.
        if unicodedata.is_normalized("NFC", text):
            assert tokenizer.encode(text, add_special_tokens=False).ids == [int(token) for token in line.split()], text
            checked += 1
    assert checked > 40
