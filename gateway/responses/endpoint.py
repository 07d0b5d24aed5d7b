"""`POST /v1/responses`, `/v1/responses/compact` and `/v1/responses/input_tokens`."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from gateway.admission.auth import Principal
from gateway.admission.shedding import UNKNOWN_RETRY_S
from gateway.api.answer import Answer, Asked, StreamParts
from gateway.api.endpoint import Endpoint, GenerationStart
from gateway.api.generation_starter import GenerationStarter, Membership
from gateway.api.large_bodies import LargeBodies
from gateway.api.output_reading import naming_conversation
from gateway.api.routes import KeyRoute, RouteServices, json_response
from gateway.api.schemas.checks import invalid_value
from gateway.api.schemas.names import STRICT, BodyRules
from gateway.errors import ApiError, cannot_start
from gateway.fleet.fleet_load import FleetLoad
from gateway.generation import Generation, Prompt
from gateway.media.intake import stored_for_s
from gateway.responses.answers import StreamedResponse, WholeResponse
from gateway.responses.background import BackgroundAnswer, FollowedResponse, QueuedResponse, submit_job
from gateway.responses.body import ItemBody, ResponseBody
from gateway.responses.conversation import compacting, user_messages
from gateway.responses.draft import RESPONSES, CompactedConversation, InputTokenCount, ResponseDraft, ResponseGeneration
from gateway.responses.items import listed_item
from gateway.responses.log import PieceBudget
from gateway.responses.reasoning_seal import opened
from gateway.responses.request import identified_item, own_items, parse_body, to_generation
from gateway.responses.store import History, ResponseStore
from gateway.responses.truncation import TokenCounter, Truncation
from shared.bounds import MAX_JOB_PRIORITY
from shared.tokenizer_calls import TokenizeCall

# While a model is loaded that is to count tokens.
_LOOK_S = 0.1


class ResponsesEndpoint(Endpoint):
    """Reads the conversation that a request continues, and stores the response.

    Methods that read a request raise an `ApiError`: 400 for invalid or unsupported input, and for an item that cannot
    be decrypted; 404 for a missing response or item, both naming it in `param`; 410 if its output is no longer kept;
    429 if the key has reached its read limit; 503 if NATS does not answer.
    """

    path = "/v1/responses"
    name = "responses"
    dialect = RESPONSES

    def __init__(self, store: ResponseStore, bodies: LargeBodies) -> None:
        super().__init__(bodies)
        self._store = store
        self._history = History(store)

    async def generation(self, body: bytes, principal: Principal, rules: BodyRules = STRICT) -> ResponseGeneration:
        """Parse the body, and read the stored items that it refers to."""
        request = await self._bodies.read(principal.tenant, len(body), partial(self._request, body, rules))
        principal.check_model(request.model)
        if not _refers(request):
            return await self._continued(request, principal, len(body), PieceBudget())
        async with self._store.reading(principal) as budget:
            # A conversation may be much larger than the request that continues it.
            return await self._continued(request, principal, len(body), budget, is_slow=True)

    async def _continued(
        self,
        request: ResponseBody,
        principal: Principal,
        num_bytes: int,
        budget: PieceBudget,
        *,
        is_slow: bool = False,
    ) -> ResponseGeneration:
        history: list[ItemBody] = []
        ancestors: tuple[str, ...] = ()
        if request.previous_response_id is not None:
            history, ancestors = await self._history.before(principal, request.previous_response_id, budget)
        sealed = (principal.tenant, request.model, self._store.seals)
        items = opened(own_items(request), "input", "reasoning", *sealed)
        items = await self._history.resolved(principal, items, budget)
        history = opened(history, "previous_response_id", "compaction", *sealed)
        items = opened(items, "input", "compaction", *sealed)
        read = partial(self._generation, request, history, items, ancestors)
        return await self._bodies.read(principal.tenant, num_bytes, read, is_slow=is_slow)

    def _request(self, body: bytes, rules: BodyRules) -> ResponseBody:
        return parse_body(body, rules)

    def _generation(
        self, request: ResponseBody, history: list[ItemBody], items: list[ItemBody], ancestors: tuple[str, ...]
    ) -> ResponseGeneration:
        generation = to_generation(request, history, items, ancestors)
        self._store.check_seals(generation.draft)
        if generation.draft.is_background and generation.priority > MAX_JOB_PRIORITY:
            message = f"'priority' of a background response must be at most {MAX_JOB_PRIORITY}, as that of any job."
            raise invalid_value("priority", message)
        return generation

    async def fitted(
        self, generation: Generation, load: FleetLoad | None, principal: Principal, services: RouteServices
    ) -> Generation:
        """Shorten a conversation that is too long, where that is asked for; it waits for a model that is loaded.

        Raises:
            ApiError: 503; no worker can count its tokens now. Its client tries again.
        """
        assert isinstance(generation, ResponseGeneration)
        if generation.may_truncate and load is not None and load.coming and Truncation(generation, load).is_needed:
            began = time.monotonic()
            load = await _once_served(load.model, generation.timeout_s, services)
            if generation.timeout_s is not None:
                left_s = max(_LOOK_S, generation.timeout_s - (time.monotonic() - began))
                generation = msgspec.structs.replace(generation, timeout_s=left_s)
        return await self._shortened(generation, load, principal, services, stored_for_s(generation))

    async def counted(
        self, generation: Generation, load: FleetLoad | None, principal: Principal, services: RouteServices
    ) -> Prompt:
        """Return the prompt whose tokens are to be counted; its images are not stored."""
        (prompt,) = (await self._shortened(generation, load, principal, services, None)).prompts
        return prompt

    async def _shortened(
        self,
        generation: Generation,
        load: FleetLoad | None,
        principal: Principal,
        services: RouteServices,
        ttl_s: float | None,
    ) -> Generation:
        assert isinstance(generation, ResponseGeneration)
        if not generation.may_truncate or load is None:
            return generation
        truncation = Truncation(generation, load)
        if not truncation.is_needed:
            return generation
        if not load.num_workers:
            raise _not_counted(load.model, "no_worker", UNKNOWN_RETRY_S)
        # The whole search counts as one request.
        lease = await services.limiter.admit(principal, 1, 0)
        try:
            counter = TokenCounter(services.tokenizer, services.images, principal.tenant, ttl_s)
            return await truncation.truncated(counter)
        except ApiError as error:
            raise naming_conversation(error, generation.conversation_field) from None
        finally:
            lease.release()

    def whole_answer(self, asked: Asked) -> Answer:
        """Return an answer as one JSON body."""
        if _draft(asked).is_background:
            return QueuedResponse(asked)
        return WholeResponse(asked, self._store)

    def streamed_answer(self, asked: Asked, parts: StreamParts) -> Answer:
        """Return an answer as a stream of typed events."""
        if _draft(asked).is_background:
            return FollowedResponse(asked, self._store, parts)
        return StreamedResponse(asked, self._store, parts)

    async def start(self, starter: GenerationStarter, asked: GenerationStart) -> Membership:
        """Let the generation begin, or make a job of it."""
        answer, caller = asked.answer, asked.caller
        if not isinstance(answer, BackgroundAnswer):
            return await super().start(starter, asked)
        if isinstance(answer, FollowedResponse):
            # Before there is a job: a client that is refused must not leave one behind that it knows no id of.
            self._store.add_follower(answer)
        generation = await starter.checked(asked.generation, asked.load, caller.tenant)
        assert isinstance(generation, ResponseGeneration)
        answer.queued(*await submit_job(self._store, generation, caller))
        # The tokens of a job are in the usage of the batch lane.
        return Membership(num_reserved=answer.num_tokens)


async def _once_served(model: str, timeout_s: float | None, services: RouteServices) -> FleetLoad:
    """Have a model loaded, and return its load once a worker serves it; `ApiError` 503 if none will within the time."""
    loop, fleet = asyncio.get_running_loop(), services.fleet
    deadline = loop.time() + (timeout_s or services.config.default_timeout_s)
    services.wake(model)
    while (load := fleet.reported_load(model)) is None or not load.num_workers:
        coming = None if load is None else load.coming
        if coming is None:
            raise _not_counted(model, "no_worker", UNKNOWN_RETRY_S)
        if coming.state == "failed":
            raise cannot_start(model)
        if coming.ready_in_s >= deadline - loop.time():
            raise _not_counted(model, "waking", coming.ready_in_s)
        await asyncio.sleep(_LOOK_S)
    return load


def _not_counted(model: str, code: str, retry_after_s: float) -> ApiError:
    message = f"No worker serves `{model}` at the moment: only one can count what 'truncation' keeps."
    return ApiError(503, message, code=code, retry_after_s=retry_after_s)


def _refers(request: ResponseBody) -> bool:
    items = request.input if isinstance(request.input, list) else []
    return request.previous_response_id is not None or any(item.type == "item_reference" for item in items)


def _draft(asked: Asked) -> ResponseDraft:
    assert isinstance(asked.generation, ResponseGeneration)
    return asked.generation.draft


def input_tokens_route(services: RouteServices, endpoint: ResponsesEndpoint) -> KeyRoute:
    """Return the route, which reads a body as `endpoint` does."""

    async def count(request: Request, principal: Principal) -> Response:
        generation = await endpoint.generation(await request.body(), principal, services.body_rules(principal))
        load = services.fleet.load(services.model_or_only_one(principal, generation.model))
        prompt = await endpoint.counted(generation, load, principal, services)
        call = TokenizeCall(messages=prompt.messages, add_special_tokens=False, chat=prompt.chat)
        try:
            reply = await services.ask_tokenizer(principal, generation.model, call, prompt.images)
        except ApiError as error:
            raise naming_conversation(error, generation.conversation_field) from None
        return json_response(InputTokenCount("response.input_tokens", len(reply.token_ids)))

    return KeyRoute("POST", f"{endpoint.path}/input_tokens", count, endpoint.dialect)


class CompactEndpoint(ResponsesEndpoint):
    """Answers with the user's messages and a summary of everything. Stores nothing."""

    path = "/v1/responses/compact"
    name = "responses_compact"

    def _request(self, body: bytes, rules: BodyRules) -> ResponseBody:
        return compacting(parse_body(body, rules))

    def _generation(
        self, request: ResponseBody, history: list[ItemBody], items: list[ItemBody], ancestors: tuple[str, ...]
    ) -> ResponseGeneration:
        generation = super()._generation(request, history, items, ancestors)
        draft, kept = generation.draft, user_messages([*history, *items])
        kept = [identified_item(item, draft.id, index) for index, item in enumerate(kept)]
        return msgspec.structs.replace(generation, draft=msgspec.structs.replace(draft, input=kept))

    def whole_answer(self, asked: Asked) -> Answer:
        """Return an answer as one JSON body."""
        return _CompactedResponse(asked, self._store)


class _CompactedResponse(WholeResponse):
    def _send(self, response: dict[str, Any]) -> None:
        cut = response["incomplete_details"]
        conversation = CompactedConversation(
            response["id"],
            "response.compaction",
            response["created_at"],
            [*map(listed_item, self._draft.input), *response["output"]],
            response["usage"],
            UNSET if cut is None else cut,
        )
        self._respond(msgspec.json.encode(conversation))
