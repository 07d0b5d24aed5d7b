"""Sessions of one request or of many turns with their times, drawn by a seed, or read from a file.

Prompts are English words, because an unknown server has an unknown tokenizer; how many tokens a word has is measured on
the server (`TokenScale`).
"""

from __future__ import annotations

import json
import random
import struct
import zlib
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from ops.load_generator.agents import AgentLoad
from ops.simulation.workload import MAX_TOKENS, Arrival, TraceError

_WORD_LIST = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work night point home water room mother area money story "
    "fact month lot right study book eye job word business issue side kind head house service friend father power hour "
    "game line end member law car city name team minute idea body back parent face level office door health person art "
    "war history party result change morning reason research girl guy moment air teacher force foot boy age policy"
)
_WORDS = tuple(_WORD_LIST.split())
_MASK = (1 << 64) - 1
_NUMBERS_OF_A_SEED = 10_000_019
_CHARACTERS_PER_TOKEN = 4
_MAX_FILE = 1 << 30


@dataclass(frozen=True, slots=True)
class Turn:
    """One request.

    Attributes:
        text: What it adds to the prompt and the answer of the turn before.
        max_tokens: Of its answer.
        pause_s: From the end of the answer before to this request.
        images: Data URLs, shown before the text.
    """

    text: str
    max_tokens: int
    pause_s: float = 0.0
    images: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Session:
    """Requests of which each waits for the answer to the one before; the first is due `at` seconds."""

    at: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class TokenScale:
    """How words become tokens on a server.

    Attributes:
        per_word: Tokens of a word, 1 at least.
        overhead: Tokens of a prompt without words, such as those of a chat template.
    """

    per_word: float = 1.0
    overhead: float = 0.0

    def words(self, token_ids: Sequence[int], overhead: float = 0.0) -> str:
        """Return a text of about as many tokens. Equal beginnings stay equal."""
        count = max(1, round((len(token_ids) - overhead) / self.per_word))
        places = (min(len(token_ids) - 1, int(number * self.per_word)) for number in range(count))
        return " ".join(_word(token_ids[place]) for place in places)

    @classmethod
    def measured(cls, short: tuple[int, int], long: tuple[int, int]) -> TokenScale:
        """Return what two prompts show, each as its words and the tokens that the server counted."""
        per_word = max(1.0, (long[1] - short[1]) / (long[0] - short[0]))
        return cls(per_word, max(0.0, short[1] - per_word * short[0]))


def _word(token_id: int) -> str:
    """Return the word of an id; those of neighbours have nothing in common (the mixing of SplitMix64)."""
    mixed = token_id * 0x9E3779B97F4A7C15 & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    return _WORDS[(mixed >> 32) % len(_WORDS)]


def single_requests(
    arrivals: Iterable[Arrival], scale: TokenScale, images: Sequence[tuple[str, ...]], seed: int
) -> list[Session]:
    """Return a session of one request for each arrival; images go round. Other seeds have other texts."""
    sessions = []
    for number, arrival in enumerate(arrivals, start=seed * _NUMBERS_OF_A_SEED):
        text = scale.words(arrival.token_ids(number), scale.overhead)
        shown = images[number % len(images)] if images else ()
        sessions.append(Session(arrival.at, (Turn(text, arrival.output, images=shown),)))
    return sessions


def conversations(arrivals: Iterable[Arrival], load: AgentLoad, seed: int, scale: TokenScale) -> list[Session]:
    """Return a conversation of an agent for each arrival, which tells only when it begins."""
    times = [arrival.at for arrival in arrivals]
    sessions = []
    for at, conversation in zip(times, load.conversations(seed, len(times)), strict=True):
        first, *others = conversation.turns
        turns = [replace(first, pause_s=0.0), *others]
        told = (Turn(scale.words(turn.added_ids), turn.num_answered, turn.pause_s) for turn in turns)
        sessions.append(Session(at, tuple(told)))
    return sessions


def from_file(path: Path, arrivals: Iterable[Arrival]) -> list[Session]:
    """Return the prompts of a file, each as one request, again from its beginning where there are more arrivals.

    The file is ShareGPT's JSON (`conversations`, of which the first two messages are a prompt and its answer) or lines
    of JSON with `prompt` and, where it is not the arrival's, `output_tokens`.

    Raises:
        TraceError: A prompt cannot be used, or there is none.
    """
    prompts = list(_prompts(path))
    if not prompts:
        raise TraceError(f"{path}: has no prompts")
    return [
        Session(arrival.at, (Turn(text, arrival.output if tokens is None else tokens),))
        for arrival, (text, tokens) in zip(arrivals, cycle(prompts), strict=False)
    ]


def _prompts(path: Path) -> Iterator[tuple[str, int | None]]:
    if path.stat().st_size > _MAX_FILE:
        raise TraceError(f"{path}: is larger than 1 GiB")
    text = path.read_text(encoding="utf-8", errors="replace")
    is_list = text.lstrip().startswith("[")
    try:
        entries = json.loads(text) if is_list else (json.loads(line) for line in text.splitlines() if line.strip())
        for number, entry in enumerate(entries, start=1):
            if (prompt := _prompt(entry, f"{path}: entry {number}")) is not None:
                yield prompt
    except ValueError as error:
        raise TraceError(f"{path}: is no JSON: {error}") from None


def _prompt(entry: Any, place: str) -> tuple[str, int | None] | None:
    try:
        if "conversations" in entry:
            asked, answered = (message["value"] for message in islice(entry["conversations"], 2))
            return str(asked), max(1, min(MAX_TOKENS, len(answered) // _CHARACTERS_PER_TOKEN))
        tokens = entry.get("output_tokens")
        if tokens is not None and not (isinstance(tokens, int) and 1 <= tokens <= MAX_TOKENS):
            raise TraceError(f"{place}: output_tokens must be 1 to {MAX_TOKENS}")
        if not isinstance(entry["prompt"], str):
            raise TraceError(f"{place}: prompt must be a text")
        return entry["prompt"], tokens
    except (KeyError, TypeError, AttributeError):
        raise TraceError(f"{place}: has neither `prompt` nor `conversations`") from None
    except ValueError:
        return None  # an unanswered conversation


def picture(width: int, height: int, draw: random.Random) -> str:
    """Return a PNG of random pixels as a data URL."""
    rows = b"".join(b"\0" + draw.randbytes(3 * width) for _ in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 1)), (b"IEND", b""))
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(part)) + name + part + struct.pack(">I", zlib.crc32(name + part)) for name, part in parts
    )
    return f"data:image/png;base64,{b64encode(data).decode()}"
