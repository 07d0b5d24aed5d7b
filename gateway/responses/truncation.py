"""`truncation: "auto"`: a conversation that is longer than its model's context loses its oldest turns.

A turn is a message of the user with all messages up to the next one. The result of a call may come after a later
message of the user: the turns in between are one then, so that neither is without the other. Messages to the model
(`system`, `developer`) and the last turn are never dropped. The last turn alone may still be too long: the worker
refuses it, as without truncation.

Only a worker can count tokens. A short conversation fits for certain by its length, and one longer than any prompt of
the model does not; in between, a binary search over the turns counts. The search is admitted as one request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from msgspec.structs import replace

from gateway.admission.auth import Principal
from gateway.api.model_fit import check_sees
from gateway.api.routes import RouteServices
from gateway.api.schemas.conversation import conversation_prompt
from gateway.api.schemas.images import Images
from gateway.errors import ApiError
from gateway.fleet.fleet_load import FleetLoad
from gateway.generation import Prompt
from gateway.responses.draft import ResponseGeneration
from shared.conversation import ChatMessage
from shared.tokenizer_calls import TokenizeCall

_TO_THE_MODEL = frozenset({"system", "developer"})
# A byte is one token at most, and an estimated token is 3.5 bytes. The rest is for what a chat template writes: around
# each message, in front of all of them, and where it indents or escapes the JSON of tools.
_MAX_TOKENS_PER_ESTIMATED = 6
_MAX_TEMPLATE_TOKENS = 1024
# The most that is kept free for an answer whose length the client does not limit, reasoning included.
_USUAL_OUTPUT_TOKENS = 16384
# How a text of more tokens, characters or bytes is refused than are counted: it is longer than the context in any case.
_TOO_LONG = ("context_length_exceeded", "request_too_large")

Fits = Callable[[Prompt], Awaitable[bool]]


async def truncated(
    generation: ResponseGeneration, load: FleetLoad, principal: Principal, services: RouteServices
) -> ResponseGeneration:
    """Return the generation with as much of its conversation as fits, counted by a worker of the model.

    Raises:
        ApiError: The key's limits are reached, the worker refuses the conversation for another reason than its length,
            an image is bad, or no worker answers.
    """
    (prompt,) = generation.prompts
    assert prompt.messages is not None
    limit = max_prompt_tokens(load.max_model_len, generation.sampling.max_tokens)
    starts = turn_starts(prompt.messages)
    if _is_short(prompt, limit) or len(starts) < 2:
        return generation
    lease = await services.limiter.admit(principal, 1, 0)
    try:
        check_sees(prompt.images, generation.model, load)
        media = await services.images.references(prompt.images, principal.tenant)

        async def fits(shorter: Prompt) -> bool:
            if _is_short(shorter, limit):
                return True
            if 0 < load.max_prompt_characters < shorter.num_characters:
                return False
            shown = tuple(media[prompt.images.index(image)] for image in shorter.images)
            call = TokenizeCall(messages=shorter.messages, add_special_tokens=False, chat=shorter.chat, media=shown)
            try:
                reply = await services.tokenizer.call(load.model, principal.tenant, call)
            except ApiError as error:
                if error.code in _TOO_LONG:
                    return False
                raise
            return len(reply.token_ids) <= limit

        return replace(generation, prompts=(await _shortened(prompt, starts, fits),))
    finally:
        lease.release()


def max_prompt_tokens(max_model_len: int, max_output_tokens: int | None) -> int:
    """Return how long a prompt may be that leaves room for its answer.

    Most clients name no `max_output_tokens`, and their answer would end where the conversation left no room. Others
    allow longer answers than they expect: of these at most half of the context is kept free.
    """
    if max_output_tokens is None:
        return max_model_len - min(max_model_len // 4, _USUAL_OUTPUT_TOKENS)
    return max_model_len - min(max_output_tokens, max_model_len // 2)


def turn_starts(messages: Sequence[ChatMessage]) -> list[int]:
    """Return the indices at which a conversation may begin, the first of which leaves it whole."""
    starts: list[int] = []
    called: dict[str, int] = {}
    first = len(messages)
    for index, message in enumerate(messages):
        if message.role not in _TO_THE_MODEL:
            first = min(first, index)
        if message.role == "user":
            starts.append(index)
        called.update((call.id, index) for call in message.tool_calls)
        if message.tool_call_id is not None:
            call_index = called.get(message.tool_call_id, index)
            while starts and starts[-1] > call_index:
                starts.pop()
    return [first, *(start for start in starts if start > first)]


def beginning_at(prompt: Prompt, start: int) -> Prompt:
    """Return a conversation without its messages before `start`, except those to the model."""
    messages = prompt.messages or ()
    kept = [each for index, each in enumerate(messages) if index >= start or each.role in _TO_THE_MODEL]
    shown = sorted(image.index for message in kept for image in message.images)
    places = {index: place for place, index in enumerate(shown)}
    for at, message in enumerate(kept):
        if message.images:
            images = tuple(replace(image, index=places[image.index]) for image in message.images)
            kept[at] = replace(message, images=images)
    return conversation_prompt(tuple(kept), prompt.chat, Images([prompt.images[index] for index in shown]))


async def _shortened(prompt: Prompt, starts: Sequence[int], fits: Fits) -> Prompt:
    """Return the longest conversation that fits; the last turn is not asked about."""
    if await fits(prompt):
        return prompt
    low, high = 1, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        if await fits(beginning_at(prompt, starts[middle])):
            high = middle
        else:
            low = middle + 1
    return beginning_at(prompt, starts[high])


def _is_short(prompt: Prompt, limit: int) -> bool:
    """Whether a conversation fits for certain, by its length alone. The tokens of images depend on the model."""
    most = _MAX_TOKENS_PER_ESTIMATED * prompt.estimated_tokens + _MAX_TEMPLATE_TOKENS
    return not prompt.images and most <= limit
