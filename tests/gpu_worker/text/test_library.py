from __future__ import annotations

import pytest

from gpu_worker.structured_output.grammar_tokenizer import GrammarTokenizer, TokenizerSource, UnsupportedTokenizerError
from gpu_worker.text.library import TokenizerError
from gpu_worker.text.model_directory import ModelDirectory
from shared.errors import ConfigError
from tests.gpu_worker.text.conftest import CopiedModel

SLOW_PATTERN = {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated", "invert": False}
NO_UNKNOWN = {"type": "WordLevel", "vocab": {"x": 0}, "unk_token": "[UNK]"}


def test_text_on_which_the_library_panics_is_an_error_of_that_text(copied: CopiedModel) -> None:
    """A panic is no `Exception`: a request with such a text would end its worker, and then the next one."""
    copied.change("tokenizer.json", pre_tokenizer=SLOW_PATTERN)
    tokenizer = copied.tokenizer()
    with pytest.raises(TokenizerError, match="retry-limit-in-match"):
        tokenizer.encode_text("a" * 60 + "b")
    assert tokenizer.encode_text("aa")


def test_text_that_the_library_refuses_is_an_error_of_ours(copied: CopiedModel) -> None:
    copied.change("tokenizer.json", model=NO_UNKNOWN)
    with pytest.raises(TokenizerError, match="Missing"):
        copied.tokenizer().encode_text("y")


def test_tokenizer_on_which_the_library_panics_is_refused(copied: CopiedModel) -> None:
    copied.change("tokenizer.json", normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    with pytest.raises(ConfigError, match=r"is not usable: .*precompiled_charsmap"):
        copied.tokenizer()


def test_vocabulary_on_which_the_library_of_grammars_panics_is_not_supported(demo_directory: ModelDirectory) -> None:
    with pytest.raises(UnsupportedTokenizerError, match="assertion failed"):
        GrammarTokenizer(
            TokenizerSource((demo_directory.path / "tokenizer.json").read_text(), 1 << 21, 4096, frozenset({0}))
        )
