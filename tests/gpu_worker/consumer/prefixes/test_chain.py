from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.consumer.prefixes.chain import MAX_LINKS, PrefixChain, prefix_chain
from gpu_worker.consumer.request_reader import cache_salt
from shared.conversation import ChatMessage, ChatOptions
from shared.messages import Request
from shared.pooling import Pooling
from shared.sampling import Sampling

MESSAGES = st.lists(
    st.builds(ChatMessage, role=st.sampled_from(("user", "assistant", "tool")), content=st.text(max_size=60)),
    max_size=6,
)


def chain(chunk_bytes: int = 16, **fields: Any) -> PrefixChain | None:
    fields.setdefault("tenant", "t")
    request = Request(id="r", model="m", **fields)
    return prefix_chain(request, cache_salt(request), chunk_bytes)


def links(**fields: Any) -> tuple[bytes, ...]:
    found = chain(**fields)
    return () if found is None else found.links


@given(MESSAGES, MESSAGES)
def test_chain_of_a_turn_extends_that_of_the_turn_before(before: list[ChatMessage], more: list[ChatMessage]) -> None:
    first, second = links(messages=tuple(before)), links(messages=tuple(before + more))
    assert second[: len(first)] == first


@given(st.text(min_size=1, max_size=200), st.text(max_size=200), st.text(max_size=200))
def test_chains_agree_as_far_as_the_texts_do_and_no_further(common: str, one: str, other: str) -> None:
    ours, theirs = (common + one).encode(), (common + other).encode()
    agree = sum(a == b for a, b in zip(links(text=common + one), links(text=common + other), strict=False))
    num_equal = next(
        (n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(map(len, (ours, theirs)))
    )
    assert agree == num_equal // 16


@pytest.mark.parametrize(
    "other",
    [
        {"tenant": "u"},
        {"cache_salt": "mine"},
        # A tenant's name and a salt cannot be put together to another tenant's.
        {"tenant": "t1", "cache_salt": None},
        {"add_special_tokens": False},
        {"text": None, "token_ids": tuple(range(64))},
        {"text": None, "messages": (ChatMessage(role="user", content="x" * 100),)},
    ],
)
def test_what_shares_no_blocks_shares_no_links(other: dict[str, Any]) -> None:
    fields = {"text": "x" * 100, "tenant": "t"}
    assert links(**fields)
    assert not set(links(**fields)) & set(links(**{**fields, **other}))


def test_tools_and_template_variables_belong_to_the_prefix() -> None:
    messages = (ChatMessage(role="user", content="x" * 64),)
    options = [ChatOptions(), ChatOptions(tools="[1]"), ChatOptions(variables="{}"), ChatOptions(template="t")]
    found = [links(messages=messages, chat=each) for each in options]
    assert len({each[0] for each in found}) == len(options)
    # How the answer is opened does not.
    assert links(messages=messages, chat=ChatOptions(add_generation_prompt=False)) == found[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "x" * 100, "truncate_prompt_tokens": 5},
        {"text": "x" * 100, "suffix": "y"},
        {"text": "x" * 100, "pooling": Pooling()},
        {"text": "x" * 100, "sampling": Sampling(prompt_logprobs=1)},
        {"text": "x" * 15},
        {"token_ids": ()},
    ],
)
def test_request_that_can_use_no_prefix_has_no_chain(fields: dict[str, Any]) -> None:
    assert chain(**fields) is None


def test_chain_is_bounded() -> None:
    found = chain(text="x" * (16 * MAX_LINKS * 2))
    assert found is not None
    assert len(found.links) == MAX_LINKS
    assert found.share(MAX_LINKS - 1) == 0.5
