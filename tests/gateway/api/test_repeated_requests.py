"""Requests that need not be read once more: what they are known by, and what makes them unknown."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from gateway.api.repeated_requests import MAX_BODY_BYTES, MAX_TOTAL_BYTES, RepeatedRequests
from gateway.cache.prompt_cache import PromptCache, cache_key
from gateway.fleet.fleet import Fleet
from gateway.fleet.fleet_load import FleetLoad, OwnRequests
from gateway.fleet.liveness import FleetLimits
from gateway.generation import Generation, Prompt
from shared.messages import Delta, Finish, Usage
from shared.sampling import Sampling, SamplingDefaults
from tests.gateway.api.test_generation_starter import BEAT

BODY = b'{"model": "m", "prompt": "def", "temperature": 0}'
GENERATION = Generation("completion", "m", (Prompt(7, text="def"),), 1, Sampling(temperature=0.0), deterministic=True)
ANSWER = [Delta("", 0, 0, (5,), "answer", Finish("stop", Usage(7, 1, 0)))]


class Keeping:
    """Takes what is written to Redis for kept."""

    async def set(self, key: str, value: bytes, ttl_s: float) -> bool:
        return True


class Gateway:
    """The requests that one process knows, a fleet of one worker, and a clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.fleet = Fleet("gw", FleetLimits(), OwnRequests(lambda model: (0, 0), dict))
        self.hear()
        self.cache = PromptCache(cast("Any", Keeping()), 60, 10_000, 1 << 20, clock=lambda: self.now)
        self.repeated = RepeatedRequests(self.fleet, self.cache)

    def hear(self, **changes: object) -> None:
        self.fleet.note_heartbeat(msgspec.structs.replace(BEAT, **changes), 0.0)

    @property
    def load(self) -> FleetLoad:
        load = self.fleet.reported_load("m")
        assert load is not None
        return load

    async def answer(self, body: bytes = BODY, load: FleetLoad | None = None, answer: list[Delta] = ANSWER) -> None:
        """Answer a request of tenant `t` to `chat` from the cache, which has had the answer for 40 s."""
        load = load or self.load
        key = cache_key("t", GENERATION, load.revisions)
        await self.cache.put(key, [answer])
        self.now += 40
        self.repeated.keep("chat", "t", body, GENERATION, key, load)
        self.now -= 40

    def text(self, endpoint: str = "chat", tenant: str = "t", body: bytes = BODY) -> str | None:
        found = self.repeated.find(endpoint, tenant, body)
        if found is None:
            return None
        assert found.generation is GENERATION
        [[content, end]] = found.sequences
        assert (content.finish, end.text, end.finish) == (None, "", Finish("stop", Usage(7, 1, 7)))
        assert end.seq == len(content.token_ids)
        return content.text


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


async def test_request_is_known_by_its_bytes_its_endpoint_and_its_tenant(gateway: Gateway) -> None:
    assert gateway.text() is None
    await gateway.answer()
    assert (gateway.text(), gateway.text()) == ("answer", "answer")
    assert gateway.text(endpoint="completion") is None
    assert gateway.text(tenant="u") is None
    assert gateway.text(body=BODY + b" ") is None


@pytest.mark.parametrize(
    "changes",
    [
        {"revision": "b"},
        {"chat_format": "hermes"},
        {"sampling_defaults": SamplingDefaults(top_k=5)},
        {"tasks": ("embed",)},
        {"max_model_len": 16},
        {"max_prompt_characters": 2},
        {"draining": True},
    ],
)
async def test_request_is_unknown_once_its_model_reads_or_refuses_otherwise(
    changes: dict[str, object], gateway: Gateway
) -> None:
    await gateway.answer()
    gateway.hear(step=2, running=3)
    assert gateway.text() == "answer"
    gateway.hear(**changes)
    assert gateway.text() is None
    gateway.hear()
    assert gateway.text() is None
    await gateway.answer()
    assert gateway.text() == "answer"


async def test_request_is_unknown_if_its_model_changed_while_it_was_read(gateway: Gateway) -> None:
    before = gateway.load
    gateway.hear(chat_format="hermes")
    await gateway.answer(load=before)
    assert gateway.text() is None


async def test_request_is_unknown_when_the_time_of_its_answer_is_over(gateway: Gateway) -> None:
    await gateway.answer()
    gateway.now += 90
    assert gateway.text() is None


async def test_requests_are_forgotten_in_the_order_of_their_last_use(gateway: Gateway) -> None:
    bodies = [b"%d" % number + b" " * 8000 for number in range(200)]
    await gateway.answer(bodies[0])
    for body in bodies[1:]:
        await gateway.answer(body)
        assert gateway.text(body=bodies[0]) == "answer"
    known = [body for body in bodies if gateway.text(body=body) is not None]
    assert known == [bodies[0], *bodies[-len(known) + 1 :]]
    assert MAX_TOTAL_BYTES * 0.9 < sum(2 * len(body) + 2000 for body in known) <= MAX_TOTAL_BYTES


async def test_long_body_is_not_kept(gateway: Gateway) -> None:
    for size, text in ((MAX_BODY_BYTES, "answer"), (MAX_BODY_BYTES + 1, None)):
        body = b" " * size
        await gateway.answer(body)
        assert gateway.text(body=body) == text


async def test_request_is_unknown_once_its_answer_has_made_room_for_others(gateway: Gateway) -> None:
    await gateway.answer()
    assert gateway.text() == "answer"
    for number in range(200):
        other = msgspec.structs.replace(GENERATION, prompts=(Prompt(7, text=str(number)),))
        long = [msgspec.structs.replace(ANSWER[0], text="x" * 9000)]
        await gateway.cache.put(cache_key("t", other, gateway.load.revisions), [long])
    assert gateway.text() is None


async def test_request_that_is_answered_again_and_again_counts_once(gateway: Gateway) -> None:
    body = b" " * MAX_BODY_BYTES
    for _ in range(MAX_TOTAL_BYTES // len(body)):
        await gateway.answer(body)
    assert gateway.text(body=body) == "answer"
