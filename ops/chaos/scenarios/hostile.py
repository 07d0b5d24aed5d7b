"""Malformed messages on every subject and route: no process crashes, no request waits, and no memory is kept.

A request over HTTP with a whole head and a length has an answer, whatever its content is; what breaks the framing may
end its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ops.chaos import aftermath
from ops.chaos.load import Load
from ops.chaos.mix import mixed_bodies
from ops.chaos.outcome import Outcome
from ops.chaos.system import API_KEY, MODEL, System, SystemOptions
from ops.stack.ports import free_port
from shared.direct_client import DirectClient
from shared.messages import Cancel, Delta, Frame, GatewayHeartbeat, Heartbeat, Request, decode_request, encode
from shared.nats_connection import Role, connect
from shared.sampling import Sampling
from shared.tokenizer_calls import TokenizeCall

_POSTED = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
_FETCHED = ("/v1/models/", "/v1/models", "/health/live", "/health/ready", "/metrics", "/")
_VALID = json.dumps({"model": MODEL, "prompt": "x", "messages": [], "max_tokens": 1}).encode()
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_ANSWER_S = 20.0
# Without the bytes that end a request line, and without a fragment, which ends the connection.
_TARGET_BYTES = bytes(set(range(0x21, 0x7F)) - {ord("#")})
ROUND_SIZE = 4000
# One message in eight is a request over HTTP, and one in twenty of those breaks its connection: a connection costs as
# much as many requests on it.
HTTP_EVERY = 8
FRAMING_EVERY = 20
REQUESTS_PER_CONNECTION = 50
MAX_QUEUED = 2000
WARM_UP_SHARE = 0.25
MAX_GROWTH = 0.02
_MAX_GROWTH_BYTES = 4 << 20
_ROLES: tuple[Role, ...] = ("gateway", "worker", "batch")


async def malformed(num_requests: int | None) -> Outcome:
    """Malformed messages from every role that may publish, and from HTTP clients, beside an ordinary load."""
    number = num_requests or 20_000
    outcome = Outcome("malformed", "0 crashes, memory +-2 %")
    operator = {"operator_port": free_port(), "operator_key": "operator-chaos-0123456789"}
    async with System(SystemOptions(num_workers=2, simulate_ms=5.0, gateway=operator)) as system:
        load = Load(system, mixed_bodies(30))
        await load.learn_references()
        attack = await _attack(system, operator["operator_port"], random.Random(number))
        began = time.monotonic()
        async with load.going_on(4):
            await attack.send(int(number * WARM_UP_SHARE))
            before = {part.name: part.rss_bytes for part in (*system.gateways, *system.workers)}
            await attack.send(number - int(number * WARM_UP_SHARE))
            outcome.figures["messages/s"] = round(number / (time.monotonic() - began))
        outcome.count(load.ledger, [(began, time.monotonic())])
        await attack.close()
        attack.judge(outcome)
        await aftermath.check(system, load, outcome)
        outcome.num_requests += number
        _judge_memory(system, before, outcome)
    return outcome


def _judge_memory(system: System, before: dict[str, int], outcome: Outcome) -> None:
    for part in (*system.gateways, *system.workers):
        grown = part.rss_bytes - before[part.name]
        outcome.figures[f"{part.name} grew by KB"] = grown // 1024
        # A few arenas of the allocator are no leak.
        is_kept = grown <= max(MAX_GROWTH * before[part.name], _MAX_GROWTH_BYTES)
        outcome.expect(is_kept, f"{part.name} grew by {grown / 1e6:.1f} MB of {before[part.name] / 1e6:.0f}")


async def _attack(system: System, operator_port: object, chance: random.Random) -> _Attack:
    clients = {role: await connect(system.role_url(role), role=role, name="chaos-attack") for role in _ROLES}
    targets = kinds(system.observer.gateways.popitem()[0], system.observer.live_workers(1.0)[0].worker)
    ports = [system.port(system.gateways[0].name), int(str(operator_port))]
    return _Attack(system, clients, targets, ports, chance)


@dataclass
class _Attack:
    """Sends malformed messages, evenly over all kinds. Owns the connections and the counts of answers.

    Attributes:
        ports: Of the gateway: the public one, and the operator's.
    """

    system: System
    clients: dict[Role, DirectClient]
    targets: list[Kind]
    ports: list[int]
    chance: random.Random
    num_requests: int = 0
    statuses: Counter[int] = field(default_factory=Counter)

    async def send(self, number: int) -> None:
        """Send messages; wait where a queue is about to fill up."""
        for start in range(0, number, ROUND_SIZE):
            size = min(ROUND_SIZE, number - start)
            num_http = size // HTTP_EVERY
            for index in range(size - num_http):
                kind = self.targets[index % len(self.targets)]
                self.clients[kind.role].send(kind.subject, damaged(kind, self.chance))
            await asyncio.gather(*(client.flush() for client in self.clients.values()))
            await self._send_http(num_http)
            while sum((await self.system.observer.num_queued()).values()) > MAX_QUEUED:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def close(self) -> None:
        """Close the connections to NATS."""
        for client in self.clients.values():
            await client.close()

    def judge(self, outcome: Outcome) -> None:
        outcome.figures["HTTP answers"] = dict(sorted(self.statuses.items()))
        missing = self.num_requests - self.statuses.total()
        outcome.expect(not missing, f"{missing} of {self.num_requests} broken requests have no answer")
        blamed = {status: count for status, count in self.statuses.items() if status >= 500}
        outcome.expect(not blamed, f"broken requests were answered {blamed}")

    async def _send_http(self, number: int) -> None:
        num_connections = number // FRAMING_EVERY
        await asyncio.gather(*(_send_broken_framing(self._port(), self.chance) for _ in range(num_connections)))
        num_left = number - num_connections
        while num_left:
            size = min(num_left, REQUESTS_PER_CONNECTION)
            self.statuses += await _send_broken_requests(self._port(), size, self.chance)
            self.num_requests += size
            num_left -= size

    def _port(self) -> int:
        return self.ports[self.chance.random() < 0.1]


def _broken_request(chance: random.Random) -> bytes:
    """Return one request with a whole head and a broken target or body; a kept connection can carry many."""
    if chance.random() < 0.2:
        target = chance.choice(_FETCHED).encode() + bytes(chance.choices(_TARGET_BYTES, k=chance.randrange(30)))
        return b"GET %b HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\n\r\n" % (target, API_KEY.encode())
    body = mutated(_VALID, chance)
    if _is_json(body):
        body = _VALID[: chance.randrange(1, len(_VALID))]
    head = [
        f"POST {chance.choice(_POSTED)} HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {API_KEY}",
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


async def _send_broken_requests(port: int, number: int, chance: random.Random) -> Counter[int]:
    payload = b"".join(_broken_request(chance) for _ in range(number))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    statuses: Counter[int] = Counter()
    try:
        writer.write(payload)
        received = b""
        async with asyncio.timeout(_ANSWER_S):
            while statuses.total() < number and (data := await reader.read(1 << 16)):
                received += data
                found = list(_STATUS.finditer(received))
                statuses.update(int(match[1]) for match in found)
                # The rest may hold the beginning of a status line.
                received = received[found[-1].end() :] if found else received[-16:]
    except (OSError, TimeoutError):
        return statuses
    finally:
        writer.transport.abort()
    return statuses


async def _send_broken_framing(port: int, chance: random.Random) -> None:
    """Open a connection, send what is no HTTP, and wait until the gateway has closed it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(OSError, TimeoutError):
        writer.write(mutated(_broken_request(chance), chance))
        writer.write_eof()
        await asyncio.wait_for(reader.read(), _ANSWER_S)
    writer.transport.abort()


