from __future__ import annotations

from gpu_worker.consumer.prefixes.chain import PrefixChain
from gpu_worker.consumer.prefixes.held import HeldPrefixes
from shared.prefixes import LINK_BYTES, MAX_ANNOUNCED

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
