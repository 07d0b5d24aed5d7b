"""Which of the other workers are asked first."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.consumer.prefixes.held import MAX_LINKS, HeldPrefixes, PrefixChain, prefix_chain
from gpu_worker.consumer.prefixes.peers import IN_VAIN_HALF_S, MAX_ASKED, PeerBeat, PeerPrefixes, peer_beat
from gpu_worker.consumer.request_reader import cache_salt
from shared.conversation import ChatMessage, ChatOptions
from shared.messages import Request
from shared.pooling import Pooling
from shared.prefixes import LINK_BYTES, MAX_ANNOUNCED, PrefixNews
from shared.sampling import Sampling

BLOCK_SIZE = 4


def chain(*names: str) -> PrefixChain:
    """Return a chain with a link for each name, each of eight bytes or two tokens."""
    return PrefixChain(tuple(name.ljust(LINK_BYTES).encode() for name in names), 8 * len(names), 8)


class Cache:
    """A worker's cache, whose blocks are named by what they end."""

    def __init__(self, max_noted: int = 1000) -> None:
        self.blocks: set[bytes] = set()
        self.held = HeldPrefixes(BLOCK_SIZE, self.blocks.__contains__, max_noted)

    def compute(self, *names: str) -> None:
        """Compute a prompt of two tokens for each name."""
        whole = "".join(names)
        blocks = [whole[: 2 * (place + 1)].encode() for place in range(len(names) // 2)]
        self.blocks.update(blocks)
        self.held.note(chain(*names), 2 * len(names), blocks)

    def num_held(self, *names: str) -> int:
        held = self.held.longest(chain(*names).links)
        return 0 if held is None else held.num_tokens

    def announced(self) -> set[str]:
        links = self.held.announced()
        return {links[at : at + LINK_BYTES].decode().strip() for at in range(0, len(links), LINK_BYTES)}


def test_longest_prefix_is_what_other_prompts_have_in_common() -> None:
    cache = Cache()
    cache.compute(*"abcdef")
    assert cache.num_held(*"abcdefgh") == 12
    assert cache.num_held(*"abcdxy") == 8
    assert cache.num_held(*"xbcdef"[:1]) == 0


def test_evicted_blocks_are_held_no_more() -> None:
    cache = Cache()
    cache.compute(*"abcdef")
    # The last blocks of a prompt are evicted first.
    cache.blocks.discard(b"abcdef")
    assert cache.num_held(*"abcdef") == 10
    cache.blocks.clear()
    assert cache.num_held(*"abcdef") == 0
    assert cache.announced() == set()


def test_beginning_of_a_prompt_is_announced_once_its_end_is_evicted() -> None:
    cache = Cache()
    cache.compute(*"abcdefgh")
    assert cache.announced() == {"e", "g", "h"}
    cache.blocks.intersection_update({b"ab"})
    assert cache.announced() == {"c"}


def test_prompt_that_is_not_cached_is_not_held() -> None:
    cache = Cache()
    cache.held.note(chain(*"abcd"), 8, [])
    assert cache.num_held(*"abcd") == 0


def test_beginning_of_several_conversations_is_known_as_shared() -> None:
    cache = Cache()
    cache.compute(*"abcdef")
    cache.compute(*"abcdefgh")
    grown = cache.held.longest(chain(*"abcdef").links)
    assert grown is not None
    assert not grown.is_shared
    cache.compute(*"abcdxy")
    for names, is_shared in (("abcd", True), ("abcdef", False), ("abcdxy", False)):
        held = cache.held.longest(chain(*names).links)
        assert held is not None
        assert held.is_shared is is_shared, names
    assert "d" in cache.announced()


def test_end_of_a_prompt_is_announced_and_whatever_is_new_once() -> None:
    cache = Cache()
    cache.compute(*"abcdef")
    assert "f" in cache.announced()
    assert cache.held.take_news() == b""
    cache.compute(*"abcdefgh")
    assert b"h".ljust(LINK_BYTES) in cache.held.take_news()
    assert cache.held.take_news() == b""


def test_notes_and_announcements_are_bounded_and_the_latest_are_kept() -> None:
    cache = Cache(max_noted=3000)
    for number in range(2000):
        cache.compute(*(f"{number}{letter}" for letter in "abcd"))
    announced = cache.announced()
    assert len(announced) <= MAX_ANNOUNCED
    assert "1999d" in announced
    assert cache.num_held("0a", "0b", "0c", "0d") == 0
    assert cache.num_held(*(f"1999{letter}" for letter in "abcd")) == 8


MESSAGES = st.lists(
    st.builds(ChatMessage, role=st.sampled_from(("user", "assistant", "tool")), content=st.text(max_size=60)),
    max_size=6,
)


def chain_chain(chunk_bytes: int = 16, **fields: Any) -> PrefixChain | None:
    fields.setdefault("tenant", "t")
    request = Request(id="r", model="m", **fields)
    return prefix_chain(request, cache_salt(request), chunk_bytes)


def links(**fields: Any) -> tuple[bytes, ...]:
    found = chain_chain(**fields)
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
    assert chain_chain(**fields) is None


def test_chain_is_bounded() -> None:
    found = chain_chain(text="x" * (16 * MAX_LINKS * 2))
    assert found is not None
    assert len(found.links) == MAX_LINKS
    assert found.share(MAX_LINKS - 1) == 0.5


def test_worker_that_took_nothing_in_a_busy_minute_is_asked_again_although_others_fit() -> None:
    others, now = PeerPrefixes(), 100.0
    fleet = ["emptiest", *(f"w{number}" for number in range(MAX_ASKED))]

    def hear() -> None:
        for worker in fleet:
            others.note(PeerBeat(worker=worker, prefixes=PrefixNews(num_blank=9 if worker == "emptiest" else 5)), now)

    hear()
    assert others.emptier(1, now)[0] == "emptiest"
    for _ in range(60):
        others.note_asked("emptiest", has_taken=False)
    hear()
    assert "emptiest" not in others.emptier(1, now), "three others have taken what they were asked"
    # It is heard once a second, as ever.
    for _ in range(int(5 * IN_VAIN_HALF_S)):
        now += 1.0
        hear()
    assert others.emptier(1, now)[0] == "emptiest"


@pytest.mark.parametrize("extra", [0, 1])
def test_workers_that_announce_a_prefix_and_take_nothing_do_not_keep_its_holder_from_being_asked(extra: int) -> None:
    others, now, num_unasked = PeerPrefixes(), 100.0, 0
    chain = [bytes([place] * LINK_BYTES) for place in range(4)]
    places = {link: place for place, link in enumerate(chain)}
    liars = [f"z{number}" for number in range(4 * MAX_ASKED)]
    for _ in range(200):
        now += 0.1
        for worker in ("holder", *liars):
            announced = chain if worker != "holder" else chain[: len(chain) - extra]
            others.note(PeerBeat(worker=worker, prefixes=PrefixNews(links=b"".join(announced))), now)
        asked = [worker for _, worker in others.holders(places, now)]
        assert len(asked) == MAX_ASKED
        for worker in asked:
            others.note_asked(worker, has_taken=worker == "holder")
        num_unasked += "holder" not in asked
    # Each of the others is believed a few times, and again after a while.
    assert num_unasked < 60


@pytest.mark.parametrize(
    ("subject", "data", "is_own"),
    [
        ("hr.worker.m.w_2e1", {"worker": "w.1", "model": "m"}, True),
        ("hr.worker.m.liar", {"worker": "w.1", "model": "m"}, False),
        ("hr.worker.m.w_2e1", {"model": "m"}, False),
        ("hr.worker.m.w_2e1", "nonsense", False),
        ("hr.worker.m._", {"worker": "w.1"}, False),
    ],
)
def test_heartbeat_under_the_name_of_another_worker_is_not_of_its_sender(
    subject: str, data: object, is_own: bool
) -> None:
    assert (peer_beat(subject, msgspec.msgpack.encode(data)) is not None) is is_own