def _is_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


_ATTEMPTS = 50
_NOT_DECODABLE = (msgspec.MsgspecError, RecursionError, ValueError)


@dataclass(frozen=True)
class Kind:
    """One kind of message: who may send it, to which subject, and how its receiver decodes it.

    Attributes:
        is_queued: It goes to a JetStream queue, which refuses more when it is full.
    """

    name: str
    role: Role
    subject: str
    valid: bytes
    decode: Callable[[bytes], Any]
    is_queued: bool = False


def kinds(gateway: str, worker: str) -> list[Kind]:
    """Return all kinds that parts take from NATS; `gateway` and `worker` are subject tokens of live ones."""
    sampling = Sampling(max_tokens=4, seed=1)
    interactive = Request(id="x", model=MODEL, text="hello", sampling=sampling, reply=f"hr.tok.{gateway}")
    batch = Request(id="x", model=MODEL, lane="batch", text="hello", sampling=sampling)
    heartbeat = Heartbeat(
        worker="w", model=MODEL, step=1, running=1, waiting=0, waiting_tokens=0, free_blocks=1, total_blocks=2,
        block_size=16, max_model_len=64, max_num_seqs=4, prefill_rate=1.0, decode_rate=1.0, queue_pending=0,
    )  # fmt: skip
    frame = Frame("w", 1, [Delta("x", 0, 0, (1, 2), "ab")])
    call = TokenizeCall(text="hello")
    return [
        Kind("request", "gateway", f"hr.req.{MODEL}.interactive", encode(interactive), decode_request, True),
        Kind("job", "batch", f"hr.req.{MODEL}.batch.default", encode(batch), decode_request, True),
        Kind("cancel", "gateway", f"hr.cancel.{MODEL}", encode(Cancel(("x",), 1)), _decoder(Cancel)),
        Kind("tokenize", "gateway", f"hr.tokenizer.{MODEL}", encode(call), _decoder(TokenizeCall)),
        Kind("gateway heartbeat", "gateway", "hr.gateway.chaos", _gateway_heartbeat(), _decoder(GatewayHeartbeat)),
        Kind("frame", "worker", f"hr.tok.{gateway}", encode(frame), _decoder(Frame)),
        # A probe has no content, so any content is unexpected.
        Kind("probe", "gateway", f"hr.probe.{worker}", b"x", _refuse),
        Kind("heartbeat", "worker", f"hr.worker.{MODEL}.{worker}", encode(heartbeat), _decoder(Heartbeat)),
    ]


