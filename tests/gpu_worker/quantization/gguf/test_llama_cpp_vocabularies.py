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
    "bert-bge",
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
# What XLM-RoBERTa's tokenizer is known to make of a text.
_HELLO_WORLD = [0, 35378, 8999, 2]
_BETWEEN = "\n__ggml_vocab_test__\n"


def vocabulary(name: str) -> tuple[Path, Tokenizer]:
    """Return a file and the tokenizer in it."""
    tools = find_llama_cpp()
    if tools is None:
        pytest.skip(f"llama.cpp's sources are not on this machine: set {VARIABLE} to their folder")
    path = tools.sources / "models" / f"ggml-vocab-{name}.gguf"
    with GGUFFile(path) as file:
        return path, Tokenizer.from_str(tokenizer_json(file.metadata).decode())


@pytest.mark.parametrize("name", NAMES)
def test_texts_get_the_ids_of_the_models_own_tokenizers(name: str) -> None:
    path, tokenizer = vocabulary(name)
    texts = Path(f"{path}.inp").read_text().split(_BETWEEN)
    lines = Path(f"{path}.out").read_text().split("\n")
    checked = 0
    for text, line in zip(texts, lines, strict=False):
        # llama.cpp composes no characters, which Qwen's own tokenizer does.
        if unicodedata.is_normalized("NFC", text):
            assert tokenizer.encode(text, add_special_tokens=False).ids == [int(token) for token in line.split()], text
            checked += 1
    assert checked > 40


def test_pieces_with_chances_are_those_of_xlm_roberta() -> None:
    _, tokenizer = vocabulary("nomic-bert-moe")
    assert tokenizer.encode("Hello world").ids == _HELLO_WORLD
    assert tokenizer.encode("  Hello   world ").ids == _HELLO_WORLD
    assert tokenizer.decode(_HELLO_WORLD) == "Hello world"
    assert tokenizer.encode("Hello", "world").ids == [0, 35378, 2, 2, 8999, 2]


def test_texts_of_bert_have_its_tokens_around_them() -> None:
    _, tokenizer = vocabulary("bert-bge")
    pair = tokenizer.encode("Hello WORLD", "world")
    assert pair.tokens == ["[CLS]", "hello", "world", "[SEP]", "world", "[SEP]"]
    assert pair.type_ids == [0, 0, 0, 0, 1, 1]
