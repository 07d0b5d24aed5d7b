from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.structured_output.grammar_tokenizer import GrammarTokenizer, TokenizerSource, UnsupportedTokenizerError
from gpu_worker.text.library import TokenizerError
from gpu_worker.text.model_directory import ModelDirectory, read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.errors import ConfigError

SLOW_PATTERN = {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated", "invert": False}
NO_UNKNOWN = {"type": "WordLevel", "vocab": {"x": 0}, "unk_token": "[UNK]"}


@pytest.fixture
def changed(demo_directory: ModelDirectory, tmp_path: Path) -> Callable[..., ModelTokenizer]:
    """Load the demo model's tokenizer with other parts."""

    def load(**parts: Any) -> ModelTokenizer:
        content = json.loads((demo_directory.path / "tokenizer.json").read_text()) | parts
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        (tmp_path / "config.json").write_bytes((demo_directory.path / "config.json").read_bytes())
        return ModelTokenizer(read_model_directory(tmp_path))

    return load


def test_text_on_which_the_library_panics_is_an_error_of_that_text(changed: Callable[..., ModelTokenizer]) -> None:
    """A panic is no `Exception`: a request with such a text would end its worker, and then the next one."""
    tokenizer = changed(pre_tokenizer=SLOW_PATTERN)
    with pytest.raises(TokenizerError, match="retry-limit-in-match"):
        tokenizer.encode_text("a" * 60 + "b")
    assert tokenizer.encode_text("aa")


def test_text_that_the_library_refuses_is_an_error_of_ours(changed: Callable[..., ModelTokenizer]) -> None:
    with pytest.raises(TokenizerError, match="Missing"):
        changed(model=NO_UNKNOWN).encode_text("y")


def test_tokenizer_on_which_the_library_panics_is_refused(changed: Callable[..., ModelTokenizer]) -> None:
    with pytest.raises(ConfigError, match=r"is not usable: .*precompiled_charsmap"):
        changed(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})


def test_vocabulary_on_which_the_library_of_grammars_panics_is_not_supported(demo_directory: ModelDirectory) -> None:
    with pytest.raises(UnsupportedTokenizerError, match="assertion failed"):
        GrammarTokenizer(
            TokenizerSource((demo_directory.path / "tokenizer.json").read_text(), 1 << 21, 4096, frozenset({0}))
        )
