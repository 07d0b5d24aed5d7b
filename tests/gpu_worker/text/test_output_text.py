from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.text.model_directory import ModelDirectory
from gpu_worker.text.tokenizer import ModelTokenizer


@pytest.fixture(scope="module")
def tokenizer(demo_directory: ModelDirectory) -> ModelTokenizer:
    return ModelTokenizer(demo_directory)


def _pieces(tokenizer: ModelTokenizer, token_ids: list[int], stops: tuple[str, ...], num_replayed: int) -> list[str]:
    """Return the pieces of the tokens that follow a replay, the last piece being the final flush."""
    output = tokenizer.output_text([], stops)
    output.replay(token_ids[:num_replayed])
    pieces = [output.feed(token_id) for token_id in token_ids[num_replayed:]]
    return [*pieces, "" if output.is_stopped else output.finish()]


@settings(deadline=None, max_examples=300)
@given(data=st.data(), token_ids=st.lists(st.integers(0, 400), max_size=60))
def test_resumed_output_continues_with_exactly_the_missing_text(
    tokenizer: ModelTokenizer, data: st.DataObject, token_ids: list[int]
) -> None:
    text = tokenizer.decode(token_ids)
    start = data.draw(st.integers(0, max(0, len(text) - 1)))
    stops = ("\n\n", "é", text[start : start + 3] or "x")
    split = data.draw(st.integers(0, len(token_ids)))
    whole = _pieces(tokenizer, token_ids, stops, 0)
    resumed = _pieces(tokenizer, token_ids, stops, split)
    assert resumed == whole[split:]
    cut = min((text.find(stop) for stop in stops if stop in text), default=len(text))
    assert "".join(whole) == text[:cut]


def test_held_text_is_flushed_at_the_end(tokenizer: ModelTokenizer) -> None:
    output = tokenizer.output_text([], ("STOP",))
    pieces = [output.feed(token_id) for token_id in tokenizer.encode_text("no STO")]
    assert "".join(pieces) == "no "
    assert output.finish() == "STO"
    assert not output.is_stopped


def test_unfinished_character_can_complete_a_stop_string(tokenizer: ModelTokenizer) -> None:
    output = tokenizer.output_text([], ("\ufffd",))
    assert output.feed(tokenizer.encode_text("é")[0]) == ""
    assert output.finish() == ""
    assert output.is_stopped
