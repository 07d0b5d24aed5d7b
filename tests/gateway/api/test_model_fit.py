"""Watermarks, advised sampling and kv budgets: what comes to workers, what is refused, and who must not serve it."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.admission.api_keys import create_key, rotate_key
from gateway.admission.auth import CHECK_INTERVAL_S, KeyStore
from gateway.admission.caller import Caller
from gateway.admission.watermark_secrets import (
    Marked,
    list_watermarks,
    make_watermark,
    marked_key,
    remove_watermark,
    rotate_watermark,
)
from gateway.api.chat_answers import AnswerIdentity, usage_answer
from gateway.api.model_fit import ModelReading, check_budget, check_task, check_watermark, with_defaults, with_watermark
from gateway.api.sequences import wire_requests
from gateway.api.usage import UsageTotals
from gateway.batches.line import read_openai_line
from gateway.cache.prompt_cache import cache_key
from gateway.cache.recording import as_cached
from gateway.errors import ApiError
from gateway.fleet.fleet_load import FleetLoad
from gateway.generation import Generation
from gateway.metrics import GatewayMetrics
from shared.errors import BadRequestError
from shared.features import FEATURES, KV_BUDGET, KV_SCORES, WATERMARK
from shared.kv_budget import KvBudget
from shared.messages import Delta, Finish, Request, Usage, decode_request, encode_request
from shared.pooling import Pooling
from shared.sampling import Sampling, SamplingDefaults
from shared.watermark import derived_key
from tests.clock import Clock
from tests.gateway.parsed_bodies import chat, completion, message
from tests.gateway.parsed_bodies import generation as any_generation
from tests.gateway.refusals import refused

SECRET = "5a" * 32
KEY = derived_key(SECRET, "m")


def generation(**fields: Any) -> Generation:
    return any_generation("completion", sampling=Sampling(**fields))


def load(features: tuple[str, ...], some: tuple[str, ...] = (), num_workers: int = 2) -> FleetLoad:
    numbers: dict[str, Any] = dict.fromkeys(FleetLoad.__struct_fields__[:12], 1)
    numbers |= {"model": "m", "num_workers": num_workers}
    return FleetLoad(**numbers, features=frozenset(features), some_features=frozenset(some or features))


def test_all_keys_of_a_tenant_are_marked_from_when_its_secret_is_made(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.json", Clock()
    _, key = create_key(path, tenant="acme")
    _, other = create_key(path, tenant="other")
    store = KeyStore(path, None, GatewayMetrics(), clock)

    def secret_of(shown: str) -> str | None:
        principal = store.authenticate([(b"authorization", b"Bearer " + shown.encode())])
        assert "watermark=" not in repr(principal)
        return principal.watermark

    assert secret_of(key) is None
    assert make_watermark(path, Marked("acme"))
    [secret] = (record.secret for record in list_watermarks(path))
    clock.now += CHECK_INTERVAL_S
    assert (secret_of(key), secret_of(other)) == (secret, None)
    assert (store.watermark_of("acme", ""), store.watermark_of("other", "")) == (secret, None)
    assert not make_watermark(path, Marked("acme"))
    assert remove_watermark(path, Marked("acme"))
    clock.now += CHECK_INTERVAL_S
    assert secret_of(key) is None


def test_key_is_marked_by_its_own_secret_before_and_after_it_is_rotated(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.json", Clock()
    phone, shown = create_key(path, tenant="acme", name="phone")
    _, other = create_key(path, tenant="acme")
    make_watermark(path, Marked("acme"))
    make_watermark(path, marked_key(path, "phone", with_revoked=False))
    rotated, renewed = rotate_key(path, "phone", 60)
    of_tenant, own = (record.secret for record in list_watermarks(path))
    store = KeyStore(path, None, GatewayMetrics(), clock)

    def secrets_of_all() -> list[str | None]:
        clock.now += CHECK_INTERVAL_S
        headers = [[(b"x-api-key", each.encode())] for each in (shown, renewed, other)]
        return [store.authenticate(each).watermark for each in headers]

    assert secrets_of_all() == [own, own, of_tenant]
    assert [store.watermark_of("acme", each) for each in (phone.id, rotated.id, "")] == [own, own, of_tenant]
    rotate_watermark(path, marked_key(path, rotated.id, with_revoked=False))
    earlier, newest = (record for record in list_watermarks(path) if record.key)
    assert (earlier.secret, earlier.rotated) == (own, newest.made)
    assert own not in f"{earlier} {earlier!r}"
    assert secrets_of_all() == [newest.secret, newest.secret, of_tenant]
    remove_watermark(path, marked_key(path, "phone", with_revoked=False))
    assert secrets_of_all() == [of_tenant] * 3


def test_worker_gets_the_key_of_its_model_and_no_log_shows_it() -> None:
    marked = with_watermark(generation(seed=5), SECRET)
    assert marked.sampling.watermark == KEY
    assert marked.sampling.seed == 5
    request = Request(id="r", model="m", text="x", sampling=marked.sampling)
    assert KEY not in repr(request)
    assert SECRET.encode() not in encode_request(request)
    assert with_watermark(generation(), None) == generation()
    pooled = msgspec.structs.replace(generation(), pooling=Pooling())
    assert with_watermark(pooled, SECRET) == pooled


def test_marked_answers_are_not_shared_with_unmarked_ones() -> None:
    keys = {cache_key("t", with_watermark(generation(seed=1), secret), ()).digest for secret in (None, SECRET, KEY)}
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", 0.0), ("temperature", 1e-6), ("top_k", 1), ("top_p", 0.0), ("min_p", 1.0)]
)
async def test_what_leaves_nothing_to_chance_is_refused_with_the_parameter(name: str, value: float) -> None:
    marked = with_watermark(generation(**{name: value}), SECRET)
    error = refused(check_watermark, marked)
    assert (error.param, error.code) == (name, "watermark_needs_chance")
    with pytest.raises(ApiError, match="watermark"):
        await ModelReading().read(marked, msgspec.structs.replace(load(FEATURES), sampling_defaults=None))
    assert re.search(f"'{name}' is .*watermark", error.message)
    check_watermark(generation(**{name: value}))
    body = {"model": "m", "prompt": "x", name: value}
    fields = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
    with pytest.raises(BadRequestError, match="watermark") as caught:
        read_openai_line(fields, "t", "p", watermark=SECRET)
    assert caught.value.code == "watermark_needs_chance"


def test_lines_of_batches_are_marked() -> None:
    fields = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "x"}}
    (request,) = read_openai_line(fields, "t", "p", watermark=SECRET).requests
    assert request.sampling.watermark == KEY
    (request,) = read_openai_line(fields, "t", "p").requests
    assert request.sampling.watermark is None


def test_workers_that_do_not_know_watermarks_are_waited_for() -> None:
    earlier = load(tuple(set(FEATURES) - {WATERMARK}))
    check_task(generation(), earlier)
    with pytest.raises(ApiError, match="they are being updated") as caught:
        check_task(with_watermark(generation(), SECRET), earlier)
    assert (caught.value.status, caught.value.retry_after_s is not None) == (503, True)
    check_task(with_watermark(generation(), SECRET), load(FEATURES))


def test_request_is_written_so_that_an_earlier_worker_refuses_it() -> None:
    """That one ignores unknown fields of msgpack, and refuses those of JSON."""
    request = Request(id="r", model="m", text="x", sampling=Sampling(watermark=KEY, logit_bias={3: 1.0}))
    payload = encode_request(request)
    assert json.loads(payload)["sampling"]["watermark"] == KEY
    assert decode_request(payload) == request
    assert encode_request(Request(id="r", model="m", text="x"))[:1] != b"{"


ADVISED = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.01, repetition_penalty=1.05)


def chosen(generation: Generation, defaults: SamplingDefaults | None = ADVISED) -> tuple[float, ...]:
    sampling = with_defaults(generation, defaults).sampling
    return sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.repetition_penalty


def test_what_is_left_out_is_as_the_model_advises_on_every_endpoint() -> None:
    every = (0.6, 0.95, 20, 0.01, 1.05)
    assert chosen(chat()) == every
    assert chosen(chat(temperature=None, top_p=None)) == every
    assert chosen(completion()) == every
    assert chosen(message()) == every
    assert chosen(message(temperature=1)) == (1.0, 0.95, 20, 0.01, 1.05)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 1.0}, (1.0, 0.95, 20, 0.01, 1.05)),
        ({"top_p": 1, "top_k": -1}, (0.6, 1.0, 0, 0.01, 1.05)),
        ({"top_k": 0, "min_p": 0}, (0.6, 0.95, 0, 0.0, 1.05)),
        ({"repetition_penalty": 1.0}, (0.6, 0.95, 20, 0.01, 1.0)),
        ({"repeat_penalty": 1.2}, (0.6, 0.95, 20, 0.01, 1.2)),
    ],
)
def test_what_is_named_stays(fields: dict[str, float], expected: tuple[float, ...]) -> None:
    assert chosen(chat(**fields)) == expected


@pytest.mark.parametrize("defaults", [None, SamplingDefaults()])
def test_model_that_advises_nothing_leaves_the_request_as_it_is(defaults: SamplingDefaults | None) -> None:
    generation = chat()
    assert with_defaults(generation, defaults) is generation
    assert chosen(generation, defaults) == (1.0, 1.0, 0, 0.0, 1.0)


def test_model_that_advises_the_likeliest_token_makes_equal_requests_equal() -> None:
    greedy = SamplingDefaults(temperature=0.0)
    assert with_defaults(chat(), greedy).sampling == chat(temperature=0).sampling
    assert with_defaults(chat(), greedy).deterministic
    assert with_defaults(chat(seed=7), greedy).sampling.seed == 7
    assert not with_defaults(chat(temperature=1), greedy).deterministic


@pytest.mark.parametrize("fields", [{}, {"logprobs": True}, {"seed": 7}])
def test_model_that_advises_the_likeliest_token_makes_no_more_sequences_than_are_told(fields: dict[str, Any]) -> None:
    """All of a prompt are equal, as where the client asks for a temperature of 0."""
    greedy = SamplingDefaults(temperature=0.0)
    ranked = with_defaults(chat(best_of=5, n=2, **fields), greedy)
    assert (ranked.n, ranked.num_choices, ranked.ranking) == (2, 2, None)
    assert ranked.sampling == chat(n=2, temperature=0, **fields).sampling
    assert with_defaults(chat(best_of=5, n=2, temperature=1, **fields), greedy).n == 5


greedy = partial(completion, temperature=0)


def test_budget_comes_to_the_worker_as_asked() -> None:
    for generation in (
        greedy(kv_budget={"tokens": 512, "policy": "sinks"}),
        chat(kv_budget={"tokens": 512}),
    ):
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
    assert refused(greedy, kv_budget=value).param == param


@pytest.mark.parametrize(
    ("value", "words"),
    [({"tokens": 0}, "64"), ({"tokens": 64, "policy": "window"}, "one of sinks, heavy_hitters, persistence")],
)
def test_refusal_says_what_is_allowed(value: object, words: str) -> None:
    assert words in refused(greedy, kv_budget=value).message


def test_fleet_that_cannot_evict_is_not_asked_to() -> None:
    asked = greedy(kv_budget={"tokens": 512})
    check_budget(asked, load((*FEATURES, KV_BUDGET)))
    check_budget(asked, load((), num_workers=0))
    check_budget(greedy(), load(()))
    error = refused(check_budget, asked, load(FEATURES))
    assert (error.param, error.code) == ("kv_budget", "unsupported_kv_budget")
    scored = greedy(kv_budget={"tokens": 512, "policy": "persistence"})
    check_budget(scored, load((*FEATURES, KV_BUDGET, KV_SCORES)))
    for generation, of_all, of_some in ((asked, FEATURES, KV_BUDGET), (scored, (*FEATURES, KV_BUDGET), KV_SCORES)):
        with pytest.raises(ApiError, match="being updated") as caught:
            check_budget(generation, load(of_all, (*of_all, of_some)))
        assert caught.value.status == 503


def test_answers_of_other_budgets_are_not_repeated() -> None:
    budgets = [None, {"tokens": 512}, {"tokens": 1024}, {"tokens": 512, "policy": "heavy_hitters"}]
    keys = {cache_key("t", greedy(kv_budget=budget), ()) for budget in budgets}
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
        policy: AnswerIdentity.new(greedy(kv_budget={"tokens": 512, "policy": policy}), "of-files").fingerprint
        for policy in ("sinks", "heavy_hitters", "persistence")
    }
    assert fingerprints == {"sinks": "of-files", "heavy_hitters": None, "persistence": None}
