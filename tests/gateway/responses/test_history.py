"""The conversation before a request, read for keys that may use all of its models and for keys that may not."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from gateway.admission.auth import Principal
from gateway.errors import ApiError
from gateway.responses.body import ItemBody
from gateway.responses.draft import ResponseDraft, response_fields
from gateway.responses.items import new_response_id
from gateway.responses.log import PieceBudget, ResponseRecord
from gateway.responses.store import History, ResponseStore


class RecordsInMemory(ResponseStore):
    """Responses that have ended, without NATS."""

    def __init__(self, records: list[ResponseRecord]) -> None:
        super().__init__(cast("Any", None), cast("Any", None))
        self.records = {record.draft.id: record for record in records}

    async def get(self, tenant: str, response_id: str, budget: PieceBudget | None = None) -> ResponseRecord | None:
        return self.records.get(response_id)


def chain(*models: str) -> list[ResponseRecord]:
    """Responses of which each continues the one before it, each of its own model."""
    records: list[ResponseRecord] = []
    for model in models:
        ancestors = tuple(record.draft.id for record in records)
        item = ItemBody(type="message", role="user", content=f"to {model}")
        draft = ResponseDraft(id=new_response_id(), created_at=1, parameters=b"{}", input=[item], ancestors=ancestors)
        response = msgspec.json.encode(response_fields(draft, "completed"))
        records.append(ResponseRecord("acme", model, draft, response))
    return records


async def test_every_response_of_a_conversation_must_be_of_a_model_that_the_key_may_use() -> None:
    records = chain("secret", "open", "open")
    history = History(RecordsInMemory(records))
    last = records[-1].draft.id
    items, ancestors = await history.before(Principal("key", "acme"), last, PieceBudget())
    assert [item.content for item in items] == ["to secret", "to open", "to open"]
    assert ancestors == tuple(record.draft.id for record in records)
    with pytest.raises(ApiError) as refusal:
        await history.before(Principal("key", "acme", frozenset({"open"})), last, PieceBudget())
    assert (refusal.value.status, refusal.value.code) == (400, "previous_response_not_found")
    assert records[0].draft.id in refusal.value.message
