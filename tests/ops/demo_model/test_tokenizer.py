"""The tokenizer gives back every text it is given."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from ops.demo_model.export import MODEL_FOLDER
from ops.demo_model.tokenizer import END_OF_TEXT_ID, SPECIAL_TOKENS, VOCAB_SIZE, encode_documents, train_tokenizer

SHIPPED = Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))


def round_trip(text: str) -> str:
    ids = SHIPPED.encode(text, add_special_tokens=False).ids
    return SHIPPED.decode(ids, skip_special_tokens=False)


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=200))
def test_round_trip_of_any_text_is_the_text(text: str) -> None:
    assert round_trip(text) == text


def test_round_trip_of_every_byte_is_the_bytes() -> None:
    alphabet = set(SHIPPED.get_vocab())
    every_character_below_256 = bytes(range(256)).decode("latin-1")

    assert round_trip(every_character_below_256) == every_character_below_256
    assert sum(len(token) == 1 for token in alphabet) == 256


@pytest.mark.parametrize("text", ["naïve café", "日本語のテキスト", "👩‍👩‍👧‍👦 🇨🇭", "\t\tif x:\r\n\x00", "a" * 1000])
def test_round_trip_of_unicode_and_controls_is_the_text(text: str) -> None:
    assert round_trip(text) == text


def test_special_tokens_have_the_first_ids() -> None:
    assert [SHIPPED.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3]
    assert SHIPPED.get_vocab_size() == VOCAB_SIZE


def test_no_token_is_added_that_was_not_asked_for() -> None:
    assert SHIPPED.encode("x = 1").ids == SHIPPED.encode("x = 1", add_special_tokens=False).ids


def test_code_takes_fewer_tokens_than_a_third_of_its_bytes() -> None:
    code = "def __init__(self, name, value=None):\n        self.name = name\n        self.value = value\n"

    assert len(SHIPPED.encode(code).ids) < len(code) / 3


def test_training_on_a_small_corpus_keeps_all_bytes() -> None:
    tokenizer = train_tokenizer(["def f(x):\n    return x\n"])

    [ids] = encode_documents(tokenizer, ["ÿ → \x00"])

    assert ids[-1] == END_OF_TEXT_ID
    assert tokenizer.decode(ids[:-1]) == "ÿ → \x00"
