"""Resumable streams while gateways and workers are killed: each goes on at another gateway, where it was.

Clients share no code with the product. Each asks any gateway, and when its connection breaks, any other one, with the
id of its last event. Ids without a gap and the undisturbed text say that no token was lost or doubled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

from ops.chaos.faults import Kill
from ops.chaos.mix import Body, plain_bodies
from ops.chaos.outcome import Outcome, percentile
from ops.chaos.system import API_KEY, System, SystemOptions

CONTINUED_S = 2.0
NUM_STREAMS = 200
# Streams at once: as many as there are slots.
_CONCURRENT = 64
_NUM_BODIES = 8
_PAUSE_S = 0.05
_TIMEOUT_S = 300.0
_NUM_GATEWAYS = 3
_NUM_WORKERS = 3
_OPTIONS = SystemOptions(num_gateways=_NUM_GATEWAYS, num_workers=_NUM_WORKERS, simulate_ms=10.0)
_BETWEEN_KILLS_S = 1.0
# All at once, as slowly as a thousand people read: this machine serves the clients, too.
_AT_ONCE = SystemOptions(
    num_gateways=_NUM_GATEWAYS,
    num_workers=_NUM_WORKERS,
    simulate_ms=200.0,
    worker={"simulate_growth": 0, "max_num_seqs": 1024, "num_blocks": 50_000, "max_num_batched_tokens": 16384},
    gateway={"interactive_ttft_slo_s": 60},
)
# Before gateways wrote a journal: its gateways read pieces alone.
EARLIER = "be9066587c625afc9d76279e4887d922a8f47708"


class _BrokenError(Exception):
    """The connection broke, or its gateway says that the stream goes on elsewhere."""


@dataclass
class _Stream:
    """One stream as its client has it: data by id, and the seconds from each break to the next event."""

    body: Body
    stream_id: str = ""
    events: dict[int, str] = field(default_factory=dict)
    gaps_s: list[float] = field(default_factory=list)
    problem: str = ""
    is_done: bool = False

    @property
    def text(self) -> str:
        """The text so far."""
        objects = [json.loads(data) for data in self.events.values() if data != "[DONE]"]
        return "".join(choice["text"] for each in objects for choice in each.get("choices", ()))


@dataclass(frozen=True)
class ResumedStreams:
    """Kills gateways and workers in turn under `num_streams` resumable streams, or as many as the scenario is given.

    Attributes:
        num_at_once: Of the streams; None opens all at once.
    """

    case: str
    options: SystemOptions = _OPTIONS
    num_streams: int = NUM_STREAMS
    num_tokens: int = 400
    num_at_once: int | None = _CONCURRENT

    async def __call__(self, num_requests: int | None) -> Outcome:
        """Run it."""
        outcome = Outcome(self.case, f"0 lost, 0 doubled, continued <= {CONTINUED_S:g} s (p99)")
        bodies = [
            Body(body.path, body.json | {"stream_options": {"resumable": True}})
            for body in plain_bodies(self.num_tokens, _NUM_BODIES)
        ]
        async with System(self.options) as system:
            undisturbed = [_Stream(body) for body in bodies]
            await asyncio.gather(*(_read(system, stream, asyncio.Semaphore(1)) for stream in undisturbed))
            streams = [_Stream(bodies[number % _NUM_BODIES]) for number in range(num_requests or self.num_streams)]
            killing = asyncio.create_task(_kill(system))
            places = asyncio.Semaphore(self.num_at_once or len(streams))
            await asyncio.gather(*(_read(system, stream, places) for stream in streams))
            killing.cancel()
            await asyncio.gather(killing, return_exceptions=True)
            outcome.figures["kills"] = sum(part.num_kills for part in [*system.gateways, *system.workers])
        _judge(outcome, streams, {id(stream.body): stream.text for stream in undisturbed})
        return outcome


RESUMED_STREAMS = (
    ResumedStreams("resumed-streams"),
    ResumedStreams("resumed-streams-at-once", _AT_ONCE, 1000, 150, None),
    # A gateway of the version before among today's.
    ResumedStreams("resumed-streams-earlier", replace(_OPTIONS, commit_of={"gateway-0": EARLIER})),
)


async def _kill(system: System) -> None:
    chance = random.Random(11)
    while True:
        kind, count = chance.choice((("gateway", _NUM_GATEWAYS), ("gateway", _NUM_GATEWAYS), ("worker", _NUM_WORKERS)))
        await asyncio.sleep(_BETWEEN_KILLS_S)
        await Kill(0.0, chance.uniform(0.2, 1.0), f"{kind}-{chance.randrange(count)}").run(system)


async def _read(system: System, stream: _Stream, places: asyncio.Semaphore) -> None:
    async with places:
        key = f"{random.getrandbits(64):x}"
        broken_at: float | None = None
        deadline = time.monotonic() + _TIMEOUT_S
        while not (stream.is_done or stream.problem):
            gateway = random.choice(system.gateways).name
            try:
                async for _ in _events(system.port(gateway), stream, key):
                    if broken_at is not None:
                        stream.gaps_s.append(time.monotonic() - broken_at)
                        broken_at = None
            except (_BrokenError, OSError, asyncio.IncompleteReadError, ValueError):
                if stream.events:
                    broken_at = broken_at or time.monotonic()
                await asyncio.sleep(_PAUSE_S)
            if time.monotonic() > deadline:
                stream.problem = f"no end within {_TIMEOUT_S:g} s, {len(stream.events)} events"


async def _events(port: int, stream: _Stream, key: str) -> AsyncIterator[None]:
    """Ask for the events behind those that a stream has, and take them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(_request(stream, key))
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(head[0].split()[1])
        if status == 204:
            stream.is_done = True
            return
        if status not in (200, 429, 502, 503):
            stream.problem = f"{status} {(await reader.read(300)).decode(errors='replace')}"
        if status != 200:
            raise _BrokenError
        names = dict(line.split(": ", 1) for line in head[1:] if line)
        stream.stream_id = names["x-request-id"]
        pending = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            pending += await reader.readexactly(size)
            await reader.readexactly(2)
            *events, pending = pending.split(b"\n\n")
            for event in events:
                _take(stream, event.decode().removeprefix(": keep-alive\n"))
                yield
        stream.is_done = True
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _request(stream: _Stream, key: str) -> bytes:
    common = f"Host: chaos\r\nAuthorization: Bearer {API_KEY}\r\n"
    if stream.stream_id and stream.events:
        last = f"Last-Event-ID: {max(stream.events)}\r\n"
        return f"GET /v1/streams/{stream.stream_id} HTTP/1.1\r\n{common}{last}\r\n".encode()
    # The gateway may have died before it said which stream it is: the key finds it.
    payload = json.dumps(stream.body.json).encode()
    names = f"{common}Idempotency-Key: {key}\r\nContent-Length: {len(payload)}\r\n"
    return f"POST {stream.body.path} HTTP/1.1\r\n{names}\r\n".encode() + payload


