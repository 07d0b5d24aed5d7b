"""Whatever is put on a worker's subjects: it answers the next honest request."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.consumer.queued_message import UnreadableRequestError, read_request
from gpu_worker.text.output_text import OutputText
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.messages import encode
from shared.sampling import Sampling
from shared.subjects import cancel_subject, tokenizer_subject
from tests.gpu_worker.consumer.harness import RunningWorker, TestGateway

_FIELDS = ["id", "model", "reply", "epoch", "sampling", "text", "messages", "token_ids", "emitted", "deadline", "lane"]
_leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20)
)
_values = st.recursive(
    _leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
_structures = st.dictionaries(st.sampled_from(_FIELDS), _values).map(lambda fields: {"type": "request"} | fields)


_payloads = st.binary(max_size=200) | st.builds(msgspec.msgpack.encode, _structures | _values)


@settings(max_examples=60)
@given(payload=_payloads)
def test_any_payload_is_a_request_or_unreadable(payload: bytes) -> None:
    _check_payload(payload)


@pytest.mark.slow
@settings(max_examples=1000)
@given(payload=_payloads)
def test_any_of_many_payloads_is_a_request_or_unreadable(payload: bytes) -> None:
    _check_payload(payload)


def _check_payload(payload: bytes) -> None:
    try:
        request = read_request(payload)
    except UnreadableRequestError as error:
        named = (str(error), error.param)
    else:
        named = (request.id, request.model)
    assert all(named)


def _hostile_requests(gateway: TestGateway) -> list[bytes]:
    honest: dict[str, Any] = {"type": "request", "id": "h", "model": gateway.model, "reply": gateway.reply, "text": "x"}
    changes: list[dict[str, Any]] = [
        {"deadline": math.nan},
        {"deadline": math.inf},
        {"deadline": -1e308},
        {"deadline": 1e308},
        {"created": math.nan},
        {"epoch": 2**63},
        {"epoch": -1},
        {"priority": 10**6},
        {"emitted": [2**64 - 1]},
        {"token_ids": [[]], "text": None},
        {"sampling": {"logit_bias": {str(2**62): 1.0}}},
        {"sampling": {"temperature": math.nan}},
        {"sampling": {"max_tokens": 2**62}},
        {"sampling": {"stop": [""]}},
        {"sampling": {"seed": 2**64 - 1}},
        {"reply": "$JS.API.STREAM.DELETE.HR_INTERACTIVE"},
        {"reply": "hr.tok.x y\r\nPUB z 1\r\nz"},
        {"reply": "hr.tok.>"},
        {"id": "a.b"},
        {"id": ""},
        {"tenant": "\x00"},
        {"text": "\x00" * 100},
        {"messages": [{"role": "user", "content": "x"}] * 1000, "text": None},
        {"messages": [{"role": {}, "content": 1}], "text": None},
        {"version": 99},
    ]
    payloads = [msgspec.msgpack.encode({**honest, "id": f"h{index}", **change}) for index, change in enumerate(changes)]
    deep = b"\x91" * 100_000 + b"\x01"
    return [
        *payloads,
        b"",
        b"\xff",
        b"{",
        deep,
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"\xdf\xff\xff\xff\xff",
        b"\x00" * 9999,
    ]


async def test_worker_answers_after_hostile_requests(worker: RunningWorker, gateway: TestGateway) -> None:
    payloads = _hostile_requests(gateway)
    for payload in payloads:
        await gateway.publish_raw(payload)
    assert (await gateway.ask()).finish.reason == "length"
    await gateway.nats.flush()
    for key, answer in gateway.answers.items():
        if not answer.finished.is_set():
            await gateway.cancel(key[0])
    await worker.wait_for_heartbeat(lambda heartbeat: heartbeat.running == heartbeat.waiting == 0)
    await gateway.wait_until_acknowledged()


async def test_unreadable_request_is_answered_when_its_sender_can_be_read(
    worker: RunningWorker, gateway: TestGateway
) -> None:
    fields = {"type": "request", "id": "r1", "epoch": 3, "reply": gateway.reply, "model": 7}
    await gateway.publish_raw(msgspec.msgpack.encode(fields))
    answer = await gateway.answer("r1", 3).wait()
    assert (answer.finish.reason, answer.finish.error_param) == ("failed", "model")
    fields |= {"id": "r2", "model": gateway.model, "sampling": {"top_p": 7.0}}
    await gateway.publish_raw(msgspec.msgpack.encode(fields))
    assert (await gateway.answer("r2", 3).wait()).finish.error_param == "top_p"
    for number, epoch in enumerate((-1, 2**31, "x")):
        request_id = f"r{3 + number}"
        await gateway.publish_raw(msgspec.msgpack.encode(fields | {"id": request_id, "epoch": epoch}))
        assert (await gateway.answer(request_id, 0).wait()).finish.error_param


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x91" * 50_000, encode(msgspec.Struct()), b"x" * 5000])
async def test_hostile_cancellation_and_tokenizer_call_do_no_harm(
    worker: RunningWorker, gateway: TestGateway, payload: bytes
) -> None:
    await gateway.nats.publish(cancel_subject(gateway.model), payload)
    await gateway.nats.publish("hr.gateway.x", payload)
    reply = await gateway.nats.request(tokenizer_subject(gateway.model), payload, timeout=5)
    assert msgspec.msgpack.decode(reply.data)["error"]
    assert (await gateway.ask()).finish.reason == "length"


@pytest.mark.parametrize("fields", [{"text": "x", "emitted": (65,) * 100_000}, {"token_ids": (65,) * 100_000}])
@pytest.mark.parametrize("sampling", [Sampling(max_tokens=4), Sampling(max_tokens=4, stop=("y" * 1024, "z" * 1024))])
async def test_tokens_beyond_the_context_are_not_turned_into_text(
    worker: RunningWorker,
    gateway: TestGateway,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    sampling: Sampling,
) -> None:
    num_tokens: list[int] = []
    replay, decode = OutputText.replay, ModelTokenizer.decode

    def counting_replay(self: OutputText, token_ids: Collection[int]) -> None:
        num_tokens.append(len(token_ids))
        replay(self, token_ids)

    def counting_decode(self: ModelTokenizer, token_ids: Sequence[int]) -> str:
        num_tokens.append(len(token_ids))
        return decode(self, token_ids)

    monkeypatch.setattr(OutputText, "replay", counting_replay)
    monkeypatch.setattr(ModelTokenizer, "decode", counting_decode)
    answer = await gateway.ask(**{"text": None, **fields}, echo=True, sampling=sampling)
    assert answer.finish.reason == ("length" if "emitted" in fields else "failed")
    assert max(num_tokens, default=0) < 100
