"""`POST /v1/responses/compact`: the items that a client goes on with in the place of a conversation."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET

from gateway.admission.auth import Principal
from gateway.api.answer import Answer
from gateway.api.endpoint import Asked
from gateway.api.schemas.known_names import STRICT, BodyRules
from gateway.responses.answers import WholeResponse
from gateway.responses.body import ResponseBody
from gateway.responses.compaction import compacting, user_messages
from gateway.responses.draft import ResponseGeneration
from gateway.responses.endpoint import Conversation, ResponsesEndpoint
from gateway.responses.items import listed_item
from gateway.responses.operations import CompactedConversation
from gateway.responses.request import identified_item, parse_body


class CompactEndpoint(ResponsesEndpoint):
    """Answers with the user's messages and a summary of everything. Stores nothing."""

    path = "/v1/responses/compact"
    name = "responses_compact"

    async def generation(self, body: bytes, principal: Principal, rules: BodyRules = STRICT) -> ResponseGeneration:
        """Parse the body, and read what it refers to."""
        read = partial(parse_body, body, rules)
        request = compacting(await self._bodies.read(principal.tenant, len(body), read))
        return await self.continued(request, principal, len(body), self._compacted)

    def _compacted(self, request: ResponseBody, conversation: Conversation) -> ResponseGeneration:
        generation = self.to_generation(request, conversation)
        draft = generation.draft
        kept = user_messages([*conversation.history, *conversation.items])
        kept = [identified_item(item, draft.id, index) for index, item in enumerate(kept)]
        return msgspec.structs.replace(generation, draft=msgspec.structs.replace(draft, input=kept))

    def whole_answer(self, asked: Asked) -> Answer:
        """Return an answer as one JSON body."""
        return _CompactedResponse(asked, self._keeping(asked))


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
