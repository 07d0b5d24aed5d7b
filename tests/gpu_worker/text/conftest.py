from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

import ops
from gpu_worker.text.model_directory import ModelDirectory, read_model_directory

SENTENCEPIECE_PIECES = ["a", "b", "c", "▁", "▁a", "ab", "▁the", "é", "x▁y", "!"]


@pytest.fixture(scope="session")
def demo_directory() -> ModelDirectory:
    return read_model_directory(Path(ops.__file__).parent / "demo_model" / "model")


def sentencepiece_tokenizer(*, strips_space: bool) -> Tokenizer:
    """A tokenizer as Llama 2 has it: `▁` for spaces, byte tokens for unknown characters."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SENTENCEPIECE_PIECES]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("▁", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips_space else steps)
    return tokenizer


def wordpiece_tokenizer() -> Tokenizer:
    """A tokenizer of a style that has no token table."""
    vocabulary = {piece: index for index, piece in enumerate(["[UNK]", "un", "##der", "##stand", "it", ".", "##s"])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer
