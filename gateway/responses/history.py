"""The conversation before a request: the responses that it continues, and the items that it refers to by their ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from gateway.admission.auth import Principal
from gateway.api.schemas.checks import invalid_value, missing_parameter
from gateway.errors import ApiError
from gateway.responses.body import ItemBody
from gateway.responses.items import is_response_id, response_of
from gateway.responses.log import PieceBudget, ResponseRecord, has_ended, turn_of
from gateway.responses.store import ResponseStore

MAX_ANCESTORS = 1000
_MAX_REFERENCES = 1000


class History:
    """Reads conversations from the store. Keeps nothing."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def before(
        self, principal: Principal, response_id: str, budget: PieceBudget
    ) -> tuple[list[ItemBody], tuple[str, ...]]:
        """Return the items of the conversation that ends with a response, and the ids of its responses, oldest first.

        Raises:
            ApiError: 400 when a response is not there any more, not complete, or of a model that the key may not use.
        """
        last = await self._previous(principal, response_id, budget)
        ancestors = (*last.draft.ancestors, response_id)
        if len(ancestors) > MAX_ANCESTORS:
            message = f"The conversation has {len(ancestors)} responses; at most {MAX_ANCESTORS} are allowed."
            raise invalid_value("previous_response_id", message)
        found = await self._store.get_all(principal.tenant, last.draft.ancestors, budget)
        records: list[ResponseRecord] = []
        for ancestor, record in zip(ancestors, [*found, last], strict=True):
            # One that a key may not read by itself, it does not read through a later one either.
            if record is None or not principal.can_use(record.model):
                raise _not_found(ancestor)
            records.append(record)
        read = partial(_turns, records)
        return await self._store.bodies.read_kept(principal.tenant, budget.num_bytes, read), ancestors

    async def resolved(self, principal: Principal, items: list[ItemBody], budget: PieceBudget) -> list[ItemBody]:
        """Return items with those that are references replaced by what they refer to.

        Raises:
            ApiError: 404 when an item is not there; 400 when a reference names none, one is referred to twice, or they
                are too many.
        """
        places = _references(items)
        if not places:
            return items
        _check_references(places)
        ids = sorted({found for item_id in places.values() if (found := response_of(item_id)) is not None})
        records = await self._store.get_all(principal.tenant, ids, budget)
        usable = [record for record in records if record is not None and principal.can_use(record.model)]
        turns = await self._store.bodies.read_kept(principal.tenant, budget.num_bytes, partial(_turns, usable))
        known = {item.id: item for item in turns}
        resolved = list(items)
        for index, item_id in places.items():
            if item_id not in known:
                where = f"input.[{index}].id"
                raise ApiError(404, f"Item with id '{item_id}' not found.", param=where, code="item_not_found")
            resolved[index] = known[item_id]
        return resolved

    async def _previous(self, principal: Principal, response_id: str, budget: PieceBudget) -> ResponseRecord:
        record = await self._store.get(principal.tenant, response_id, budget) if is_response_id(response_id) else None
        if record is None or not principal.can_use(record.model):
            raise _not_found(response_id)
        if not has_ended(record):
            message = f"Previous response with id '{response_id}' is still in progress. Wait for its end."
            raise invalid_value("previous_response_id", message)
        return record


def _turns(records: list[ResponseRecord]) -> list[ItemBody]:
    return [item for record in records for item in turn_of(record)]


def _references(items: Sequence[ItemBody]) -> dict[int, str]:
    """Return the ids that items refer to, by their places."""
    places: dict[int, str] = {}
    for index, item in enumerate(items):
        if item.type == "item_reference":
            if not item.id:
                raise missing_parameter(f"input.[{index}].id")
            places[index] = item.id
    return places


def _check_references(places: Mapping[int, str]) -> None:
    seen = set[str]()
    for index, item_id in places.items():
        # Twice the same item would not count twice against the budget, but be stored and sent twice.
        if item_id in seen:
            raise invalid_value(f"input.[{index}].id", f"Item with id '{item_id}' is referred to twice. Do it once.")
        seen.add(item_id)
    if len(places) > _MAX_REFERENCES:
        message = f"'input' has {len(places)} references; at most {_MAX_REFERENCES} are allowed."
        raise invalid_value("input", message)


def _not_found(response_id: str) -> ApiError:
    return ApiError(
        400,
        f"Previous response with id '{response_id}' not found.",
        param="previous_response_id",
        code="previous_response_not_found",
    )
