from __future__ import annotations

import difflib
import re

import msgspec
import pytest

from shared.messages import Cancel, Delta, Finish, Frame, Request, TokenLogprob, Usage, decode_request, encode
from shared.request_fields import UnknownFieldError
from shared.sampling import Sampling

CALLING = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "name": "f", "arguments": "", "names": 1}]}


def test_request_survives_both_encodings() -> None:
    request = Request(
        id="r-1",
        model="m",
        text="é\x00",
        reply="hr.tok.g",
        emitted=(1, 2),
        sampling=Sampling(stop=("\n",), logit_bias={5: -1.0}, seed=-(2**62)),
    )
    assert decode_request(encode(request)) == request
    assert decode_request(msgspec.json.encode(request)) == request


def test_frame_survives_and_is_small() -> None:
    logprob = TokenLogprob(1, "a", b"a", -0.5, (TokenLogprob(2, "b", b"b", -1.5),))
    delta = Delta("r", 1, 7, (1,), "a", Finish("stop", Usage(3, 8, 2)), (logprob,), (None, logprob), 3)
    frame = Frame("w", 9, [delta])
    assert msgspec.msgpack.decode(encode(frame), type=Frame) == frame
    plain = Frame("w", 9, [Delta("x" * 32, 0, 700, (4000,), " token")] * 64)
    assert len(encode(plain)) / 64 < 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"invented": 1}, "the request has no field 'invented'"),
        ({"prioritty": 1}, "the request has no field 'prioritty'; did you mean 'priority'?"),
        ({"max_tokens": 1}, """'max_tokens' belongs into "sampling": {"max_tokens": ...}"""),
        ({"sampling": {"max_token": 1}}, "sampling has no field 'max_token'; did you mean 'max_tokens'?"),
        ({"sampling": {"grammar": {"kind": "regex", "source": "a", "stict": True}}}, "did you mean 'strict'?"),
        ({"messages": [{"role": "user", "content": "x", "contents": 1}]}, "messages has no field 'contents'; did you"),
        ({"chat": {"tool": "x"}}, "chat has no field 'tool'; did you mean 'tools'?"),
        ({"pooling": {"dimension": 1}}, "did you mean 'dimensions'?"),
        ({"cache_hints": {"dropped": True}}, "cache_hints has no field 'dropped'; did you mean 'drop'?"),
        ({"messages": [CALLING]}, "tool_calls has no field 'names'; did you mean 'name'?"),
        ({"sampling": {"type": "request"}}, "sampling has no field 'type'"),
    ],
)
def test_unknown_fields_of_json_that_people_write_are_refused(change: dict[str, object], message: str) -> None:
    fields = {"type": "request", "id": "r", "model": "m", "text": "x"}
    assert decode_request(msgspec.json.encode(fields)).text == "x"
    with pytest.raises(UnknownFieldError, match=re.escape(message)):
        decode_request(msgspec.json.encode(fields | change))
    # The parts of a fleet, which may be of different versions, speak msgpack.
    assert decode_request(msgspec.msgpack.encode(fields | change)).id == "r"


def test_unknown_field_with_a_name_of_megabytes_costs_no_search_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []

    def search(word: str, known: object, count: int) -> list[str]:
        searched.append(word)
        return []

    monkeypatch.setattr(difflib, "get_close_matches", search)
    with pytest.raises(UnknownFieldError):
        decode_request(msgspec.json.encode({"type": "request", "id": "r", "model": "m", "x" * 1_000_000: 1}))
    assert searched == ["x" * 64]


def test_unknown_fields_of_a_newer_peer_are_ignored() -> None:
    payload = msgspec.msgpack.encode({"type": "request", "id": "r", "model": "m", "text": "x", "invented": {"a": 1}})
    assert decode_request(payload).text == "x"
    longer = [*msgspec.msgpack.decode(encode(Delta("r", 0, 0))), "new", "fields"]
    assert msgspec.convert(longer, Delta) == Delta("r", 0, 0)


def test_cancellation_is_understood_by_the_version_before_and_that_of_its_gateways_here() -> None:
    class Before(msgspec.Struct, array_like=True, tag="cancel"):
        ids: tuple[str, ...]
        epoch: int | None = None
        version: int = 1
        keep: str | None = None

    sent = encode(Cancel(("r",), 2, keep="w", tenant="acme"))
    assert msgspec.msgpack.decode(sent, type=Before) == Before(("r",), 2, keep="w")
    assert msgspec.msgpack.decode(encode(Before(("r",), 2)), type=Cancel) == Cancel(("r",), 2)


@pytest.mark.parametrize(
    "change",
    [
        {"id": "a b"},
        {"id": "x" * 65},
        {"epoch": -1},
        {"sampling": {"temperature": -1}},
        {"sampling": {"stop": [""]}},
        {"sampling": {"stop": ["x"] * 17}},
        {"sampling": {"logprobs": 21}},
        {"token_ids": [-1]},
        {"model": ""},
    ],
)
def test_value_out_of_range_is_refused_naming_the_field(change: dict[str, object]) -> None:
    payload = msgspec.json.encode({"type": "request", "id": "r", "model": "m", "text": "x"} | change)
    with pytest.raises(msgspec.ValidationError, match=next(iter(change))):
        decode_request(payload)
