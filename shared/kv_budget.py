"""A bound on the memory of one sequence: how many of its tokens stay in the KV cache, and which ones."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.bounds import MAX_PROMPT_TOKENS

KvPolicy = Literal["sinks"]
MAX_BUDGETED_TOKENS = MAX_PROMPT_TOKENS
"""Tokens of a sequence with a budget at most, prompt and output together: as many as a resumed request can carry."""

NumBudgetTokens = Annotated[int, Meta(ge=1, le=MAX_PROMPT_TOKENS)]


class KvBudget(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a request allows the KV cache to keep of it.

    Attributes:
        tokens: Kept at most; the others are evicted, and the answer does not see them any more.
        policy: Which tokens stay. `sinks`: the first ones, and the last ones.
    """

    tokens: NumBudgetTokens
    policy: KvPolicy = "sinks"
