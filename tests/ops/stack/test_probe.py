"""The question that decides whether `headrace up` is ready."""

import asyncio
import json

import pytest

from ops.stack.probe import READY, first_generation
from shared.errors import DependencyError


async def _ask(status: int, told: list[str] | None = None) -> tuple[str | None, str]:
    """Ask a server that lists a model and answers everything else with a status."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        is_list = head.startswith(b"GET /v1/models ")
        body = {"data": [{"id": "m"}]} if is_list else {"error": {"message": "no such token"}}
        content = json.dumps(body).encode()
        head = f"HTTP/1.1 {200 if is_list else status} -\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        writer.write(head + content)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        tell = ([] if told is None else told).append
        return await first_generation(f"http://127.0.0.1:{port}", "key", tell, set())


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

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        status, body = 200, {"data": [{"id": "early"}, {"id": "late"}]}
        if head.startswith("POST"):
            length = int(head.lower().split("content-length:")[1].split()[0])
            asked.append(json.loads(await reader.readexactly(length))["model"])
            status, body = (503, {}) if asked == ["early", "late"] else (200, {})
        content = json.dumps(body).encode()
        writer.write(f"HTTP/1.1 {status} -\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        url, answered = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", set[str]()
        first = await first_generation(url, "key", lambda _: None, answered)
        assert (first[0], answered) == (None, {"early"})
        assert await first_generation(url, "key", lambda _: None, answered) == ("early", READY)
        assert await first_generation(url, "key", lambda _: None, answered) == ("early", READY)
    assert asked == ["early", "late", "late"]
