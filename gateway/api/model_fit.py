"""Fits a generation to its model: refuses those that no worker could answer, and applies the model's defaults.

An `ApiError` is 400 for what the model cannot do, 503 while too few of its workers run or some are being updated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

from gateway.admission.shedding import UNKNOWN_RETRY_S
from gateway.api.output_reading import is_costly, with_reading
from gateway.api.schemas.parameters import without_ranking
from gateway.errors import ApiError
from gateway.fleet.fleet import Fleet
from gateway.fleet.fleet_load import FleetLoad
from gateway.generation import Generation, ImageSource, Prompt, ToolUse
from shared.errors import BadRequestError, prompt_too_long
from shared.features import (
    CACHE_HINTS,
    IMAGES,
    KV_BUDGET,
    KV_SCORES,
    LOGPROB_TOKENS,
    POOLING_OPTIONS,
    TEXT_PARTS,
    WATERMARK,
)
from shared.pooling import Task
from shared.sampling import SamplingDefaults, check_markable, with_advice
from shared.watermark import derived_key

# What errors say that a model can do.
_TASKS: Mapping[Task, str] = MappingProxyType(
    {"generate": "generate text", "embed": "make embeddings", "score": "score texts for a query"}
)


class ModelReading:
    """Reads generations as their models do. Many or large tools take a while: one such generation at a time."""

    def __init__(self) -> None:
        self._one_costly = asyncio.Lock()

    async def read(self, generation: Generation, load: FleetLoad) -> Generation:
        """Return the generation as its model's defaults and chat format make it."""
        if generation.tools is not None:
            check_format_is_known(generation.tools, generation, load)
        generation = with_defaults(_as_understood(generation, load), load.sampling_defaults)
        check_watermark(generation)
        if not is_costly(generation):
            return with_reading(generation, load.chat_format)
        async with self._one_costly:
            return await asyncio.to_thread(with_reading, generation, load.chat_format)


def with_adapter(generation: Generation, fleet: Fleet, tenant: str | None = None) -> Generation:
    """Return a generation with the adapter that a tenant means by its model's name, settled from here on."""
    found = fleet.find_adapter(generation.model, tenant)
    if found is None:
        return generation
    if found.digest is None:
        message = f"Not all workers of `{found.model}` can serve the adapter `{generation.model}` at the moment."
        if not fleet.named_adapters.is_current:
            message = "This gateway cannot read what names of adapters mean at the moment."
        raise _no_worker(message)
    return msgspec.structs.replace(generation, base=found.model, adapter=found.digest)


def with_defaults(generation: Generation, defaults: SamplingDefaults | None) -> Generation:
    """Return a generation with its model's defaults for the parameters that its client left out."""
    sampling = with_advice(generation.sampling, generation.left_out, defaults)
    if sampling is generation.sampling:
        return generation
    is_deterministic = generation.deterministic
    if sampling.temperature == 0 and not is_deterministic:
        # As for clients that ask for a temperature of 0: equal requests look equal.
        sampling, is_deterministic = msgspec.structs.replace(sampling, seed=0), True
    advised = msgspec.structs.replace(generation, sampling=sampling, deterministic=is_deterministic)
    return without_ranking(advised) if sampling.temperature == 0 else advised


def check_format_is_known(use: ToolUse, generation: Generation, load: FleetLoad) -> None:
    """Refuse tools while no worker has reported the model's chat format: calls would be answered as text."""
    if load.num_workers or load.chat_format or not use.tools:
        return
    if all(prompt.chat is None or prompt.chat.template is None for prompt in generation.prompts):
        raise _no_worker(f"No worker serves `{load.model}` at the moment.")


def check_task(generation: Generation, load: FleetLoad) -> None:
    """Refuse tasks that no worker of the model serves, and features that workers of an earlier version ignore."""
    if load is None or load.num_workers == 0:
        return
    if generation.task in load.tasks:
        if (needed := _needed_features(generation)) and not load.features.issuperset(needed):
            raise _updating(load, "know what this request asks for")
        return
    wanted = _TASKS[generation.task]
    can = " and ".join(_TASKS[task] for task in sorted(load.tasks)) or "do nothing that is served"
    message = f"The model `{load.model}` cannot {wanted}: it can {can}. The worker's log says why."
    raise ApiError(400, message, param="model", code="unsupported_task")


