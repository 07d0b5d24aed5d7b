from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import ops
from gpu_worker.text.detokenizer import Detokenizer, make_detokenizer
from gpu_worker.text.token_table import TokenTable, build_table, with_special_tokens
from tests.gpu_worker.text.conftest import sentencepiece_tokenizer, wordpiece_tokenizer

DEMO_FILE = Path(ops.__file__).parent / "demo_model" / "model" / "tokenizer.json"
TEXT = "def naïve(ſ): return '日本語 🏳️‍🌈 \u200b', \"\\x00\"\r\n\ttab  <|user|>"


def _table(tokenizer: Tokenizer, directory: Path) -> TokenTable | None:
    file = directory / "tokenizer.json"
    tokenizer.save(str(file))
    return build_table(tokenizer, file.read_bytes(), tokenizer.get_vocab_size())


@pytest.fixture(scope="module")
def demo() -> tuple[Tokenizer, TokenTable]:
    tokenizer = Tokenizer.from_file(str(DEMO_FILE))
    table = build_table(tokenizer, DEMO_FILE.read_bytes(), 5000)
    assert table is not None
    assert table.style == "byte_level"
    return tokenizer, table


@pytest.fixture(scope="module", params=[True, False], ids=["strips", "keeps"])
def sentencepiece(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, TokenTable]:
    tokenizer = sentencepiece_tokenizer(strips_space=request.param)
    table = _table(tokenizer, tmp_path_factory.mktemp("sentencepiece"))
    assert table is not None
    assert (table.style, table.strips_space) == ("byte_fallback", request.param)
    return tokenizer, table


def _pieces(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*(detokenizer.feed(token_id) for token_id in token_ids), detokenizer.flush()]


def _decode(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=True)


def _check_skips(tokenizer: Tokenizer, table: TokenTable | None, token_ids: list[int], whole: list[str]) -> None:
    """Check that behind skipped tokens the same pieces follow as behind those that were fed."""
    for split in range(len(token_ids) + 1):
        detokenizer = make_detokenizer(tokenizer, table, [])
        detokenizer.skip(token_ids[:split])
        assert _pieces(detokenizer, token_ids[split:]) == whole[split:]


def _check_pieces(tokenizer: Tokenizer, table: TokenTable, token_ids: list[int]) -> None:
    """Check that the pieces add up to the library's text, without special tokens and with them."""
    whole = _pieces(make_detokenizer(tokenizer, table, []), token_ids)
    assert "".join(whole) == _decode(tokenizer, token_ids)
    _check_skips(tokenizer, table, token_ids, whole)
    added = tokenizer.get_added_tokens_decoder().items()
    shown = with_special_tokens(table, {token_id: token.content for token_id, token in added if token.special})
    pieces = _pieces(make_detokenizer(tokenizer, shown, [], skip_special_tokens=False), token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=False)


@settings(max_examples=300)
@given(token_ids=st.lists(st.integers(0, 4999) | st.integers(0, 270) | st.integers(0, 10)))
def test_byte_level_pieces_add_up_to_the_whole_decoding(
    demo: tuple[Tokenizer, TokenTable], token_ids: list[int]
) -> None:
    _check_pieces(*demo, token_ids)


@settings(max_examples=100)
@given(text=st.text())
def test_byte_level_pieces_never_split_a_character(demo: tuple[Tokenizer, TokenTable], text: str) -> None:
    tokenizer, table = demo
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = _pieces(make_detokenizer(tokenizer, table, []), token_ids)
    assert "".join(pieces) == text
    assert pieces[-1] == ""
    assert text.count("\ufffd") == "".join(pieces).count("\ufffd")


@settings(max_examples=300)
@given(
    token_ids=st.lists(
        st.integers(0, 268) | st.integers(255, 268) | st.sampled_from([0xE9, 0x9A, 0xA8]) | st.integers(0, 3)
    )
)
def test_byte_fallback_pieces_add_up_to_the_whole_decoding(
    sentencepiece: tuple[Tokenizer, TokenTable], token_ids: list[int]
) -> None:
    _check_pieces(*sentencepiece, token_ids)


def test_byte_fallback_text_is_spelled_by_bytes_and_read_back(sentencepiece: tuple[Tokenizer, TokenTable]) -> None:
    tokenizer, table = sentencepiece
    token_ids = tokenizer.encode("a 日本!", add_special_tokens=False).ids
    text = "".join(_pieces(make_detokenizer(tokenizer, table, []), token_ids))
    assert text == ("a 日本!" if table.strips_space else " a 日本!")


def test_byte_fallback_output_after_a_prompt_keeps_its_leading_space(
    sentencepiece: tuple[Tokenizer, TokenTable],
) -> None:
    tokenizer, table = sentencepiece
    vocabulary = tokenizer.get_vocab()
    prompt, output = [vocabulary["<s>"], vocabulary["▁a"]], [vocabulary["▁the"]]
    text = "".join(_pieces(make_detokenizer(tokenizer, table, prompt), output))
    assert _decode(tokenizer, prompt) + text == _decode(tokenizer, prompt + output)
    assert text == " the"


def test_other_tokenizers_are_decoded_by_the_library(tmp_path: Path) -> None:
    tokenizer = wordpiece_tokenizer()
    assert _table(tokenizer, tmp_path) is None
    token_ids = tokenizer.encode("understands it.").ids
    pieces = _pieces(make_detokenizer(tokenizer, None, []), token_ids)
    assert "".join(pieces) == _decode(tokenizer, token_ids)
    assert sum(map(bool, pieces)) > 1
    _check_skips(tokenizer, None, token_ids, pieces)


def test_library_shows_special_tokens_too() -> None:
    tokenizer = wordpiece_tokenizer()
    tokenizer.add_special_tokens(["[CALL]"])
    token_ids = [tokenizer.token_to_id("[CALL]"), 5, 6]
    pieces = _pieces(make_detokenizer(tokenizer, None, [], skip_special_tokens=False), token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=False)
    assert "[CALL]" in "".join(pieces)
