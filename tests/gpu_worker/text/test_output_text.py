from __future__ import annotations

import time
from typing import SupportsIndex
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.text import output_text
from gpu_worker.text.output_text import StopStrings
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.sampling import Sampling


def _pieces(tokenizer: ModelTokenizer, token_ids: list[int], stops: tuple[str, ...], num_replayed: int) -> list[str]:
    """Return the pieces of the tokens that follow a replay, the last piece being the final flush."""
    output = tokenizer.output_text([], Sampling(stop=stops))
    output.replay(token_ids[:num_replayed])
    pieces = [output.feed(token_id) for token_id in token_ids[num_replayed:]]
    return [*pieces, "" if output.is_stopped else output.finish()]


@settings(max_examples=300)
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


def test_long_output_without_stop_strings_is_resumed_in_a_moment(tokenizer: ModelTokenizer) -> None:
    token_ids = tokenizer.encode_text("return é") * (1 << 16)
    output = tokenizer.output_text([], Sampling())
    began = time.thread_time()
    output.replay(token_ids)
    assert time.thread_time() - began < 0.01
    assert output.finish() == ""


def test_held_text_is_flushed_at_the_end(tokenizer: ModelTokenizer) -> None:
    output = tokenizer.output_text([], Sampling(stop=("STOP",)))
    pieces = [output.feed(token_id) for token_id in tokenizer.encode_text("no STO")]
    assert "".join(pieces) == "no "
    assert output.finish() == "STO"
    assert not output.is_stopped


def test_unfinished_character_can_complete_a_stop_string(tokenizer: ModelTokenizer) -> None:
    output = tokenizer.output_text([], Sampling(stop=("\ufffd",)))
    assert output.feed(tokenizer.encode_text("é")[0]) == ""
    assert output.finish() == ""
    assert output.is_stopped


@settings(max_examples=150)
@given(
    token_ids=st.lists(st.integers(0, 400), min_size=1, max_size=40),
    min_tokens=st.integers(0, 45),
    start=st.integers(0, 100),
    is_included=st.booleans(),
    split=st.integers(0, 40),
)
def test_stop_string_is_looked_for_behind_the_least_tokens_and_may_be_part_of_the_text(
    tokenizer: ModelTokenizer, token_ids: list[int], min_tokens: int, start: int, is_included: bool, split: int
) -> None:
    text = tokenizer.decode(token_ids)
    stop = text[start : start + 2] or "x"
    asked = Sampling(stop=(stop,), min_tokens=min_tokens, include_stop_str_in_output=is_included)
    plain = tokenizer.output_text([], Sampling())
    pieces = [plain.feed(token_id) for token_id in token_ids]
    head, tail = "".join(pieces[:min_tokens]), "".join(pieces[min_tokens:])
    tail += plain.finish()
    expected = head + tail
    if stop in tail:
        expected = head + tail[: tail.index(stop) + (len(stop) if is_included else 0)]
    whole = tokenizer.output_text([], asked)
    first = [whole.feed(token_id) for token_id in token_ids]
    assert "".join(first) + whole.finish() == expected
    resumed = tokenizer.output_text([], asked)
    resumed.replay(token_ids[:split])
    assert [resumed.feed(token_id) for token_id in token_ids[split:]] == first[split:]


_letters = st.text("ab", max_size=6)


def _run(pieces: list[str], stops: tuple[str, ...]) -> tuple[str, bool]:
    matcher = StopStrings(stops)
    out = "".join(matcher.feed(piece) for piece in pieces)
    matched = matcher.is_matched
    return out + matcher.flush(), matched


@settings(max_examples=500)
@given(pieces=st.lists(_letters, max_size=12), stop=st.text("ab", min_size=1, max_size=5))
def test_text_is_cut_before_the_first_stop_string(pieces: list[str], stop: str) -> None:
    text = "".join(pieces)
    assert _run(pieces, (stop,)) == (text.split(stop)[0], stop in text)


@settings(max_examples=500)
@given(
    pieces=st.lists(_letters, max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
)
def test_nothing_sent_was_part_of_a_stop_string_and_nothing_is_held_needlessly(
    pieces: list[str], stops: list[str]
) -> None:
    matcher = StopStrings(tuple(stops))
    text = sent = ""
    for piece in pieces:
        text += piece
        sent += matcher.feed(piece)
        assert text.startswith(sent)
        if matcher.is_matched:
            assert any(text[len(sent) :].startswith(stop) for stop in stops)
            assert not any(stop in sent for stop in stops)
            return
        held = text[len(sent) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)
        for longer in range(len(held) + 1, len(text) + 1):
            assert not any(stop.startswith(text[-longer:]) for stop in stops)
    assert not any(stop in text for stop in stops)


@settings(max_examples=500)
@given(
    pieces=st.lists(_letters, max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    split=st.integers(0, 12),
    num_at_once=st.integers(1, 5),
)
def test_skipped_pieces_leave_what_fed_ones_do(
    pieces: list[str], stops: list[str], split: int, num_at_once: int
) -> None:
    fed, skipped = StopStrings(tuple(stops)), StopStrings(tuple(stops))
    first = pieces[: split // 3]
    assert [fed.feed(piece) for piece in first] == [skipped.feed(piece) for piece in first]
    for piece in pieces[split // 3 : split]:
        fed.feed(piece)
    with patch.object(output_text, "_PIECES_AT_ONCE", num_at_once):
        skipped.skip(pieces[split // 3 : split])
    assert skipped.matched == fed.matched
    assert [fed.feed(piece) for piece in pieces[split:]] == [skipped.feed(piece) for piece in pieces[split:]]
    assert (skipped.matched, skipped.flush()) == (fed.matched, fed.flush())


def test_text_after_a_match_is_dropped() -> None:
    matcher = StopStrings(("END",))
    assert matcher.feed("so EN") == "so "
    assert matcher.feed("D and on") == ""
    assert matcher.feed("xyz") == ""
    assert matcher.flush() == ""


def test_text_that_is_skipped_is_compared_in_c() -> None:
    stops = tuple(CountedReads("a" * length + "b") for length in range(1000, 1016))
    matcher = StopStrings(stops)
    matcher.skip(["aaaa"] * 100_000)
    # Only its end is compared here, with each string once; fed, each string is read for each character.
    assert sum(stop.num_reads for stop in stops) < 6 * 16 * 1016
    assert matcher.flush() == "a" * 1015


def test_long_stop_string_costs_little_per_character() -> None:
    matcher = StopStrings(tuple("a" * length + "b" for length in range(1000, 1016)))
    matcher.feed("a" * 20_000)
    assert matcher.flush() == "a" * 1015


class CountedReads(str):
    """A string that counts how many of its characters were read."""

    num_reads = 0

    def __getitem__(self, place: SupportsIndex | slice) -> str:
        self.num_reads += 1
        return super().__getitem__(place)


def test_long_stop_string_is_read_only_as_far_as_the_text_resembles_it() -> None:
    stop = CountedReads("ab" * 512)
    matcher = StopStrings((stop,))
    assert matcher.feed("what else, aba") == "what else, "
    assert stop.num_reads < 50
