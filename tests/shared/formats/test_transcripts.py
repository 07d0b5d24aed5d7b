from __future__ import annotations

import codecs
import itertools
import json
import random
import tomllib
from pathlib import Path
from typing import Any

import pytest

from shared.formats import format_named
from tests.shared.formats.reading import Understood, read, understood
from tests.shared.formats.tools import tools

_FOLDER = Path(__file__).parent / "transcripts"


def _transcripts() -> list[Any]:
    files = sorted(_FOLDER.glob("*.toml"))
    cases = [(file.stem, each) for file in files for each in tomllib.loads(file.read_text())["transcript"]]
    return [pytest.param(name, each, id=f"{name}: {each['condition']}") for name, each in cases]


def _expected(transcript: dict[str, Any]) -> Understood:
    calls = tuple((call["name"], call["arguments"]) for call in transcript.get("calls", ()))
    return Understood(transcript.get("content", ""), transcript.get("reasoning", ""), calls)


def _splits(text: str, seed: int) -> list[list[str]]:
    """Return the text in single characters, in decoded bytes, and in random pieces."""
    splits = [list(text)]
    chance = random.Random(seed)
    for _ in range(8):
        places = sorted(chance.sample(range(len(text) + 1), min(len(text), chance.randint(1, 12))))
        splits.append([text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])])
    decoder = codecs.getincrementaldecoder("utf-8")()
    splits.append([decoder.decode(bytes([byte])) for byte in text.encode()])
    return splits


def _halves(text: str) -> list[list[str]]:
    """Return the text in two pieces, cut at every place."""
    return [[text[:place], text[place:]] for place in range(1, len(text))]


def _check(name: str, transcript: dict[str, Any], splits: list[list[str]]) -> None:
    offered = tools() if transcript.get("tools", True) else []
    how = {key: transcript.get(key, False) for key in ("starts_in_reasoning", "is_exclusive")}
    whole = read(format_named(name), [transcript["text"]], offered, **how)
    assert understood(whole) == _expected(transcript)
    for pieces in splits:
        assert read(format_named(name), pieces, offered, **how) == whole, pieces


@pytest.mark.parametrize(("name", "transcript"), _transcripts())
def test_transcript_says_the_same_however_it_is_cut(name: str, transcript: dict[str, Any]) -> None:
    text = transcript["text"]
    _check(name, transcript, _splits(text, len(text)) + (_halves(text) if len(text) <= 120 else []))
    if not transcript.get("is_cut", False):
        assert all(json.loads(arguments) is not None for _, arguments in _expected(transcript).calls)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "transcript"), _transcripts())
def test_transcript_says_the_same_wherever_it_is_cut_in_two(name: str, transcript: dict[str, Any]) -> None:
    _check(name, transcript, _halves(transcript["text"]))
