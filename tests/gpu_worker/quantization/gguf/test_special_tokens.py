"""The tokens that end a sequence: named by the file, or known by their spelling."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gpu_worker.quantization.gguf.metadata import Metadata
from gpu_worker.quantization.gguf.special_tokens import CONTROL, end_token_ids

NORMAL = 1


def ends(tokens: list[str], named: str, kinds: list[int] | None = None) -> set[str]:
    types = np.array(kinds or [CONTROL] * len(tokens), np.int32)
    fields = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.eos_token_id": tokens.index(named),
    }
    return {tokens[index] for index in end_token_ids(Metadata(Path("model.gguf"), fields))}


@pytest.mark.parametrize(
    ("tokens", "named", "expected"),
    [
        (["<eos>", "<start_of_turn>", "<end_of_turn>"], "<eos>", {"<eos>", "<end_of_turn>"}),
        (["<|endoftext|>", "<|end|>", "<|user|>"], "<|endoftext|>", {"<|endoftext|>", "<|end|>"}),
        (
            ["<|endoftext|>", "<|return|>", "<|end|>", "<|call|>"],
            "<|return|>",
            {"<|endoftext|>", "<|return|>", "<|call|>"},
        ),
        (["<|end_of_text|>", "<|eom|>", "<|eot|>"], "<|eot|>", {"<|end_of_text|>", "<|eom|>", "<|eot|>"}),
        (["<eos>", "<|turn>", "<turn|>"], "<eos>", {"<eos>", "<turn|>"}),
        (
            ["<|endoftext|>", "[gMASK]", "<|user|>", "<|observation|>", "<|assistant|>"],
            "<|endoftext|>",
            {"<|endoftext|>", "<|user|>", "<|observation|>"},
        ),
        (["<|endoftext|>", "<|user|>"], "<|endoftext|>", {"<|endoftext|>"}),
    ],
    ids=["gemma", "phi", "gpt-oss", "llama 4", "gemma 4", "glm", "a user's turn in another family"],
)
def test_turns_end_with_more_tokens_than_the_file_names(tokens: list[str], named: str, expected: set[str]) -> None:
    assert ends(tokens, named) == expected


def test_text_that_is_spelled_like_an_end_is_none() -> None:
    assert ends(["<eos>", "<end_of_turn>"], "<eos>", [CONTROL, NORMAL]) == {"<eos>"}
