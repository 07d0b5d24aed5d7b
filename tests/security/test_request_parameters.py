"""Incident class: a number out of range ends the engine (unbounded n, max_tokens, logprobs, top_k; NaN; 2**63).

Published straight to a real worker, in both encodings: each such request is answered by name, and a stream beside them
gets the tokens that it gets alone.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterator

import msgspec
import pytest

from shared.messages import Request, encode
from shared.sampling import Sampling
from tests.bounded_types import Number, illegal_numbers, leaves, legal_numbers
from tests.gpu_worker.consumer.harness import MakeWorker, RunningWorker, TestGateway
from tests.shared.test_bounds import encoded, name_of, request_with

# What these say is not about the answer, or ends it before it begins.
ELSEWHERE = {"epoch", "version", "deadline", "created", "probation", "messages", "evicted"}
NUMBERS = [leaf for leaf in leaves(Request) if isinstance(leaf.type, Number)]
# What a model does not have is within the bounds of messages, and refused at intake.
MODELS_OWN = (
    *("dimensions", "media", "allowed_token_ids", "logit_bias", "logprob_token_ids", "stop_token_ids", "kv_budget"),
)
VICTIM = Sampling(max_tokens=300, temperature=0.8, seed=11, ignore_eos=True)


@pytest.fixture
async def real_worker(make_worker: MakeWorker) -> RunningWorker:
    """A worker with the demo model, no simulation."""
    return await make_worker(simulate=None, num_blocks=None, kv_cache_bytes=64 << 20, max_num_seqs=32, num_threads=1)


def hostile(gateway: TestGateway) -> Iterator[tuple[str, str, bytes]]:
    """Yield the id, the field at fault and the payload of each request that must be refused."""
    number = 0
    for leaf in NUMBERS:
        assert isinstance(leaf.type, Number)
        for value in illegal_numbers(leaf.type):
            if leaf.path[-1] == "keys" and (isinstance(value, list | dict | float | bool) or value == "1"):
                continue
            number += 1
            message = {**request_with(leaf, value), "id": f"h{number}", "model": gateway.model, "reply": gateway.reply}
            for payload in encoded({"text": "x", **message} if "token_ids" not in message else message, value):
                yield message["id"], name_of(leaf), payload


def extreme(gateway: TestGateway) -> Iterator[Request]:
    """Yield a request with each parameter at each of its bounds."""
    for leaf in NUMBERS:
        if leaf.path[0] in ELSEWHERE or leaf.path == ("token_ids", "*") or leaf.path == ("emitted", "*"):
            continue
        assert isinstance(leaf.type, Number)
        for value in legal_numbers(leaf.type):
            fields = request_with(leaf, value)
            sampling = {"max_tokens": 4, "temperature": 0.7, **fields.pop("sampling", {})}
            sampling["max_tokens"] = min(sampling["max_tokens"], 50)
            read = msgspec.convert(sampling, Sampling, str_keys=False)
            changed = {name: entry for name, entry in fields.items() if name not in ("type", "id", "model")}
            yield gateway.request(sampling=read, **changed)


async def test_victim_gets_its_tokens_whatever_is_published_beside_it(
    real_worker: RunningWorker, gateway: TestGateway
) -> None:
    alone = await gateway.ask("def f(", sampling=VICTIM)
    victim = await gateway.publish(gateway.request("def f(", sampling=VICTIM))
    await victim.wait_for_tokens(1)
    refused = list(hostile(gateway))
    for _, _, payload in refused:
        await gateway.publish_raw(payload)
    served = [await gateway.publish(request) for request in extreme(gateway)]
    for request_id, param, _ in refused:
        # An epoch that no message can carry cannot be answered either.
        if param != "epoch":
            answer = await gateway.answer(request_id).wait()
            assert (answer.finish.reason, answer.finish.error_param) == ("failed", param)
    for answer in served:
        finish = (await answer.wait()).finish
        assert finish.reason in ("stop", "length") or finish.error_param in MODELS_OWN
    assert (await victim.wait(30.0)).token_ids == alone.token_ids
    assert not real_worker.worker.has_failed.is_set()


@pytest.mark.parametrize("deadline", [math.nan, math.inf, -math.inf])
async def test_deadline_that_is_no_number_does_not_switch_expiry_off(
    worker: RunningWorker, gateway: TestGateway, deadline: float
) -> None:
    """A heap with a NaN in it finds none of its entries any more."""
    for _ in range(3):
        await gateway.publish_raw(encode(gateway.request(deadline=deadline, sampling=VICTIM)))
    endless = Sampling(max_tokens=1500, ignore_eos=True)
    answer = await gateway.ask(deadline=time.time() + 0.3, sampling=endless)
    assert answer.finish.reason == "expired"


async def test_epoch_of_thirty_digits_does_not_stop_the_frames_of_others(
    worker: RunningWorker, gateway: TestGateway
) -> None:
    """No frame can carry it, so all requests in the frame would wait for ever."""
    fields = {"type": "request", "id": "h", "model": gateway.model, "reply": gateway.reply, "epoch": 10**30}
    await gateway.publish_raw(json.dumps(fields).encode())
    assert (await gateway.ask()).finish.reason == "length"
    await asyncio.wait_for(gateway.wait_until_acknowledged(), 5)
