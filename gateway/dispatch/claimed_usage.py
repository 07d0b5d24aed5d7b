"""What a worker says of the tokens of an answer, held against what this gateway knows itself.

Admission, limits, metrics and cached answers add these figures up, so one worker's lie would close a model or use up a
tenant's tokens. The tokens of an answer have come, and can be counted. Those of a prompt cannot be: a template and a
tokenizer make them. But the prompt has so many bytes, and that bounds them.
"""

from __future__ import annotations

import msgspec

from shared.messages import Delta, Request, Usage

# What a chat template writes of its own: a model's default instructions, how tools are to be called.
_TEMPLATE_TOKENS = 16_384
# A template may write a text twice, or indent it (tools).
_TEMPLATE_COPIES = 4
# Beginning and end of a text, the marks of a text with a gap.
_SPECIAL_TOKENS = 64
# Unicode's compatibility forms, which some tokenizers make of a text, have at most 18 characters for one.
_MOST_EXPANSION = 18
_CHARACTER_BYTES = 4
# Drafts that were rejected for one token that came.
_MOST_DRAFTS = 64


def most_prompt_tokens(request: Request) -> int:
    """Return how many tokens a request's prompt has at most; a token is made of a byte or more."""
    if request.token_ids is not None:
        # Of an empty prompt the worker makes one that begins a text.
        return max(1, len(request.token_ids))
    if request.text is not None:
        scored = () if request.pooling is None else (request.pooling.query, request.pooling.instruction)
        num_bytes = sum(map(_most_bytes, (request.text, request.suffix, *scored)))
        return num_bytes + (_SPECIAL_TOKENS if request.pooling is None else _TEMPLATE_TOKENS)
    num_bytes = 0
    for message in request.messages or ():
        num_bytes += sum(map(_most_bytes, (message.role, message.content, message.name, message.reasoning)))
        num_bytes += _SPECIAL_TOKENS + _most_bytes(message.tool_call_id)
        num_bytes += sum(sum(map(_most_bytes, (call.id, call.name, call.arguments))) for call in message.tool_calls)
    if request.chat is not None:
        num_bytes += sum(map(_most_bytes, (request.chat.tools, request.chat.variables, request.chat.template)))
    return _TEMPLATE_COPIES * num_bytes + _TEMPLATE_TOKENS


def believable(delta: Delta, request: Request, estimated_tokens: int, num_emitted: int) -> Delta:
    """Return a delta with the figures that can be true.

    Args:
        delta: As its worker sent it.
        request: What it answers.
        estimated_tokens: The gateway's estimate of the prompt, from its bytes alone.
        num_emitted: Tokens that have come, this delta's among them.
    """
    usage = None if delta.finish is None else delta.finish.usage
    claimed = max(delta.prompt_tokens or 0, 0 if usage is None else usage.prompt_tokens)
    # Nearly every claim is below an estimate that is there already.
    most = claimed if claimed <= estimated_tokens else most_prompt_tokens(request)
    if delta.prompt_tokens is not None and delta.prompt_tokens > most:
        delta = msgspec.structs.replace(delta, prompt_tokens=most)
    if delta.finish is None or usage is None:
        return delta
    true = _bounded(usage, most, num_emitted)
    if true == usage:
        return delta
    return msgspec.structs.replace(delta, finish=msgspec.structs.replace(delta.finish, usage=true))


def _bounded(usage: Usage, most_prompt: int, num_emitted: int) -> Usage:
    prompt = min(usage.prompt_tokens, most_prompt)
    return Usage(
        prompt,
        num_emitted,
        min(usage.cached_tokens, prompt),
        min(usage.accepted_prediction_tokens, num_emitted),
        min(usage.rejected_prediction_tokens, _MOST_DRAFTS * (num_emitted + 1)),
    )


def _most_bytes(text: str | None) -> int:
    if text is None:
        return 0
    return len(text) if text.isascii() else _MOST_EXPANSION * _CHARACTER_BYTES * len(text)
