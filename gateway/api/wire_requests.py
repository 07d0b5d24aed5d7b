"""From a generation to wire requests: one per choice and prompt, each a sequence of its own."""

from __future__ import annotations

import itertools
import time
from base64 import urlsafe_b64encode
from os import urandom

import msgspec

from gateway.generation import Generation, Prompt
from shared.messages import Request

# Seeds are 64-bit signed integers on the wire.
_SEED_VALUES = 2**64


def wire_requests(
    generation: Generation,
    tenant: str,
    reply: str,
    timeout_s: float | None,
    request_id: str,
    traceparent: str | None = None,
    now: float | None = None,
) -> list[Request]:
    """Return the requests of all choices, in their order.

    Args:
        generation: What to generate.
        tenant: Owner of the request.
        reply: Subject for the frames.
        timeout_s: Time until the deadline; None without one.
        request_id: Names them all in log lines.
        traceparent: Names the span that they are part of, when requests are traced.
        now: Unix seconds at the server; this machine's if not given.
    """
    now = time.time() if now is None else now
    base = urlsafe_b64encode(urandom(12)).decode()
    whole = Request(
        id=base,
        model=generation.model,
        tenant=tenant,
        lane=generation.lane,
        priority=generation.priority,
        deadline=None if timeout_s is None else now + timeout_s,
        sampling=generation.sampling,
        reply=reply,
        echo=generation.echo,
        created=now,
        trace=request_id,
        traceparent=traceparent,
        prediction=generation.prediction,
        pooling=generation.pooling,
        add_special_tokens=generation.add_special_tokens,
        truncate_prompt_tokens=generation.truncate_prompt_tokens,
        cache_salt=generation.cache_salt,
        return_prompt_token_ids=generation.details is not None and generation.details.needs_prompt_ids,
    )
    choices = itertools.product(generation.prompts, range(generation.n))
    return [_of_choice(whole, number, prompt, choice) for number, (prompt, choice) in enumerate(choices)]


def _of_choice(whole: Request, number: int, prompt: Prompt, choice: int) -> Request:
    """Return the request number `number`: of one of a prompt's choices."""
    pooling, sampling = whole.pooling, whole.sampling
    if pooling is not None and prompt.query is not None:
        pooling = msgspec.structs.replace(pooling, query=prompt.query)
    if choice:
        sampling = msgspec.structs.replace(sampling, seed=_wrapped(sampling.seed + choice))
    return msgspec.structs.replace(
        whole,
        id=f"{whole.id}-{number}",
        messages=prompt.messages,
        chat=prompt.chat,
        text=prompt.text,
        token_ids=prompt.token_ids,
        suffix=prompt.suffix,
        sampling=sampling,
        pooling=pooling,
    )


def _wrapped(seed: int) -> int:
    half = _SEED_VALUES // 2
    return (seed + half) % _SEED_VALUES - half
