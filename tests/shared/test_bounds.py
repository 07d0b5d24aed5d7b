"""Every number, text and collection that a request can carry has bounds, and both encodings keep them."""

from __future__ import annotations

import importlib
import math
import pkgutil
import re
from typing import Any

import msgspec
import pytest
from msgspec import inspect

import shared
from gateway.api.schemas.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from gateway.pooling.bodies import EmbeddingsBody, RerankBody, ScoreBody
from gpu_worker.consumer.queued_message import RequestEnvelope, UnreadableRequestError, read_request
from shared.kept_results import JobEnd
from shared.messages import GatewayHeartbeat, Heartbeat, Request, decode_request
from shared.tokenizer_calls import DetokenizeCall, TokenizeCall
from tests.bounded_types import Collection, Leaf, Number, illegal_numbers, leaves, legal_numbers

BODIES = [ChatBody, CompletionBody, TokenizeBody, DetokenizeBody, EmbeddingsBody, RerankBody, ScoreBody]
HEARTBEATS = [Heartbeat, GatewayHeartbeat]
MESSAGES = [Request, RequestEnvelope, JobEnd, TokenizeCall, DetokenizeCall, *HEARTBEATS, *BODIES]
# These are as long as the message or the body, which is bounded as a whole.
LONG_TEXTS = re.compile(
    "query|input|documents|text(_1|_2|s)?|content|prediction|prompt|reasoning(_content)?|arguments|tools|variables|"
    "template|suffix|refusal|thinking|(image_)?url|description"
)
LEAVES = leaves(Request)
NUMBERS = [leaf for leaf in LEAVES if isinstance(leaf.type, Number)]
COLLECTIONS = [leaf for leaf in LEAVES if isinstance(leaf.type, Collection)]
MAX_MSGPACK = 2**64 - 1


def request_with(leaf: Leaf, value: Any) -> dict[str, Any]:
    built: Any = value
    for name in reversed(leaf.path[1:]):
        built = [built] if name == "*" and leaf.path[-2:] != ("logit_bias", "*") else {name: built}
    if leaf.path[-1] == "keys":
        built = {"logit_bias": {value: 1.0}}
    elif leaf.path[-2:] == ("logit_bias", "*"):
        built = {"logit_bias": {5: value}}
    if leaf.path[:4] == ("messages", "*", "images", "*"):
        built[0]["images"] = [{"num_parts_before": 0, "index": 0, **each} for each in built[0]["images"]]
    if leaf.path[:2] == ("messages", "*"):
        built = [{"role": "user", "content": "", **built[0]}]
    if leaf.path[:2] == ("media", "*"):
        image = {"digest": bytes(32), "num_bytes": 1, "width": 1, "height": 1, "mime": "image/png"}
        built = [{**image, **built[0]}]
    if leaf.path[0] == "ready":
        built = {"request": "r", "epoch": 0, "worker": "w", **built}
    if leaf.path[0] == "evicted":
        built = list({"block_size": 1, "places": [], "first": 0, **built}.values())
    return {"type": "request", "id": "r", "model": "m", leaf.path[0]: built}


def encoded(message: dict[str, Any], value: Any = None) -> list[bytes]:
    """Return a message that has this value in it in both encodings, as far as these have a form for it."""
    payloads = []
    if not isinstance(value, int) or -(2**63) <= value <= MAX_MSGPACK:
        payloads.append(msgspec.msgpack.encode(message))
    if not isinstance(value, float) or math.isfinite(value):
        payloads.append(msgspec.json.encode(message))
    assert payloads
    return payloads


def name_of(leaf: Leaf) -> str:
    names = [name for name in leaf.path if name not in ("*", "keys")]
    return names[1] if names[0] == "sampling" else names[0]


@pytest.mark.parametrize("struct", MESSAGES)
def test_every_number_text_and_collection_has_bounds(struct: type[msgspec.Struct]) -> None:
    for leaf in leaves(struct):
        described = leaf.type
        if isinstance(described, Number):
            assert described.ge is not None or described.gt is not None, leaf
            assert described.le is not None, leaf
        elif isinstance(described, inspect.StrType):
            is_long = LONG_TEXTS.fullmatch(leaf.path[0] if leaf.path[-1] == "*" else leaf.path[-1])
            assert described.max_length is not None or is_long, leaf
        else:
            assert isinstance(described, Collection)
            assert described.max_length is not None, leaf


def test_field_that_is_left_out_has_a_value_within_its_own_bounds() -> None:
    num_structs = 0
    for module in pkgutil.walk_packages(shared.__path__, "shared."):
        for struct in vars(importlib.import_module(module.name)).values():
            if isinstance(struct, type) and issubclass(struct, msgspec.Struct):
                num_structs += 1
                for field in msgspec.structs.fields(struct):
                    if field.default is not msgspec.NODEFAULT:
                        msgspec.msgpack.decode(msgspec.msgpack.encode(field.default), type=field.type)
    assert num_structs > 50


