"""Malformed messages: valid ones of each kind, damaged until they are valid no more."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from ops.chaos.system import MODEL
from shared.messages import Cancel, Delta, Frame, GatewayHeartbeat, Heartbeat, Request, decode_request, encode
from shared.nats_connection import Role
from shared.sampling import Sampling
from shared.tokenizer_calls import TokenizeCall

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
