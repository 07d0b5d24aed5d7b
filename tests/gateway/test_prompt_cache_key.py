from __future__ import annotations

import pytest

from gateway.prompt_cache import cache_key
from gateway.schemas import parse_completion

BODY = b'{"model":"m","prompt":"x","temperature":0,"logit_bias":{"7":1,"5":2}%s}'


def test_logit_bias_in_another_order_has_the_same_key() -> None:
    reordered = BODY.replace(b'"7":1,"5":2', b'"5":2,"7":1') % b""
    assert cache_key("t", parse_completion(BODY % b"")) == cache_key("t", parse_completion(reordered))


@pytest.mark.parametrize("change", [b',"max_tokens":3', b',"stop":"a"', b',"n":2', b',"echo":true', b',"logprobs":1'])
def test_what_changes_the_answer_changes_the_key(change: bytes) -> None:
    assert cache_key("t", parse_completion(BODY % b"")) != cache_key("t", parse_completion(BODY % change))


def test_other_bias_or_tenant_has_another_key() -> None:
    key = cache_key("t", parse_completion(BODY % b""))
    assert cache_key("u", parse_completion(BODY % b"")) != key
    assert cache_key("t", parse_completion(BODY.replace(b'"7":1', b'"7":2') % b"")) != key
