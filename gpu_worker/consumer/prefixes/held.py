"""Which prefixes this worker's cache holds, by the links of their chains, and which of them it announces.

A link is noted with the block in which its text ends, once that is computed. The block's own digest tells whether it is
still cached, so that nothing has to be told of evictions. Where exactly a text ends among the tokens is not known:
lengths are in proportion, and nothing but a choice of worker depends on them.

A prompt's chain of digests, by which workers recognize what they have computed before.

It is one of the text, as it is in the message, since tokens are known too late to decide who computes it: a link for
each full kibibyte, a digest of everything up to there, so the next turn of a conversation extends it. The worker that
pulls a message makes it. The root is the salt of the prefix cache: tenants have no links in common.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import msgspec

from shared.messages import Request
from shared.prefixes import LINK_BYTES, MAX_ANNOUNCED

CHUNK_BYTES = 1024
MAX_LINKS = 1024

_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class PrefixChain:
    """Digests of the beginnings of a prompt.

    Attributes:
        links: The one at index i is of the first i + 1 chunks.
        num_bytes: Of the whole text.
        chunk_bytes: Of a chunk.
    """

    links: tuple[bytes, ...]
    num_bytes: int
    chunk_bytes: int = CHUNK_BYTES

    def share(self, index: int) -> float:
        """Return the share of the text that a link covers."""
        return (index + 1) * self.chunk_bytes / self.num_bytes


def prefix_chain(request: Request, salt: bytes, chunk_bytes: int = CHUNK_BYTES) -> PrefixChain | None:
    """Return a request's chain; None if its answer takes computing all of the prompt, or the text is cut or rearranged.

    Args:
        request: The request with the prompt.
        salt: The salt under which its blocks in the prefix cache are shared.
        chunk_bytes: Text for each link. Text beyond `MAX_LINKS` chunks has no links.
    """
    is_cut = request.truncate_prompt_tokens is not None or request.suffix is not None
    if is_cut or request.pooling is not None or request.sampling.prompt_logprobs is not None:
        return None
    root, text = _read(request)
    digest = sha256(b"%d:%b%b" % (len(salt), salt, root))
    links = []
    for end in range(chunk_bytes, min(len(text), MAX_LINKS * chunk_bytes) + 1, chunk_bytes):
        digest.update(text[end - chunk_bytes : end])
        links.append(digest.digest()[:LINK_BYTES])
    return PrefixChain(tuple(links), len(text), chunk_bytes) if links else None


def _read(request: Request) -> tuple[bytes, memoryview]:
    if request.messages is not None:
        options = request.chat
        root, tools = b"", b""
        if options is not None:
            root = _encode((options.variables, options.template))
            tools = (options.tools or "").encode()
        return root, memoryview(tools + b"".join(map(_encode, request.messages)))
    if request.text is not None:
        return b"text%d" % request.add_special_tokens, memoryview(request.text.encode())
    return b"ids", memoryview(array("i", request.token_ids or ()).tobytes())


MAX_NOTED = 1 << 15
# Announced of each prompt, counted from its end: the next turn may change the last message before it goes on.
_ANNOUNCED_FROM_END = (1, 2, 4, 16)
_MEMORY = 0.1
_FIRST_BYTES_PER_TOKEN = 4.0


@dataclass(slots=True)
class HeldPrefix:
    """The computed prefix up to a link.

    Attributes:
        block: Digest of the block in which it ends.
        before: The link before it.
        follower: The link that came next.
        is_shared: Different links came next: it is the beginning of several conversations.
    """

    block: bytes
    num_tokens: int
    before: bytes | None
    follower: bytes | None
    is_shared: bool = False


class HeldPrefixes:
    """Owns the links.

    Attributes:
        bytes_per_token: Of the prompts seen lately.
    """

    def __init__(self, block_size: int, is_cached: Callable[[bytes], bool], max_noted: int = MAX_NOTED) -> None:
        self._block_size = block_size
        self._is_cached = is_cached
        self._max_noted = max_noted
        self._noted: OrderedDict[bytes, HeldPrefix] = OrderedDict()
        self._announced: OrderedDict[bytes, None] = OrderedDict()
        self._news: list[bytes] = []
        self.bytes_per_token = _FIRST_BYTES_PER_TOKEN

    def note(self, chain: PrefixChain, num_tokens: int, blocks: Sequence[bytes]) -> None:
        """Take note of a prompt that is computed."""
        self.bytes_per_token += (chain.num_bytes / max(1, num_tokens) - self.bytes_per_token) * _MEMORY
        links = chain.links
        # From the end, so that beginnings, which more prompts have, are forgotten last.
        for index in range(len(links) - 1, -1, -1):
            num_covered = int(num_tokens * chain.share(index))
            place = num_covered // self._block_size - 1
            if 0 <= place < len(blocks):
                before = links[index - 1] if index else None
                follower = links[index + 1] if index + 1 < len(links) else None
                self._note(links[index], HeldPrefix(blocks[place], num_covered, before, follower))
        while len(self._noted) > self._max_noted:
            link, _ = self._noted.popitem(last=False)
            self._announced.pop(link, None)
        self._announce(links[-back] for back in reversed(_ANNOUNCED_FROM_END) if back <= len(links))

    def longest(self, links: Sequence[bytes]) -> HeldPrefix | None:
        """Return the longest cached prefix of a chain, or of a part of one; None if there is none."""
        for link in reversed(links):
            held = self._noted.get(link)
            if held is not None and self._is_cached(held.block):
                return held
        return None

    def take_news(self) -> bytes:
        """Return the links to announce that were not in what this returned before."""
        news, self._news = self._news[-MAX_ANNOUNCED:], []
        return b"".join(news)

    def announced(self) -> bytes:
        """Return all links to announce, the latest last; for one that is not cached any more the last before it."""
        latest_first = dict.fromkeys(filter(None, map(self._last_cached, reversed(self._announced))))
        announced = OrderedDict.fromkeys(reversed(latest_first))
        self._announced, self._news = announced, []
        return b"".join(announced)

    def _last_cached(self, link: bytes | None) -> bytes | None:
        """Return a link, or the last one before it whose block is cached, and forget those that are not."""
        while link is not None and (held := self._noted.get(link)) is not None:
            if self._is_cached(held.block):
                return link
            del self._noted[link]
            link = held.before
        return None

    def _note(self, link: bytes, new: HeldPrefix) -> None:
        before = self._noted.pop(link, None)
        if before is not None:
            new.is_shared = before.is_shared or None is not before.follower != new.follower is not None
            new.follower = new.follower or before.follower
        self._noted[link] = new
        if new.is_shared:
            self._announce((link,))

    def _announce(self, links: Iterable[bytes]) -> None:
        for link in links:
            if link not in self._noted:
                continue
            if link not in self._announced:
                self._news.append(link)
            self._announced[link] = None
            self._announced.move_to_end(link)
        while len(self._announced) > MAX_ANNOUNCED:
            self._announced.popitem(last=False)
