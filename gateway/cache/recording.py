"""The deltas of a sequence so far: enough to send them again to a client that joins later."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import msgspec

from shared.messages import Delta, Usage


def merge(deltas: Sequence[Delta]) -> Delta:
    """Return one delta with the content of several consecutive ones. There must be at least one."""
    if len(deltas) == 1:
        return deltas[0]
    first, last = deltas[0], deltas[-1]
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return Delta(
        id=first.id,
        epoch=first.epoch,
        seq=first.seq,
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        text="".join(delta.text for delta in deltas),
        finish=last.finish,
        logprobs=tuple(chain.from_iterable(logprobs)) if logprobs else None,
        prompt_logprobs=next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs), None),
        prompt_tokens=first.prompt_tokens,
        in_reasoning=first.in_reasoning,
        prompt_token_ids=next((delta.prompt_token_ids for delta in deltas if delta.prompt_token_ids), None),
    )


def tokens_so_far(deltas: Sequence[Delta]) -> tuple[int, int]:
    """Return how many prompt tokens and generated tokens the deltas of one sequence stand for."""
    prompt = next((delta.prompt_tokens for delta in deltas if delta.prompt_tokens is not None), 0)
    return prompt, sum(len(delta.token_ids) for delta in deltas)


def is_complete(deltas: Sequence[Delta]) -> bool:
    """Whether deltas are one whole sequence: no token missing or double, and an end, which is the last of them."""
    position = 0
    for delta in deltas:
        if delta.seq != position:
            return False
        position += len(delta.token_ids)
    return bool(deltas) and deltas[-1].finish is not None and all(delta.finish is None for delta in deltas[:-1])


def as_cached(delta: Delta) -> Delta:
    """Return a delta as a cached answer sends it: all prompt tokens were cached, and none was drafted."""
    if delta.finish is None or delta.finish.usage is None:
        return delta
    own = delta.finish.usage
    usage = Usage(own.prompt_tokens, own.completion_tokens, own.prompt_tokens, evicted_tokens=own.evicted_tokens)
    return msgspec.structs.replace(delta, finish=msgspec.structs.replace(delta.finish, usage=usage))
