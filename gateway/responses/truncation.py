"""`truncation: "auto"`: a conversation that is longer than its model's context loses its oldest parts.

A turn is a message of the user with all messages up to the next one. The result of a call may come after a later
message of the user: the turns in between are one then, so that neither is without the other. The oldest turns are
dropped first. Where the last turn alone is too long, it loses its oldest steps: the calls of one message of the
assistant, with their results and its reasoning. Messages to the model (`system`, `developer`), the user's messages of
the last turn and its last step are never dropped. They may still be too long: the worker refuses them, as without
truncation.

Only a worker can count tokens. A short conversation fits for certain by its length, and one longer than any prompt of
the model does not; in between, a binary search counts. Images are read from the newest to the oldest, as far as the
conversation fits, so that one which is dropped is neither fetched nor missed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from msgspec.structs import replace

from gateway.api.model_fit import check_sees
from gateway.api.schemas.conversation import conversation_prompt
from gateway.api.schemas.images import Images
from gateway.api.tokenizer_client import TokenizerClient
from gateway.errors import ApiError
from gateway.fleet.fleet_load import FleetLoad
from gateway.generation import Prompt
from gateway.media.intake import ImageIntake, ImageLimits
from gateway.responses.draft import ResponseGeneration
from shared.bounds import MAX_IMAGES
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


@dataclass(frozen=True, slots=True)
class TokenCounter:
    """Counts the tokens of a tenant's conversations. Images that are fetched are stored for `ttl_s`, if it is set."""

    tokenizer: TokenizerClient
    images: ImageIntake
    tenant: str
    ttl_s: float | None

    async def count(self, model: str, prompt: Prompt, *, with_images: bool) -> int | None:
        """Return the tokens of a conversation, or None if they are too many to be counted.

        Raises:
            ApiError: The worker refuses the conversation for another reason, an image is bad, or no worker answers.
        """
        media = [await self.images.measured(image, self.tenant, self.ttl_s) for image in prompt.images if with_images]
        call = TokenizeCall(messages=prompt.messages, add_special_tokens=False, chat=prompt.chat, media=tuple(media))
        try:
            reply = await self.tokenizer.call(model, self.tenant, call)
        except ApiError as error:
            if error.code in _TOO_LONG:
                return None
            raise
        return len(reply.token_ids)


class Truncation:
    """The search for the longest part of one conversation that fits its model."""

    def __init__(self, generation: ResponseGeneration, load: FleetLoad) -> None:
        (self._prompt,) = generation.prompts
        self._generation, self._load = generation, load
        self._limit = max_prompt_tokens(load.max_model_len, generation.sampling.max_tokens)

    @property
    def is_needed(self) -> bool:
        """Whether the conversation may be too long, and something can be dropped."""
        return not _is_short(self._prompt, self._limit) and len(self._cuts) > 1

    async def truncated(self, counter: TokenCounter) -> ResponseGeneration:
        """Return the generation with as much of its conversation as fits; it raises as `TokenCounter.count`."""
        check_sees(self._prompt.images, self._generation.model, self._load)
        cut = await self._first_cut(counter)
        return replace(self._generation, prompts=(self._beginning_at(cut),))

    @cached_property
    def _cuts(self) -> list[int]:
        messages = self._prompt.messages or ()
        starts = turn_starts(messages)
        return [*starts, *step_starts(messages, starts[-1])]

    def _beginning_at(self, cut: int) -> Prompt:
        return beginning_at(self._prompt, self._cuts[cut]) if cut else self._prompt

    async def _first_cut(self, counter: TokenCounter) -> int:
        """Return the index of the first cut behind which all fits; the last one is not asked about."""

        async def text_fits(cut: int) -> bool:
            return await self._count(counter, cut, with_images=False) is not None

        last = len(self._cuts) - 1
        least = self._first_where(partial(_are_read, counter.images.limits), 0, last)
        # Images of a conversation that is short by all estimates will be read in any case.
        is_likely_whole = self._prompt.images and self._prompt.estimated_tokens <= self._limit // 2
        if least == last or (is_likely_whole and await self._count(counter, least) is not None):
            return least
        first = least if await text_fits(least) else await _first(least + 1, last, text_fits)
        return await self._first_with_images(counter, first, last) if self._prompt.images else first

    async def _first_with_images(self, counter: TokenCounter, first: int, last: int) -> int:
        """Return the first cut, not before `first`, behind which text and images fit."""

        async def fits(cut: int) -> bool:
            return await self._count(counter, cut) is not None

        fitting, next_cut = last, self._next_with_images(last, first)
        while fitting > first:
            count = await self._count(counter, next_cut)
            if count is None:
                return await _first(next_cut + 1, fitting, fits)
            fitting = next_cut
            next_cut = self._next_with_images(fitting, first)
            prompt = self._beginning_at(fitting)
            if prompt.images:
                # Images of one conversation resemble each other. The rest of the limit is for those that do not.
                estimated = prompt.estimated_tokens * self._limit * 3 // (4 * count)
                likely = self._first_where(partial(_is_estimated_at_most, estimated), first, fitting)
                next_cut = min(next_cut, likely)
        return fitting

    def _next_with_images(self, fitting: int, first: int) -> int:
        """Return the cut before `fitting` that adds the images of one turn or step at most."""
        messages, cut = self._prompt.messages or (), fitting - 1
        while cut > first and not any(each.images for each in messages[self._cuts[cut - 1] : self._cuts[cut]]):
            cut -= 1
        return cut

    def _first_where(self, holds: Callable[[Prompt], bool], low: int, high: int) -> int:
        """Return the first cut behind which the conversation is as asked, `high` at the latest."""
        while low < high:
            middle = (low + high) // 2
            if holds(self._beginning_at(middle)):
                high = middle
            else:
                low = middle + 1
        return high

    async def _count(self, counter: TokenCounter, cut: int, *, with_images: bool = True) -> int | None:
        """Return the tokens behind a cut, 0 where they need no count; None if they do not fit."""
        prompt = self._beginning_at(cut)
        if _is_short(prompt, self._limit):
            return 0
        if 0 < self._load.max_prompt_characters < prompt.num_characters:
            return None
        count = await counter.count(self._load.model, prompt, with_images=with_images)
        return None if count is None or count > self._limit else count


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
    first = len(messages)
    for index, message in enumerate(messages):
        if message.role not in _TO_THE_MODEL:
            first = min(first, index)
    users = _undivided(messages, [index for index, message in enumerate(messages) if message.role == "user"])
    return [first, *(start for start in users if start > first)]