def damaged(kind: Kind, chance: random.Random) -> bytes:
    """Return a message of this kind that its receiver cannot decode."""
    for _ in range(_ATTEMPTS):
        payload = mutated(kind.valid, chance)
        try:
            kind.decode(payload)
        except _NOT_DECODABLE:
            return payload
    return b"\xc1"  # a byte that msgpack never uses


def mutated(valid: bytes, chance: random.Random) -> bytes:
    """Return a message that was valid with something cut off, changed, put in, or put in front."""
    place = chance.randrange(len(valid))
    match chance.randrange(7):
        case 0:
            return valid[:place]
        case 1:
            return valid[:place] + bytes([chance.randrange(256)]) + valid[place + 1 :]
        case 2:
            return valid[:place] + chance.randbytes(chance.randrange(1, 40)) + valid[place:]
        case 3:
            return chance.randbytes(chance.randrange(200))
        case 4:
            return b"\x91" * chance.randrange(1, 3000) + valid
        case 5:
            return valid[place:] + valid[:place]
        case _:
            return b"{" + b'"a":[' * chance.randrange(1, 500) + valid


def _decoder(kind: type[msgspec.Struct]) -> Callable[[bytes], Any]:
    return msgspec.msgpack.Decoder(kind).decode


def _refuse(payload: bytes) -> Any:
    raise ValueError(payload)


def _gateway_heartbeat() -> bytes:
    return encode(GatewayHeartbeat(gateway="g", unclaimed=0, unclaimed_tokens=0))
