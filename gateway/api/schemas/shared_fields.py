"""The fields that bodies of several endpoints share: sampling parameters, and how long a prefix is of use.

A body may have more parameters that `Sampling` has too: they are taken over by their name. Of retentions, under
OpenAI's and Anthropic's names and in `agent_hints`, the longest holds for the whole prompt and answer: breakpoints
within a prompt are not told apart, because only workers know where tokens begin.
"""

from __future__ import annotations

from os import urandom
from types import MappingProxyType
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from gateway.api.schemas.checks import invalid_value, require_text
from gateway.api.schemas.names import described
from shared.bounds import (
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MAX_TOKEN_ID,
    Penalty,
    Priority,
    Probability,
    RepetitionPenalty,
    Seed,
    Temperature,
    TimeoutSeconds,
)
from shared.cache_hints import MAX_SESSION_CHARACTERS, CacheHints, RetainSeconds, SessionId
from shared.sampling import Sampling, SamplingDefaults

StopText = Annotated[str, Meta(max_length=MAX_STOP_CHARACTERS)]
AskedPriority = Annotated[
    Priority | None,
    described(
        "Larger runs earlier among the requests that wait; a key allows at most its `max_priority`, 0 by default.", 5
    ),
]
AskedTimeout = Annotated[TimeoutSeconds | None, described("Seconds until the answer must be complete.", 60.0)]


class SamplingFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a body. None always means: left out."""

    temperature: Annotated[Temperature | None, described("0 takes the most likely token each time.", 0.5)] = None
    top_p: Annotated[
        Probability | None, described("Draw from the most likely tokens that have this probability together.", 0.9)
    ] = None
    # -1 is how vLLM's clients say that all tokens are kept.
    top_k: Annotated[
        Annotated[int, Meta(ge=-1, le=MAX_TOKEN_ID)] | None,
        described("Sample from this many most likely tokens; 0 and -1 keep all.", 40),
    ] = None
    min_p: Annotated[
        Probability | None, described("Drop tokens less likely than this times the most likely one.", 0.1)
    ] = None
    seed: Annotated[
        Seed | None, described("The same seed and request give the same answer; -1 is the same as none.", 42)
    ] = None
    stop: Annotated[
        StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None,
        described("A text, or a list of texts, before which the answer ends. Empty texts end nothing.", ["END"]),
    ] = None
    presence_penalty: Annotated[
        Penalty | None, described("Subtracted from the logit of each token that the answer has.", 0.5)
    ] = None
    frequency_penalty: Annotated[Penalty | None, described("The same, times the number of its occurrences.", 0.5)] = (
        None
    )
    repetition_penalty: Annotated[
        RepetitionPenalty | None, described("Divides positive logits of tokens in prompt and answer.", 1.1)
    ] = None
    ignore_eos: Annotated[bool | None, described("Go on after the end-of-sequence token.", True)] = None
    priority: AskedPriority = None
    timeout: AskedTimeout = None


# How clients of vLLM and llama.cpp say that each answer is to have a seed of its own.
_RANDOM_SEED = -1

# Parameters that are copied by name: all but those that the wire writes in another form.
_OTHER_FORMS = {"seed", "stop", "top_k", "max_tokens", "logprobs", "prompt_logprobs", "bad_words", "grammar"}
_COPIED = tuple(name for name in Sampling.__struct_fields__ if name not in _OTHER_FORMS)

_DEFAULTED = SamplingDefaults.__struct_fields__


def sampling_of(body: SamplingFields, max_tokens: int | None, logprobs: int | None, **more: Any) -> Sampling:
    """Return the wire's sampling parameters: the body's fields, and `more` as the wire writes them.

    `logprobs` of None reports none; `max_tokens` of None is as many as the context holds.
    """
    if logprobs is None and getattr(body, "logprob_token_ids", None):
        raise invalid_value("logprob_token_ids", "'logprob_token_ids' is only allowed where 'logprobs' are reported.")
    values: dict[str, Any] = {
        name: tuple(dict.fromkeys(value)) if isinstance(value, list) else value
        for name in _COPIED
        if (value := getattr(body, name, None)) is not None
    }
    values |= more
    if body.stop:
        stops = (body.stop,) if isinstance(body.stop, str) else body.stop
        values["stop"] = tuple([require_text("stop", stop) for stop in stops if stop])
    if body.top_k is not None:
        values["top_k"] = max(0, body.top_k)
    return Sampling(max_tokens=max_tokens, logprobs=logprobs, seed=seed_of(body.seed, body.temperature), **values)


def left_out(body: Struct) -> tuple[str, ...]:
    """Return the parameters that a body does not name and its model may have defaults for."""
    names = [name for name in _DEFAULTED if getattr(body, name, None) is None]
    if getattr(body, "repeat_penalty", None) is not None and "repetition_penalty" in names:
        names.remove("repetition_penalty")
    return tuple(names)


def seed_of(seed: int | None, temperature: float | None) -> int:
    """Return the seed of a request.

    A request without one, or with -1, gets a random one, so that it can move to another worker; when greedy it gets 0,
    so that equal requests look equal.
    """
    if seed is not None and seed != _RANDOM_SEED:
        return seed
    return 0 if temperature == 0 else int.from_bytes(urandom(8)) >> 2


def is_deterministic(body: SamplingFields) -> bool:
    """Whether the same request must get the same answer: greedy, or with a seed of the client's choice."""
    return body.temperature == 0 or body.seed not in (None, _RANDOM_SEED)


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
    described("How long the conversation's cached blocks stay useful. It never changes an answer.", {"drop": True}),
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
    """Return the hints of one of OpenAI's bodies."""
    retention = body.prompt_cache_retention
    key = require_text("prompt_cache_key", body.prompt_cache_key or "")
    return cache_hints(body.agent_hints, 0.0 if retention is None else _RETENTIONS[retention], key)


def cache_hints(hints: AgentHintsBody | None, retain_s: float, key: str = "") -> CacheHints | None:
    """Return the hints of a body, None where it gives none.

    Args:
        hints: The extension.
        retain_s: The longest retention that other names ask for.
        key: Names the conversation unless `hints` do.
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