def step_starts(messages: Sequence[ChatMessage], last_turn: int) -> list[int]:
    """Return the indices at which the further steps of the last turn begin, which starts at `last_turn`."""
    steps = range(last_turn + 1, len(messages))
    return _undivided(messages, [i for i in steps if (messages[i - 1].role, messages[i].role) == ("tool", "assistant")])


def _undivided(messages: Sequence[ChatMessage], starts: Sequence[int]) -> list[int]:
    """Return the starts behind which no result belongs to a call before them."""
    candidates, kept = set(starts), list[int]()
    called: dict[str, int] = {}
    for index, message in enumerate(messages):
        if index in candidates:
            kept.append(index)
        called.update((call.id, index) for call in message.tool_calls)
        if message.tool_call_id is not None:
            call_index = called.get(message.tool_call_id, index)
            while kept and kept[-1] > call_index:
                kept.pop()
    return kept


def beginning_at(prompt: Prompt, start: int) -> Prompt:
    """Return a conversation without its messages before `start`, except those to the model and the last turn's user."""
    messages = prompt.messages or ()
    last_turn = turn_starts(messages)[-1]
    kept = [
        message
        for index, message in enumerate(messages)
        if index >= start or message.role in _TO_THE_MODEL or (message.role == "user" and index >= last_turn)
    ]
    shown = sorted(image.index for message in kept for image in message.images)
    places = {index: place for place, index in enumerate(shown)}
    for at, message in enumerate(kept):
        if message.images:
            images = tuple(replace(image, index=places[image.index]) for image in message.images)
            kept[at] = replace(message, images=images)
    return conversation_prompt(tuple(kept), prompt.chat, Images([prompt.images[index] for index in shown]))


async def _first(low: int, high: int, fits: Callable[[int], Awaitable[bool]]) -> int:
    """Return the first cut that fits, `high` at the latest, which is not asked about."""
    while low < high:
        middle = (low + high) // 2
        if await fits(middle):
            high = middle
        else:
            low = middle + 1
    return high


def _are_read(limits: ImageLimits, prompt: Prompt) -> bool:
    """Whether images are not too many, nor too large together as far as their sizes are known; see `references`."""
    num_pixels = sum(image.num_pixels or 0 for image in prompt.images)
    most = min(MAX_IMAGES, limits.max_images or MAX_IMAGES)
    return len(prompt.images) <= most and num_pixels <= limits.max_total_pixels


def _is_estimated_at_most(num_tokens: int, prompt: Prompt) -> bool:
    return prompt.estimated_tokens <= num_tokens


def _is_short(prompt: Prompt, limit: int) -> bool:
    """Whether a conversation fits for certain, by its length alone. The tokens of images depend on the model."""
    most = _MAX_TOKENS_PER_ESTIMATED * prompt.estimated_tokens + _MAX_TEMPLATE_TOKENS
    return not prompt.images and most <= limit