@pytest.mark.parametrize("leaf", NUMBERS, ids=lambda leaf: ".".join(leaf.path))
def test_number_within_its_bounds_is_read(leaf: Leaf) -> None:
    assert isinstance(leaf.type, Number)
    for value in legal_numbers(leaf.type):
        for payload in encoded(request_with(leaf, value), value):
            decode_request(payload)


@pytest.mark.parametrize("leaf", NUMBERS, ids=lambda leaf: ".".join(leaf.path))
def test_number_outside_its_bounds_is_refused_by_name(leaf: Leaf) -> None:
    assert isinstance(leaf.type, Number)
    for value in illegal_numbers(leaf.type):
        if leaf.path[-1] == "keys" and (isinstance(value, list | dict | float | bool) or value == "1"):
            continue  # no key of a dictionary, or one that means a number
        for payload in encoded(request_with(leaf, value), value):
            with pytest.raises(UnreadableRequestError) as caught:
                read_request(payload)
            assert caught.value.param == name_of(leaf), (value, str(caught.value))


@pytest.mark.parametrize("leaf", COLLECTIONS, ids=lambda leaf: ".".join(leaf.path))
def test_collection_of_one_entry_too_many_is_refused_by_name(leaf: Leaf) -> None:
    assert isinstance(leaf.type, Collection)
    assert leaf.type.max_length is not None
    many = leaf.type.max_length + 1
    entry: Any = (
        {"role": "user", "content": ""} if leaf.path == ("messages",) else "x" if leaf.path[-1] == "stop" else 1
    )
    value = {str(number): 1.0 for number in range(many)} if leaf.path[-1] == "logit_bias" else [entry] * many
    for payload in encoded(request_with(leaf, value), value):
        with pytest.raises(UnreadableRequestError) as caught:
            read_request(payload)
        assert caught.value.param == name_of(leaf)


@pytest.mark.parametrize("request_id", ["a\n", "a\r\nb", "a b", "", "x" * 65, "a.b", "é", "../a", "\x00"])
def test_id_that_could_break_a_subject_or_a_log_is_refused(request_id: str) -> None:
    message = {"type": "request", "id": request_id, "model": "m", "reply": "hr.tok.g", "version": "x"}
    for payload in encoded(message):
        with pytest.raises(UnreadableRequestError) as caught:
            read_request(payload)
        assert caught.value.envelope is None


def test_envelope_of_an_unreadable_request_can_be_answered() -> None:
    message = {"type": "request", "id": "r", "model": "m", "reply": "hr.tok.g", "epoch": 10**30}
    with pytest.raises(UnreadableRequestError) as caught:
        read_request(msgspec.json.encode(message))
    # An epoch that no answer can carry would make the frame of all neighbours impossible to encode: 0 stands for it.
    envelope = caught.value.envelope
    assert envelope is not None
    assert (envelope.id, envelope.epoch, envelope.reply) == ("r", 0, "hr.tok.g")


BEAT = dict.fromkeys(Heartbeat.__struct_fields__, 1) | {
    "worker": "w",
    "model": "m",
    "draining": False,
    "is_ending": False,
    "knows_queue": True,
    "revision": "",
    "chat_format": "",
    "tasks": ["generate"],
    "features": ["resumed"],
    "metrics": None,
    "sampling_defaults": None,
    "prefixes": None,
    "roles": None,
    "adapters": [],
    "services": {},
    "resident_adapters": b"",
}
GATEWAY_BEAT = {"gateway": "g", "unclaimed": 1, "unclaimed_tokens": 1, "active": 1}


@pytest.mark.parametrize(("struct", "fields"), [(Heartbeat, BEAT), (GatewayHeartbeat, GATEWAY_BEAT)])
def test_heartbeat_with_a_field_outside_its_bounds_is_refused(
    struct: type[msgspec.Struct], fields: dict[str, object]
) -> None:
    tag = struct.__struct_config__.tag
    decoder = msgspec.msgpack.Decoder(struct)
    decoder.decode(msgspec.msgpack.encode({"type": tag, **fields}))
    found = [
        leaf for leaf in leaves(struct) if leaf.path[0] not in ("metrics", "sampling_defaults", "prefixes", "roles")
    ]
    names = [leaf for leaf in found if not isinstance(leaf.type, Number)]
    illegal = [(leaf.path[0], value) for leaf in names for value in ("x" * 257, 1)]
    illegal += [(name, value) for name in {"worker", "model", "gateway"} & fields.keys() for value in ("", "a\x00b")]
    illegal += [
        (leaf.path[0], value)
        for leaf in found
        if isinstance(leaf.type, Number)
        for value in illegal_numbers(leaf.type)
        if not isinstance(value, int) or -(2**63) <= value <= MAX_MSGPACK
    ]
    for name, value in illegal:
        payload = msgspec.msgpack.encode({"type": tag, **fields, name: value})
        with pytest.raises(msgspec.DecodeError, match=name):
            decoder.decode(payload)


def test_heartbeat_of_more_waiting_requests_than_a_queue_can_hold_is_refused() -> None:
    for waiting in (2**62, -1):
        with pytest.raises(msgspec.ValidationError, match="waiting"):
            msgspec.convert({"type": "heartbeat", **BEAT, "waiting": waiting}, Heartbeat)
