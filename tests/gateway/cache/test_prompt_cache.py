"""The response cache against a real Redis: what makes requests equal, isolation, bounds, and failures as misses."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.schemas.parsing import parse_completion
from gateway.cache.prompt_cache import (
    ENTRY_BYTES,
    FORMAT_VERSION,
    TTL_JITTER,
    AnswerMemory,
    CacheKey,
    PromptCache,
    cache_key,
)
from gateway.cache.redis_client import RedisCache
from gateway.generation import Details, Generation, Prompt
from gateway.metrics import GatewayMetrics
from shared.conversation import ChatMessage
from shared.messages import Delta, Finish, Usage
from shared.pooling import Pooling
from shared.sampling import Sampling

REVISIONS = ("revision",)

DELTAS = [
    Delta("id-1", 3, 0, (5,), "a"),
    Delta("id-1", 3, 1, (6,), "b", Finish("stop", Usage(7, 2, 1))),
]


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[RedisCache]:
    redis = RedisCache(redis_url, 1.0, GatewayMetrics())
    await redis.start()
    yield redis
    await redis.close()


def _generation(**changes: object) -> Generation:
    base = Generation(
        kind="completion",
        model="m",
        prompts=(Prompt(estimated_tokens=1, text="x"),),
        n=1,
        sampling=Sampling(temperature=0.0, max_tokens=8),
        deterministic=True,
    )
    return msgspec.structs.replace(base, **changes)


def _sampling(**changes: object) -> Sampling:
    return msgspec.structs.replace(_generation().sampling, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "other"},
        {"base": "base", "adapter": "1" * 64},
        {"n": 2},
        {"echo": True},
        {"cache_salt": "salt"},
        {"add_special_tokens": False},
        {"truncate_prompt_tokens": 1},
        {"details": Details(token_ids=True)},
        {"pooling": Pooling(task="embed")},
        {"prompts": (Prompt(1, text="y"),)},
        {"prompts": (Prompt(1, text="x", query="q"),)},
        {"prompts": (Prompt(1, text="x", suffix="s"),)},
        {"prompts": (Prompt(1, token_ids=(1,)),)},
        {"prompts": (Prompt(1, messages=(ChatMessage(role="user", content="x"),)),)},
        {"prompts": (Prompt(1, text="x"), Prompt(1, text="x"))},
        {"sampling": _sampling(max_tokens=9)},
        {"sampling": _sampling(stop=("x",))},
        {"sampling": _sampling(logprobs=0)},
        {"sampling": _sampling(logit_bias={1: 2.0})},
        {"sampling": _sampling(temperature=0.5, seed=1)},
    ],
)
def test_what_changes_the_answer_changes_the_key(changes: dict[str, object]) -> None:
    assert cache_key("t", _generation(**changes), REVISIONS) != cache_key("t", _generation(), REVISIONS)


@pytest.mark.parametrize(
    "changes",
    [
        {"stream": True, "include_usage": True},
        {"timeout_s": 3.0},
        {"sampling": _sampling(seed=99)},
        {"sampling": _sampling(top_p=0.5)},
        {"sampling": _sampling(top_k=3)},
        {"sampling": _sampling(min_p=0.1)},
    ],
)
def test_what_does_not_change_the_answer_keeps_the_key(changes: dict[str, object]) -> None:
    assert cache_key("t", _generation(**changes), REVISIONS) == cache_key("t", _generation(), REVISIONS)


async def test_stored_answer_comes_back_as_cached(redis: RedisCache) -> None:
    cache, key = PromptCache(redis, 60, 10_000), cache_key("stored", _generation(), REVISIONS)
    assert await cache.get(key) is None
    await cache.put(key, [DELTAS])
    found = await cache.get(key)
    assert found is not None
    assert [delta.text for delta in found[0]] == ["a", "b"]
    assert found[0][1].finish == Finish("stop", Usage(7, 2, 7))


async def test_tenants_do_not_see_each_other(redis: RedisCache) -> None:
    cache = PromptCache(redis, 60, 10_000)
    await cache.put(cache_key("tenant-a", _generation(), REVISIONS), [DELTAS])
    assert await cache.get(cache_key("tenant-b", _generation(), REVISIONS)) is None


def test_tenant_is_part_of_the_key() -> None:
    one, other = (cache_key(tenant, _generation(), REVISIONS) for tenant in ("tenant-a", "tenant-b"))
    assert one.digest != other.digest


@pytest.mark.parametrize(
    "deltas",
    [
        [],
        DELTAS[:1],
        DELTAS[1:],
        [DELTAS[0], DELTAS[0], DELTAS[1]],
        [*DELTAS, Delta("id-1", 3, 2, (7,), "c")],
        [DELTAS[1], DELTAS[0]],
    ],
    ids=["none", "no-end", "no-beginning", "double", "after-the-end", "wrong-order"],
)
async def test_answer_that_is_not_whole_is_neither_stored_nor_repeated(redis: RedisCache, deltas: list[Delta]) -> None:
    cache, key = PromptCache(redis, 60, 10_000), cache_key(f"torn-{secrets.token_hex(4)}", _generation(), REVISIONS)
    await cache.put(key, [DELTAS, deltas])
    assert await redis.get(f"hr:answer:{key.digest.hex()}") is None
    # As another version, or somebody with access to Redis, might have left it there.
    torn = (FORMAT_VERSION, key.tenant, key.digest, [DELTAS, deltas], time.time() + 60)
    await redis.set(f"hr:answer:{key.digest.hex()}", msgspec.msgpack.encode(torn), 60)
    assert await cache.get(key) is None


async def test_value_of_another_request_is_a_miss(redis: RedisCache) -> None:
    cache, key = PromptCache(redis, 60, 10_000), cache_key("mixed-up", _generation(), REVISIONS)
    await cache.put(key, [DELTAS])
    assert await cache.get(CacheKey("somebody else", key.digest)) is None


async def test_unreadable_value_is_a_miss(redis: RedisCache) -> None:
    cache, key = PromptCache(redis, 60, 10_000), cache_key("unreadable", _generation(), REVISIONS)
    nested_without_end = b"\x96" + msgspec.msgpack.encode(FORMAT_VERSION) + b"\xa1t\xc4\x00\x90\xcb" + bytes(8)
    for value in (b"\xc1", b"\x95\x04\xa1\xff", nested_without_end + b"\x91" * 10_000):
        await redis.set(f"hr:answer:{key.digest.hex()}", value, 60)
        assert await cache.get(key) is None


async def test_too_large_an_answer_is_not_stored(redis: RedisCache) -> None:
    key = cache_key(f"large-{secrets.token_hex(4)}", _generation(), REVISIONS)
    answer = [[Delta("id-1", 0, 0, (1,), "x" * 2000, Finish("stop", Usage(1, 1)))]]
    await PromptCache(redis, 60, 1000).put(key, answer)
    assert await PromptCache(redis, 60, 10_000).get(key) is None
    await PromptCache(redis, 60, 10_000).put(key, answer)
    assert await PromptCache(redis, 60, 10_000).get(key) is not None


async def test_stored_answer_does_not_name_the_request_that_made_it(redis: RedisCache) -> None:
    cache, key = PromptCache(redis, 60, 10_000), cache_key("anonymous", _generation(), REVISIONS)
    await cache.put(key, [DELTAS])
    value = await redis.get(f"hr:answer:{key.digest.hex()}")
    assert value is not None
    assert b"id-1" not in value


async def test_lifetime_of_zero_turns_the_cache_off(redis: RedisCache) -> None:
    cache, key = PromptCache(redis, 0, 10_000), cache_key("off", _generation(), REVISIONS)
    await cache.put(key, [DELTAS])
    assert await PromptCache(redis, 60, 10_000).get(key) is None


async def test_answer_in_memory_needs_no_redis_until_its_time_is_over(redis: RedisCache) -> None:
    now = time.time()
    cache = PromptCache(redis, 60, 10_000, 10_000, lambda: now)
    key = cache_key(f"memory-{secrets.token_hex(4)}", _generation(), REVISIONS)
    await cache.put(key, [DELTAS])
    await redis.set(f"hr:answer:{key.digest.hex()}", b"", 60)
    found = await cache.get(key)
    assert found is not None
    assert [delta.text for delta in found[0]] == ["a", "b"]
    assert await cache.get(CacheKey("somebody else", key.digest)) is None
    now += 60 * (1 + TTL_JITTER) + 1
    assert await cache.get(key) is None


async def test_answer_read_from_redis_is_kept_no_longer_than_there(redis: RedisCache) -> None:
    now = time.time()
    key = cache_key(f"read-{secrets.token_hex(4)}", _generation(), REVISIONS)
    await PromptCache(redis, 60, 10_000, clock=lambda: now).put(key, [DELTAS])
    other = PromptCache(redis, 60, 10_000, 10_000, lambda: now)
    now += 30
    assert await other.get(key) is not None
    await redis.set(f"hr:answer:{key.digest.hex()}", b"", 60)
    assert await other.get(key) is not None
    now += 60 * (1 + TTL_JITTER) - 30 + 1
    assert await other.get(key) is None


async def test_without_redis_everything_is_a_miss() -> None:
    cache, key = PromptCache(None, 60, 10_000), cache_key("t", _generation(), REVISIONS)
    await cache.put(key, [DELTAS])
    assert await cache.get(key) is None


def test_logit_bias_in_another_order_has_the_same_key() -> None:
    body = b'{"model":"m","prompt":"x","temperature":0,"logit_bias":{%s}}'
    one, other = (parse_completion(body % biases) for biases in (b'"7":1,"5":2', b'"5":2,"7":1'))
    assert cache_key("t", one, REVISIONS) == cache_key("t", other, REVISIONS)
    changed = parse_completion(body % b'"7":2,"5":2')
    assert cache_key("t", one, REVISIONS) != cache_key("t", changed, REVISIONS)


def test_other_weights_under_the_same_name_have_another_key() -> None:
    assert cache_key("t", _generation(), ("a",)) != cache_key("t", _generation(), ("b",))


def test_least_recently_used_answer_makes_room() -> None:
    memory = AnswerMemory(3 * (ENTRY_BYTES + 10))
    for digest in (b"a", b"b", b"c"):
        memory.put(digest, digest * 10, 100.0)
    assert memory.get(b"a", 0.0) == b"a" * 10
    memory.put(b"d", b"d" * 10, 100.0)
    assert memory.get(b"b", 0.0) is None
    assert [memory.get(digest, 0.0) for digest in (b"a", b"c", b"d")] == [b"a" * 10, b"c" * 10, b"d" * 10]


def test_answer_ends_with_its_time() -> None:
    memory = AnswerMemory(10_000)
    memory.put(b"a", b"x", 10.0)
    assert memory.get(b"a", 9.9) == b"x"
    assert memory.get(b"a", 10.0) is None
    assert memory.num_bytes == 0


def test_without_bytes_nothing_is_kept() -> None:
    memory = AnswerMemory(0)
    memory.put(b"a", b"", 10.0)
    assert memory.get(b"a", 0.0) is None


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c", b"d", b"e"]), st.integers(0, 900), st.booleans())))
def test_count_of_bytes_is_right_and_bounded(actions: list[tuple[bytes, int, bool]]) -> None:
    memory = AnswerMemory(2000)
    kept: dict[bytes, int] = {}
    for digest, size, is_put in actions:
        if is_put:
            memory.put(digest, bytes(size), 10.0)
            kept[digest] = size
        else:
            memory.drop(digest)
        found = {name: memory.get(name, 0.0) for name in kept}
        sizes = [len(value) for value in found.values() if value is not None]
        assert memory.num_bytes == sum(sizes) + ENTRY_BYTES * len(sizes) <= 2000
