"""The watermark of generated text: which key marks it, and which random numbers follow from the tokens before.

A text is marked by drawing each token with random numbers that the tokens before it and a secret decide, so that who
knows the secret finds the text's tokens luckier than chance. An operator makes one secret for each tenant; workers see
keys that are derived from it for one model alone. `kernels.sampling` draws, `ops.watermark` detects.

Source: Aaronson, "My AI safety lecture for UT Effective Altruism" (2022), Gumbel sampling over the last tokens;
Kirchenbauer et al., "A watermark for large language models" (ICML 2023), hashes of contexts. Here a context that the
output has had already is not marked, so that a text that repeats itself is sampled as ever.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from struct import Struct
from typing import Annotated

from msgspec import Meta

CONTEXT = 4
"""Tokens of the output that decide the random numbers of the next; the first four of an output are not marked."""

WatermarkKey = Annotated[str, Meta(min_length=64, max_length=64, pattern=r"^[0-9a-f]{64}\Z")]
"""What marks the texts of one tenant by one model: 32 bytes in lower-case hexadecimal."""

_FORMAT = Struct(f"<{CONTEXT}I")
_PURPOSE = b"headrace watermark 1\0"


def derived_key(secret: str, model: str) -> str:
    """Return the key for one model, by its name in the API, from a tenant's secret in hexadecimal."""
    return hmac.new(bytes.fromhex(secret), _PURPOSE + model.encode(), hashlib.sha256).hexdigest()


def mark_of(key: bytes, context: Sequence[int]) -> int:
    """Return the key of the random numbers behind `CONTEXT` tokens: 64 bits, signed, never 0, which is no mark."""
    digest = hashlib.blake2b(_FORMAT.pack(*context), digest_size=8, key=key).digest()
    return int.from_bytes(digest, "little", signed=True) or 1
