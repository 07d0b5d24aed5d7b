"""The question that decides whether `headrace up` is ready."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from ops.stack.probe import READY, first_generation
from shared.errors import DependencyError


@asynccontextmanager
async def _server(answer: Callable[[str, bytes], tuple[int, object]]) -> AsyncIterator[str]:
    """Yield the URL of a server that answers a method, with its body, by a status and JSON."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert "authorization: bearer key\r\n" in head.lower()
        length = int(head.lower().split("content-length:")[1].split()[0])
        status, body = answer(head.split()[0], await reader.readexactly(length))
        content = json.dumps(body).encode()
        writer.write(f"HTTP/1.1 {status} -\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def _ask(status: int, told: list[str] | None = None) -> tuple[str | None, str]:
    """Ask a server that lists a model and answers everything else with a status."""
    listed, refused = {"data": [{"id": "m"}]}, {"error": {"message": "no such token"}}
    async with _server(lambda method, _: (200, listed) if method == "GET" else (status, refused)) as url:
        return await first_generation(url, "key", ([] if told is None else told).append, set())


def test_a_model_that_is_busy_is_asked_again() -> None:
    assert asyncio.run(_ask(503)) == (None, "a first generation answers 503: no such token")


def test_a_model_that_refuses_the_question_will_never_be_ready() -> None:
    with pytest.raises(DependencyError, match="cannot be used, a first generation answers 400: no such token"):
        asyncio.run(_ask(400))


def test_the_answer_is_what_is_waited_for_once_the_question_is_asked() -> None:
    told: list[str] = []
    asyncio.run(_ask(503, told))
    assert told == ["the first answer"]


async def test_a_model_that_has_answered_is_not_asked_again_while_others_are_waited_for() -> None:
    asked: list[str] = []

    answered: set[str] = set()

    def answer(method: str, body: bytes) -> tuple[int, object]:
        if method == "GET":
            return 200, {"data": [{"id": "early"}, {"id": "late"}]}
        asked.append(json.loads(body)["model"])
        return (503, {}) if asked == ["early", "late"] else (200, {})

    async with _server(answer) as url:
        first = await first_generation(url, "key", lambda _: None, answered)
        assert (first[0], answered) == (None, {"early"})
        assert await first_generation(url, "key", lambda _: None, answered) == ("early", READY)
        assert await first_generation(url, "key", lambda _: None, answered) == ("early", READY)
    assert asked == ["early", "late", "late"]
