from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

import ops
from gpu_worker.text.model_directory import ModelDirectory, read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer

SENTENCEPIECE_PIECES = ["a", "b", "c", "▁", "▁a", "ab", "▁the", "é", "x▁y", "!"]


@pytest.fixture(scope="session")
def demo_directory() -> ModelDirectory:
    return read_model_directory(Path(ops.__file__).parent / "demo_model" / "model")


@pytest.fixture(scope="session")
def tokenizer(demo_directory: ModelDirectory) -> ModelTokenizer:
    return ModelTokenizer(demo_directory)


class CopiedModel:
    """Files of the demo model in a folder of their own, which a test may change."""

    def __init__(self, demo: ModelDirectory, path: Path) -> None:
        self.path = path
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(demo.path / name, path)

    def change(self, file: str, **fields: Any) -> None:
        content = json.loads((self.path / file).read_text()) | fields
        (self.path / file).write_text(json.dumps(content))

    def read(self) -> ModelDirectory:
        return read_model_directory(self.path)

    def tokenizer(self, template: Any = None) -> ModelTokenizer:
        """Return the tokenizer, with this chat template where one is given."""
        if template is not None:
            self.change("tokenizer_config.json", chat_template=template)
        return ModelTokenizer(self.read())


@pytest.fixture
def copied(demo_directory: ModelDirectory, tmp_path: Path) -> CopiedModel:
    return CopiedModel(demo_directory, tmp_path)


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