def _take(stream: _Stream, event: str) -> None:
    lines = dict(line.split(": ", 1) for line in event.split("\n") if ": " in line)
    if "id" not in lines:
        raise _BrokenError
    number = int(lines["id"])
    if number != len(stream.events):
        stream.problem = f"event {number} where {len(stream.events)} was due"
    content: Any = lines["data"]
    if '"error"' in content:
        stream.problem = f"the stream failed: {content[:300]}"
    stream.events[number] = content


def _judge(outcome: Outcome, streams: list[_Stream], references: dict[int, str]) -> None:
    outcome.num_requests = len(streams)
    for stream in streams:
        problem = stream.problem
        if not problem and stream.text != references[id(stream.body)]:
            problem = "a stream has another text than the undisturbed one"
            outcome.num_wrong += 1
        elif problem:
            outcome.num_failed += 1
        if problem and len(outcome.problems) < 5:
            outcome.problems.append(f"{stream.stream_id}: {problem}")
    outcome.silences_s = [gap for stream in streams for gap in stream.gaps_s]
    p99_s = percentile(outcome.silences_s, 0.99)
    outcome.expect(p99_s is not None, "no stream was open while its gateway died")
    if p99_s is not None:
        outcome.figures |= {"continuations": len(outcome.silences_s), "continued p99 s": round(p99_s, 2)}
        outcome.figures["continued max s"] = round(max(outcome.silences_s), 2)
        outcome.expect(p99_s <= CONTINUED_S, f"streams went on after {p99_s:.2f} s (p99)")
