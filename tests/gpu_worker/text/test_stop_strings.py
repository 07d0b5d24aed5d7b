from __future__ import annotations

from typing import SupportsIndex

from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.text.output_text import StopStrings

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


def test_text_after_a_match_is_dropped() -> None:
    matcher = StopStrings(("END",))
    assert matcher.feed("so EN") == "so "
    assert matcher.feed("D and on") == ""
    assert matcher.feed("xyz") == ""
    assert matcher.flush() == ""


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
