"""The `encrypted_content` of reasoning items: what a client that stores nothing here gives back with its next request.

Some clients send back nothing else of a reasoning item. It holds the model's own text, which the client has been sent
anyway, so it is packed and not encrypted: gateways share no key, and any of them can read it.
"""

from __future__ import annotations

import base64
import binascii

_PREFIX = "headrace.reasoning.1."


def encode_reasoning(text: str) -> str:
    """Return reasoning in the form of an encrypted content."""
    return _PREFIX + base64.b64encode(text.encode()).decode()


def decode_reasoning(content: str | None) -> str | None:
    """Return the reasoning of a content that `encode_reasoning` made; None for any other, of another provider's."""
    if content is None or not content.startswith(_PREFIX):
        return None
    try:
        return base64.b64decode(content.removeprefix(_PREFIX), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None
