"""What a body says of how long its prefix is of use, under OpenAI's and Anthropic's names and in `agent_hints`.

The longest retention that a body names holds for its whole prompt and answer: breakpoints within a prompt are not told
apart, because only workers know where tokens begin.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Literal

from msgspec import Meta, Struct

from gateway.api.schemas.checks import require_text
from gateway.api.schemas.names import described
from gateway.api.schemas.sampling_fields import SamplingFields
from shared.cache_hints import MAX_SESSION_CHARACTERS, CacheHints, RetainSeconds, SessionId

_RETENTIONS = MappingProxyType({"in_memory": 300.0, "in-memory": 300.0, "24h": 86_400.0})
_TTLS = MappingProxyType({"5m": 300.0, "1h": 3600.0})


class CacheControlBody(Struct, kw_only=True):
    """The end of a prefix to keep. Other names in it, such as `scope` of Claude Code, change nothing."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class AgentHintsBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """What an agent knows of its conversation, and no other name says."""

    session_id: Annotated[
        SessionId | None, described("Names the conversation; `prompt_cache_key` does if this is left out.", "agent-7")
    ] = None
    retain_s: Annotated[
        RetainSeconds | None,
        described("Evict the blocks of this request last, for this many seconds after it has ended.", 90.0),
    ] = None
    supersedes: Annotated[
        bool | None,
        described("This prompt holds the conversation's whole state: evict earlier blocks of it first.", True),
    ] = None
    drop: Annotated[bool | None, described("The conversation ends with this answer: evict its blocks first.", True)] = (
        None
    )


AgentHints = Annotated[
    AgentHintsBody | None,
    described("How long what is computed for this conversation is of use. It never changes an answer.", {"drop": True}),
]


class CacheFields(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """Fields of OpenAI's bodies. None always means: left out."""

    prompt_cache_key: Annotated[
        Annotated[str, Meta(max_length=MAX_SESSION_CHARACTERS)] | None,
        described("Names the conversation for `agent_hints`. Prompts are cached by their content.", "agent-7"),
    ] = None
    prompt_cache_retention: Annotated[
        Literal["in_memory", "in-memory", "24h"] | None,
        described(
            "Evict the cached prompt last: for five minutes with `in_memory`, for a day with `24h`, as far as the "
            "tenant's share of the cache goes.",
            "24h",
        ),
    ] = None
    agent_hints: AgentHints = None


def openai_hints(body: CacheFields) -> CacheHints | None:
    """Return the hints of one of OpenAI's bodies.

    Raises:
        ApiError: 400; a name holds a NUL character.
    """
    retention = body.prompt_cache_retention
    key = require_text("prompt_cache_key", body.prompt_cache_key or "")
    return cache_hints(body.agent_hints, 0.0 if retention is None else _RETENTIONS[retention], key)


def cache_hints(hints: AgentHintsBody | None, retain_s: float, key: str = "") -> CacheHints | None:
    """Return the hints of a body, None where it gives none.

    Args:
        hints: The extension.
        retain_s: The longest retention that other names ask for.
        key: Names the conversation unless `hints` do.

    Raises:
        ApiError: 400; a name holds a NUL character.
    """
    hints = hints or AgentHintsBody()
    found = CacheHints(
        session_id=require_text("agent_hints.session_id", hints.session_id or key) or None,
        retain_s=max(retain_s, hints.retain_s or 0.0),
        supersedes=bool(hints.supersedes),
        drop=bool(hints.drop),
    )
    return None if found == CacheHints() else found


def ttl_s(control: CacheControlBody | None) -> float:
    """Return for how many seconds a `cache_control` asks."""
    return 0.0 if control is None else _TTLS[control.ttl or "5m"]
