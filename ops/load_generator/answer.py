"""Reads an answer after it has arrived: a stream of OpenAI's completions or chat, from whatever server.

A server may leave out the usage, break off, send an error as an event, or be something else: each is a `Reading` too.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import httptools
import msgspec

from ops.load_generator.connection import Answer

_DATA = re.compile(rb"^data: ?(.*?)\r?$", re.MULTILINE)
REFUSALS = (429, 503)
"""A limit is reached; there is no place."""

_NUMBER = re.compile(r"\d{1,9}")
_SHOWN = 160


class _Delta(msgspec.Struct):
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


@dataclass(slots=True)
class Reading:
    """What an answer says.

    Attributes:
        status: Of HTTP; 0 where there was none.
        problem: Why the answer does not count as one; None if it is whole.
        retry_after_s: What a refusal tells to wait.
        texts: When each piece of text was there, and the piece; all moments are of `time.monotonic`.
        prompt_tokens: By the usage, as the following; None where the server tells none.
    """

    sent_at: float
    ended_at: float
    status: int = 0
    problem: str | None = None
    retry_after_s: int | None = None
    texts: list[tuple[float, str]] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None

    @property
    def ttft_s(self) -> float:
        """Return the time to the first piece of text, where there is one."""
        return self.texts[0][0] - self.sent_at

    @property
    def gaps_s(self) -> list[float]:
        """Return the times between pieces of text; text read at once is one piece."""
        return [later - earlier for (earlier, _), (later, _) in pairwise(self.texts) if later > earlier]

    @property
    def text(self) -> str:
        """Return the whole text."""
        return "".join(text for _, text in self.texts)


def read(answer: Answer) -> Reading:
    """Read an answer."""
    body = _Body(Reading(answer.sent_at, answer.ended_at or answer.sent_at))
    reading = body.reading
    parser = httptools.HttpResponseParser(body)
    for body.now, data in answer.pieces:
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            reading.problem = f"not HTTP: {_shown(data)}"
            return reading
    reading.status = parser.get_status_code() if body.has_status else 0
    data = b"".join(body.parts)
    if reading.status == 0:
        reading.problem = answer.problem or "closed without an answer"
    elif reading.status != 200:
        words = _error(data, "code" if reading.status in REFUSALS else "message")
        reading.problem = f"status {reading.status}{words and ': '}{words}"
    else:
        _read_events(data, body, answer, reading)
    return reading


def _read_events(data: bytes, body: _Body, answer: Answer, reading: Reading) -> None:
    ends = list(accumulate(map(len, body.parts)))
    is_done = has_events = False
    for found in _DATA.finditer(data):
        if not data.startswith(b"\n", found.end()):
            break  # its end has not come
        has_events = True
        if found[1] == b"[DONE]":
            is_done = True
            continue
        try:
            chunk = _DECODER.decode(found[1])
        except msgspec.MsgspecError:
            reading.problem = f"not an event of this API: {_shown(found[1])}"
            return
        if chunk.error is not None:
            reading.problem = "an error event within the stream"
            return
        is_done |= _take(chunk, body.times[min(bisect_left(ends, found.end()), len(ends) - 1)], reading)
    if not has_events:
        reading.problem = f"no event stream: {_shown(data)}" if data else "an empty answer"
    elif not (answer.is_whole and is_done):
        reading.problem = "the stream was cut"
    elif not reading.texts and not reading.completion_tokens:
        reading.problem = "no token"


def _take(chunk: _Chunk, now: float, reading: Reading) -> bool:
    """Note what an event says, and return whether it ends the answer."""
    if chunk.usage is not None:
        details = chunk.usage.prompt_tokens_details
        reading.prompt_tokens = chunk.usage.prompt_tokens
        reading.completion_tokens = chunk.usage.completion_tokens
        reading.cached_tokens = None if details is None else details.cached_tokens
    is_end = False
    for choice in chunk.choices:
        text = choice.text or ("" if choice.delta is None else _delta_text(choice.delta))
        if text:
            reading.texts.append((now, text))
        is_end |= choice.finish_reason is not None
    return is_end


def _delta_text(delta: _Delta) -> str:
    parts = [part for part in (delta.reasoning_content or delta.reasoning, delta.content) if isinstance(part, str)]
    return "".join(parts) or (msgspec.json.encode(delta.tool_calls).decode() if delta.tool_calls else "")


class _Body:
    """Takes an answer from the parser, with the moment at which each part of its body came."""

    def __init__(self, reading: Reading) -> None:
        self.now = 0.0
        self.parts: list[bytes] = []
        self.times: list[float] = []
        self.has_status = False
        self.reading = reading

    def on_status(self, _status: bytes) -> None:
        self.has_status = True

    def on_headers_complete(self) -> None:
        self.has_status = True

    def on_header(self, name: bytes, value: bytes) -> None:
        told = value.decode("latin-1").strip()
        if name.lower() == b"retry-after" and _NUMBER.fullmatch(told):
            self.reading.retry_after_s = int(told)

    def on_body(self, part: bytes) -> None:
        self.parts.append(part)
        self.times.append(self.now)


def _error(data: bytes, field: str) -> str:
    """Return a field of an error; without a message how the body begins. By their code, refusals are one problem."""
    try:
        words = msgspec.json.decode(data)["error"][field]
    except (msgspec.MsgspecError, KeyError, TypeError, IndexError):
        words = "" if field == "code" else data.decode(errors="replace")
    return str(words or "")[:_SHOWN]


def _shown(data: bytes) -> str:
    return repr(data[:_SHOWN].decode(errors="replace"))


_DECODER = msgspec.json.Decoder(_Chunk)
