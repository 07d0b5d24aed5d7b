"""Budgets of KV cache, from the body to the queue and back in `usage`."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gateway.admission.caller import Caller
from gateway.api.chat_answers import AnswerIdentity, usage_answer
from gateway.api.model_abilities import check_budget
from gateway.api.schemas.parsing import parse_chat, parse_completion
from gateway.api.sequences import wire_requests
from gateway.api.usage import UsageTotals
from gateway.cache.prompt_cache import cache_key
from gateway.cache.recording import as_cached
from gateway.errors import ApiError
from gateway.fleet.fleet_load import FleetLoad
from gateway.generation import Generation
from shared.features import FEATURES, KV_BUDGET, KV_SCORES
from shared.kv_budget import KvBudget
from shared.messages import Delta, Finish, Request, Usage, decode_request, encode_request
from tests.gateway.refusals import refused


def completion(**fields: Any) -> Generation:
    return parse_completion(json.dumps({"model": "m", "prompt": "x", "temperature": 0, **fields}).encode())


def load(features: tuple[str, ...], some: tuple[str, ...] = (), num_workers: int = 2) -> FleetLoad:
    numbers: dict[str, Any] = {
        name: 1 for name in FleetLoad.__struct_fields__[:12] if name not in ("model", "num_workers")
    }
    load = FleetLoad(model="m", num_workers=num_workers, **numbers, features=frozenset(features))
    return msgspec.structs.replace(load, some_features=frozenset(some or features))


def test_budget_comes_to_the_worker_as_asked() -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}], "kv_budget": {"tokens": 512}}
    for generation in (completion(kv_budget={"tokens": 512, "policy": "sinks"}), parse_chat(json.dumps(chat).encode())):
        (request,) = wire_requests(generation, Caller("", "t", [], b""), "hr.tok.g", None)
        assert request.kv_budget == KvBudget(512)
        assert decode_request(encode_request(request)) == request


def test_workers_of_earlier_versions_refuse_a_budget_and_read_all_else() -> None:
    # They refuse unknown fields of JSON, and ignore those of msgpack.
    assert encode_request(Request(id="a", model="m", text="x", kv_budget=KvBudget(512))).startswith(b"{")
    assert b"kv_budget" not in encode_request(Request(id="a", model="m", text="x"))


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({"tokens": 0}, "kv_budget.tokens"),
        ({"tokens": 10**9}, "kv_budget.tokens"),
        ({"tokens": 512, "policy": "best"}, "kv_budget.policy"),
        ({"tokens": 512, "sinks": 4}, "kv_budget.sinks"),
        ({}, "kv_budget.tokens"),
        (512, "kv_budget"),
    ],
)
def test_wrong_budget_is_a_400_that_names_it(value: object, param: str) -> None:
    assert refused(completion, kv_budget=value).param == param


@pytest.mark.parametrize(
    ("value", "words"),
    [({"tokens": 0}, "64"), ({"tokens": 64, "policy": "window"}, "one of sinks, heavy_hitters, persistence")],
)
def test_refusal_says_what_is_allowed(value: object, words: str) -> None:
    with pytest.raises(ApiError, match=words):
        completion(kv_budget=value)


def test_fleet_that_cannot_evict_is_not_asked_to() -> None:
    asked = completion(kv_budget={"tokens": 512})
    check_budget(asked, load((*FEATURES, KV_BUDGET)))
    check_budget(asked, load((), num_workers=0))
    check_budget(completion(), load(()))
    with pytest.raises(ApiError, match="cannot evict tokens") as caught:
        check_budget(asked, load(FEATURES))
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "kv_budget", "unsupported_kv_budget")
    scored = completion(kv_budget={"tokens": 512, "policy": "persistence"})
    check_budget(scored, load((*FEATURES, KV_BUDGET, KV_SCORES)))
    for generation, of_all, of_some in ((asked, FEATURES, KV_BUDGET), (scored, (*FEATURES, KV_BUDGET), KV_SCORES)):
        with pytest.raises(ApiError, match="being updated") as caught:
            check_budget(generation, load(of_all, (*of_all, of_some)))
        assert caught.value.status == 503


def test_answers_of_other_budgets_are_not_repeated() -> None:
    budgets = [None, {"tokens": 512}, {"tokens": 1024}, {"tokens": 512, "policy": "heavy_hitters"}]
    keys = {cache_key("t", completion(kv_budget=budget), ()) for budget in budgets}
    assert len(keys) == 4


def test_usage_says_that_tokens_were_evicted() -> None:
    totals = UsageTotals(1)
    totals.add(0, Usage(10, 90, evicted_tokens=32, evicted_by="persistence"))
    answer = msgspec.to_builtins(usage_answer(totals))
    assert (answer["evicted_tokens"], answer["evicted_by"]) == (32, "persistence")
    of_earlier_worker = UsageTotals(1)
    of_earlier_worker.add(0, Usage(10, 90, evicted_tokens=32))
    assert msgspec.to_builtins(usage_answer(of_earlier_worker))["evicted_by"] == "sinks"
    plain = UsageTotals(1)
    plain.add(0, Usage(10, 90))
    assert not {"evicted_tokens", "evicted_by"} & set(msgspec.to_builtins(usage_answer(plain)))
    repeated = as_cached(Delta("a", 0, 90, finish=Finish("length", Usage(10, 90, evicted_tokens=32))))
    assert repeated.finish is not None
    assert repeated.finish.usage == Usage(10, 90, 10, evicted_tokens=32)


def test_answer_that_may_differ_when_it_is_generated_again_has_no_fingerprint() -> None:
    """Which claims that an equal request gets an equal answer."""
    fingerprints = {
        policy: AnswerIdentity.new(completion(kv_budget={"tokens": 512, "policy": policy}), "of-files").fingerprint
        for policy in ("sinks", "heavy_hitters", "persistence")
    }
    assert fingerprints == {"sinks": "of-files", "heavy_hitters": None, "persistence": None}
