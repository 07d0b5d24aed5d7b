"""A prompt's chain of digests, by which workers recognize what they have computed before.

It is one of the text, as it is in the message, since tokens are known too late to decide who computes it: a link for
each full kibibyte, a digest of everything up to there, so the next turn of a conversation extends it. The worker that
pulls a message makes it. The root is the salt of the prefix cache: tenants have no links in common.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from hashlib import sha256

import msgspec

from shared.messages import Request
from shared.prefixes import LINK_BYTES

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
