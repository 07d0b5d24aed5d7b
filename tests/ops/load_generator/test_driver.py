"""Latencies count from the time at which a request was due, also where the server or a limit holds it back."""

from __future__ import annotations

import asyncio

from ops.load_generator.connection import Address
from ops.load_generator.driver import Driver, Wire
from ops.load_generator.record import Record
from ops.load_generator.sessions import Session, Turn
from tests.ops.load_generator.foreign_server import NUM_PROBES, ForeignServer, foreign_server

DELAY_S = 0.1


def drive(
    server: ForeignServer, sessions: list[Session], *, timeout_s: float = 30.0, **options: object
) -> list[Record]:
    async def run() -> list[Record]:
        wire = Wire(Address.of_url(server.url, "theirs", None), is_chat=True)
        driver = Driver(wire, timeout_s=timeout_s, **options)  # type: ignore[arg-type]
        await driver.run(sessions, asyncio.Event())
        return driver.records

    server.num_asked = NUM_PROBES
    return asyncio.run(run())


def test_path_of_a_server_stands_before_the_path_of_the_api() -> None:
    for url, host in (("https://h/llm/v1", b"h:443"), ("http://h:9/llm/", b"h:9")):
        head = Address.of_url(url, "m", None).post("/v1/completions", {})
        assert head.startswith(b"POST /llm/v1/completions HTTP/1.1\r\n")
        assert b"\r\nhost: " + host + b"\r\n" in head.lower()


def test_wait_for_a_place_is_part_of_the_latency() -> None:
    sessions = [Session(0.001 * number, (Turn("x", 3),)) for number in range(6)]
    with foreign_server("good", delay_s=DELAY_S) as server:
        records = drive(server, sessions, max_concurrency=1)
        closed = drive(server, sessions, max_concurrency=1, is_closed_loop=True)

    waits = [record.ttft_s or 0.0 for record in sorted(records, key=lambda record: record.intended_s)]
    assert all(wait >= DELAY_S * number - 0.01 for number, wait in enumerate(waits, start=1))
    # Without times of their own, requests are due when there is a place.
    assert min(record.ttft_s or 0.0 for record in closed) >= DELAY_S - 0.01
    assert all(record.sent_s - record.intended_s < DELAY_S / 2 for record in closed[:1])
    assert sum(record.sent_s - record.intended_s for record in closed) < DELAY_S * 3


def test_requests_are_sent_when_they_are_due_however_slow_the_server_is() -> None:
    sessions = [Session(0.01 * number, (Turn("x", 3),)) for number in range(10)]
    with foreign_server("good", delay_s=4.0) as server:
        records = drive(server, sessions)

    assert len(records) == 10
    # The last one was sent before the first one was answered.
    assert max(record.sent_s for record in records) < min(record.ended_s for record in records)


def test_turn_waits_for_the_answer_before_and_shows_it() -> None:
    turns = (Turn("ask", 3), Turn("more", 3, pause_s=0.05))
    with foreign_server("good") as server:
        first, second = drive(server, [Session(0.0, turns)])
        assert [message["role"] for message in server.bodies[1]["messages"]] == ["user", "assistant", "user"]
        assert server.bodies[1]["messages"][1]["content"] == "one two three "
    assert second.intended_s >= first.ended_s + 0.04
    assert (first.turn, second.turn) == (0, 1)


def test_conversation_ends_with_its_first_failure() -> None:
    with foreign_server("broken", "good") as server:
        (failed,) = drive(server, [Session(0.0, (Turn("ask", 3), Turn("more", 3)))])
    assert failed.problem == "status 500: no memory"


def test_silent_server_is_a_failure_after_the_timeout() -> None:
    with foreign_server("hangs") as server:
        (late,) = drive(server, [Session(0.0, (Turn("x", 3),))], timeout_s=0.2)
    assert late.problem == "no answer within 0.2 s"


def test_run_that_is_stopped_sends_nothing_more_and_does_not_wait() -> None:
    async def run() -> Driver:
        driver = Driver(Wire(Address.of_url(server.url, "theirs", None), is_chat=True), timeout_s=30.0)
        stopped = asyncio.Event()
        asyncio.get_running_loop().call_later(0.2, stopped.set)
        async with asyncio.timeout(10):
            await driver.run([Session(0.0, (Turn("x", 3),)), Session(60.0, (Turn("y", 3),))], stopped)
        return driver

    with foreign_server("good") as server:
        server.num_asked = NUM_PROBES
        assert len(asyncio.run(run()).records) == 1
