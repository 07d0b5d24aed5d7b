"""Tenants whose answers are marked: the secret, the key for workers, what is refused, and who must not serve it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.admission.api_keys import create_key, rotate_key
from gateway.admission.auth import CHECK_INTERVAL_S, KeyStore
from gateway.admission.watermark_secrets import (
    Marked,
    list_watermarks,
    make_watermark,
    marked_key,
    remove_watermark,
    rotate_watermark,
)
from gateway.api.model_abilities import check_task, check_watermark, with_watermark
from gateway.batches.line import read_openai_line
from gateway.cache.prompt_cache import cache_key
from gateway.errors import ApiError
from gateway.fleet.fleet_load import FleetLoad
from gateway.generation import Generation, Prompt
from gateway.metrics import GatewayMetrics
from shared.errors import BadRequestError
from shared.features import FEATURES, WATERMARK
from shared.messages import Request, decode_request, encode_request
from shared.pooling import Pooling
from shared.sampling import Sampling
from shared.watermark import derived_key
from tests.clock import Clock

SECRET = "5a" * 32
KEY = derived_key(SECRET, "m")


def generation(**fields: Any) -> Generation:
    return Generation("completion", "m", (Prompt(3, text="x"),), 1, Sampling(**fields), deterministic=False)


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
def test_what_leaves_nothing_to_chance_is_refused_with_the_parameter(name: str, value: float) -> None:
    with pytest.raises(ApiError, match=f"'{name}' is .*watermark") as caught:
        check_watermark(with_watermark(generation(**{name: value}), SECRET))
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, name, "watermark_needs_chance")
    check_watermark(generation(**{name: value}))
    body = {"model": "m", "prompt": "x", name: value}
    fields = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
    with pytest.raises(BadRequestError, match="watermark"):
        read_openai_line(fields, "t", "p", watermark=SECRET)


def test_lines_of_batches_are_marked() -> None:
    fields = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "x"}}
    (request,) = read_openai_line(fields, "t", "p", watermark=SECRET).requests
    assert request.sampling.watermark == KEY
    (request,) = read_openai_line(fields, "t", "p").requests
    assert request.sampling.watermark is None


def test_workers_that_do_not_know_watermarks_are_waited_for() -> None:
    numbers = {name: 1 for name in FleetLoad.__struct_fields__[:12] if name != "model"}
    load = FleetLoad(model="m", **numbers, features=frozenset(FEATURES) - {WATERMARK})
    check_task(generation(), load)
    with pytest.raises(ApiError, match="they are being updated") as caught:
        check_task(with_watermark(generation(), SECRET), load)
    assert (caught.value.status, caught.value.retry_after_s is not None) == (503, True)
    check_task(with_watermark(generation(), SECRET), msgspec.structs.replace(load, features=frozenset(FEATURES)))


def test_request_is_written_so_that_an_earlier_worker_refuses_it() -> None:
    """That one ignores unknown fields of msgpack, and refuses those of JSON."""
    request = Request(id="r", model="m", text="x", sampling=Sampling(watermark=KEY, logit_bias={3: 1.0}))
    payload = encode_request(request)
    assert json.loads(payload)["sampling"]["watermark"] == KEY
    assert decode_request(payload) == request
    assert encode_request(Request(id="r", model="m", text="x"))[:1] != b"{"
