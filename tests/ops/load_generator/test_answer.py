"""What is read of answers: texts with the time of the piece that completes them, and what is wrong."""

from __future__ import annotations

import pytest

from ops.load_generator.answer import Reading, read
from ops.load_generator.connection import Answer

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def reading(*pieces: bytes, is_whole: bool = True) -> Reading:
    return read(Answer(0.5, [(float(at), data) for at, data in enumerate(pieces, start=1)], is_whole))


def test_text_has_the_time_of_the_piece_that_completes_its_event() -> None:
    event = chunk(b'data: {"choices":[{"text":"a b"}]}\n\n')
    last = chunk(b'data: {"choices":[{"text":"c","finish_reason":"length"}]}\r\n\r\ndata: [DONE]\r\n\r\n')
    found = reading(HEAD + event[:20], event[20:], last + END)
    assert found.texts == [(2.0, "a b"), (3.0, "c")]
    assert (found.gaps_s, found.problem, found.completion_tokens) == ([1.0], None, None)
    # What was read at once has no gap, which would say that tokens come in no time.
    assert reading(HEAD + event + event + last + END).gaps_s == []


def test_usage_thoughts_and_tool_calls_are_read() -> None:
    deltas = [b'{"reasoning_content":"hm"}', b'{"content":"yes"}', b'{"tool_calls":[{"index":0}]}', b'{"role":"x"}']
    events = b"".join(b'data: {"choices":[{"delta":%b}]}\n\n' % delta for delta in deltas)
    usage = b'{"prompt_tokens":9,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":8}}'
    found = reading(HEAD + chunk(events + b'data: {"choices":[],"usage":%b}\n\ndata: [DONE]\n\n' % usage) + END)
    assert found.text == 'hmyes[{"index":0}]'
    assert (found.prompt_tokens, found.completion_tokens, found.cached_tokens, found.problem) == (9, 4, 8, None)


EVENT = b'data: {"choices":[{"text":"a"}]}\n\n'


@pytest.mark.parametrize(
    ("body", "is_whole", "problem"),
    [
        (EVENT, True, "the stream was cut"),
        (EVENT + b"data: [DONE]\n\n", False, "the stream was cut"),
        (EVENT + b'data: {"choices":[{"te', False, "the stream was cut"),
        (EVENT + b'data: {"error":{"message":"x"}}\n\n', True, "an error event within the stream"),
        (b"data: <html>\n\n", True, "not an event of this API: '<html>'"),
        (b'{"choices":[]}', True, "no event stream: '{\"choices\":[]}'"),
        (b": ping\n\ndata: [DONE]\n\n", True, "no token"),
    ],
)
def test_answer_that_is_none_is_told(body: bytes, is_whole: bool, problem: str) -> None:
    assert reading(HEAD + chunk(body) + END, is_whole=is_whole).problem == problem


def test_refusal_keeps_its_retry_after() -> None:
    found = reading(b"HTTP/1.1 503 Busy\r\nRetry-After: 7\r\nContent-Length: 2\r\n\r\n{}")
    assert (found.status, found.problem, found.retry_after_s) == (503, "status 503", 7)
    body = b'{"error":{"message":"The first token would take 9.1 s.","code":"overloaded"}}'
    head = b"HTTP/1.1 503 Busy\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert reading(head + body).problem == "status 503: overloaded"
    assert read(Answer(0.5, problem="reset")).problem == "reset"