def _needed_features(generation: Generation) -> list[str]:
    pooling, sampling = generation.pooling, generation.sampling
    if pooling is None:
        return [LOGPROB_TOKENS] * bool(sampling.logprob_token_ids) + [WATERMARK] * bool(sampling.watermark)
    is_plain = not pooling.raw and pooling.input_type is None and generation.truncate_prompt_tokens is None
    return [] if is_plain else [POOLING_OPTIONS]


def _as_understood(generation: Generation, load: FleetLoad) -> Generation:
    """Return a generation without the ends of content parts, if a worker of an earlier version would ignore them.

    All workers of a model make the same prompt of a conversation then, also those that a request moves to. Hints are
    left out, too: a worker of an earlier version refuses unknown fields of requests in JSON, as those with images are.
    """
    if CACHE_HINTS not in load.features:
        generation = msgspec.structs.replace(generation, cache_hints=None)
    if not load.num_workers or TEXT_PARTS in load.features:
        return generation
    return msgspec.structs.replace(generation, prompts=tuple(map(_without_parts, generation.prompts)))


def _without_parts(prompt: Prompt) -> Prompt:
    if prompt.messages is None or not any(message.part_lengths for message in prompt.messages):
        return prompt
    joined = tuple(msgspec.structs.replace(message, part_lengths=()) for message in prompt.messages)
    return msgspec.structs.replace(prompt, messages=joined)


def check_sees(images: Sequence[ImageSource], model: str | None, load: FleetLoad | None) -> None:
    """Refuse images for a model that reads text, or some of whose workers do not know images yet."""
    if not images or load is None or load.num_workers == 0 or IMAGES in load.features:
        return
    if IMAGES in load.some_features:
        raise _updating(load, "read images")
    where = images[0].where
    message = f"'{where}' is an image, and the model `{model or load.model}` reads text alone."
    raise ApiError(400, message, param=where, code="unsupported_image")


def check_budget(generation: Generation, load: FleetLoad) -> None:
    """Refuse a budget of KV cache for a model that cannot evict, or some of whose workers do not know budgets yet."""
    budget = generation.kv_budget
    if budget is None or load.num_workers == 0:
        return
    field, feature = ("kv_budget", KV_BUDGET) if budget.is_repeatable else ("kv_budget.policy", KV_SCORES)
    if feature in load.features:
        return
    if KV_BUDGET in load.some_features:
        raise _updating(load, f"know {field!r}")
    message = f"'kv_budget': the workers of `{load.model}` cannot evict tokens from the KV cache. Leave it out."
    raise ApiError(400, message, param="kv_budget", code="unsupported_kv_budget")


def _no_worker(message: str) -> ApiError:
    return ApiError(503, message, code="no_worker", retry_after_s=UNKNOWN_RETRY_S)


def _updating(load: FleetLoad, what: str) -> ApiError:
    return _no_worker(f"Not all workers of `{load.model}` {what} yet: they are being updated.")


def check_length(generation: Generation, load: FleetLoad) -> None:
    """Refuse a prompt that is too long for the context of the model, by its length alone."""
    if generation.truncate_prompt_tokens is not None:
        return
    for prompt in generation.prompts:
        if prompt.token_ids is not None:
            # The context holds at least one generated token too, where any is wanted.
            num, unit = len(prompt.token_ids), "tokens"
            limit = load.longest_model_len - (generation.pooling is None)
        else:
            num, limit, unit = prompt.num_characters, load.max_prompt_characters, "characters"
        if limit > 0 and num > limit:
            message = prompt_too_long(num, limit, unit, load.longest_model_len)
            param = "prompt" if prompt.messages is None else "messages"
            raise ApiError(400, message, param=param, code="context_length_exceeded")


def with_watermark(generation: Generation, secret: str | None) -> Generation:
    """Return a generation with what marks its text, where the tenant has a secret and text is generated."""
    if secret is None or generation.pooling is not None:
        return generation
    key = derived_key(secret, generation.served_model)
    return msgspec.structs.replace(generation, sampling=msgspec.structs.replace(generation.sampling, watermark=key))


def check_watermark(generation: Generation) -> None:
    """Refuse a generation that is to carry a watermark and leaves nothing to chance."""
    if generation.sampling.watermark is None:
        return
    try:
        check_markable(generation.sampling)
    except BadRequestError as error:
        raise ApiError(400, str(error), param=error.param, code=error.code) from None
