"""The stored responses: from the log, with the present state of their jobs.

Owns the streams of this process that follow a job.

`History` reads from them the conversation before a request: the responses that it continues, and the items that it
refers to by their ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from gateway.admission.auth import Principal
from gateway.admission.hold_times import HoldTimes
from gateway.admission.stored_reads import StoredReads
from gateway.api.large_bodies import LargeBodies
from gateway.api.schemas.checks import invalid_value, missing_parameter, unsupported_parameter
from gateway.config import SECRET_VARIABLE
from gateway.errors import ApiError, whole_seconds
from gateway.responses.body import ItemBody
from gateway.responses.draft import ResponseDraft, ResponseGeneration, response_fields
from gateway.responses.items import is_response_id, response_of
from gateway.responses.job import JobReader, error_of, status_of
from gateway.responses.job_queue import JobQueue, JobRef
from gateway.responses.log import PieceBudget, ResponseLog, ResponseLogError, ResponseRecord, has_ended, turn_of
from gateway.responses.names import ENCRYPTED_REASONING
from gateway.responses.output import ResponseOutput
from gateway.responses.reasoning_seal import ReasoningSeals, Seal
from shared.log_limit import LogLimit
from shared.messages import BatchResult

# Streams of one tenant that follow jobs in one process: each asks NATS several times a second.
MAX_FOLLOWERS = 256
# A text with many calls takes about as long as a body of that many times its size: 64 kB take 0.14 s.
_TEXT_COST = 16

Result = TypeVar("Result")

_log = logging.getLogger(__name__)


class Following(Protocol):
    """A stream of this process that follows a job of a tenant."""

    tenant: str

    def cut(self, error: ApiError) -> None:
        """End the stream with an error."""


class ResponseStore:
    """Reads, writes and deletes responses of a tenant. Where NATS does not answer, methods raise an `ApiError` 503.

    Attributes:
        bodies: Reads large texts in a thread.
        followers: The streams that follow a job, or will as soon as it is queued.
        seals: What encrypts reasoning and summaries; None where the operator has given no secret for it.
    """

    def __init__(
        self,
        log: ResponseLog,
        jobs: JobQueue,
        seals: ReasoningSeals | None = None,
        bodies: LargeBodies | None = None,
        reads: StoredReads | None = None,
    ) -> None:
        """Work with these; large results are read by `bodies`, and requests read in the turns of `reads`."""
        self.bodies = bodies or LargeBodies()
        self._reads = reads or StoredReads()
        self.log = log
        self.jobs = jobs
        self.seals = seals
        self.followers: set[Following] = set()
        self._log_limit = LogLimit(_log)
        # Since when each tenant's streams run, and how long they usually do: that is when the next one ends.
        self._tenants: defaultdict[str, HoldTimes] = defaultdict(HoldTimes)

    @contextlib.asynccontextmanager
    async def reading(self, principal: Principal) -> AsyncIterator[PieceBudget]:
        """Wait for a turn of the tenant, and count what a request reads; `ApiError` as `StoredReads.turn`."""
        async with self._reads.turn(principal, "responses") as size:
            budget = PieceBudget()
            try:
                yield budget
            finally:
                size.num_bytes = budget.num_bytes

    def add_follower(self, follower: Following) -> None:
        """Count a stream of a tenant until `remove_follower`; raise `ApiError` 429 if the tenant has enough."""
        streams, now = self._tenants[follower.tenant], time.monotonic()
        if streams.num_held >= MAX_FOLLOWERS:
            wait_s = streams.retry_after_s(now)
            message = (
                f"This gateway follows {MAX_FOLLOWERS} responses of this tenant already. "
                f"Try again in {whole_seconds(wait_s)} s, when one of their streams is expected to have ended."
            )
            raise ApiError(429, message, code="too_many_streams", retry_after_s=wait_s)
        self.followers.add(follower)
        streams.begin(follower, now)

    def remove_follower(self, follower: Following) -> None:
        """Count a stream no longer, if it was counted."""
        if follower not in self.followers:
            return
        self.followers.remove(follower)
        streams = self._tenants[follower.tenant]
        streams.end(follower, time.monotonic())
        if streams.is_empty:
            del self._tenants[follower.tenant]

    def cut_followers(self, error: ApiError) -> None:
        """End all streams that follow a job. Their clients go on with another gateway."""
        for follower in list(self.followers):
            follower.cut(error)

    async def keep(self, tenant: str, generation: ResponseGeneration, response: dict[str, Any]) -> bool:
        """Store a response; return False if it is not stored.

        A failed store does not fail the request: the client still gets its answer, marked as not stored.
        """
        record = ResponseRecord(tenant, generation.name, generation.draft, msgspec.json.encode(response))
        try:
            await self.log.put(record)
        except ResponseLogError as error:
            self._log_limit.warning(tenant, "response not stored: %s", error)
            return False
        return True

    def seal_of(self, tenant: str, model: str) -> Seal | None:
        """Return the seal for the reasoning of a tenant's responses by a model, if there is a secret."""
        return None if self.seals is None else partial(self.seals.seal, tenant, model)

    def check_seals(self, draft: ResponseDraft) -> None:
        """Refuse to encrypt without a secret; `ApiError` 400 that names the operator's setting."""
        if self.seals is not None:
            return
        reason = f"needs a secret that all gateways share, and the operator has set none ({SECRET_VARIABLE})."
        if draft.is_compaction:
            raise unsupported_parameter("input", f"Compaction {reason} Shorten the conversation at the client.")
        if draft.has_encrypted_reasoning:
            raise unsupported_parameter("include", f"'{ENCRYPTED_REASONING}' {reason} Leave it out of 'include'.")

    async def get(self, tenant: str, response_id: str, budget: PieceBudget | None = None) -> ResponseRecord | None:
        """Return a response as it is now, or None if there is none; see `ResponseLog.get`.

        Raises:
            ApiError: 503, NATS does not answer; 400, the budget does not suffice; 410, its output is no longer kept.
        """
        record = await self.log.get(tenant, response_id, budget)
        return None if record is None else await self._current(record, budget)

    async def get_all(
        self, tenant: str, response_ids: Sequence[str], budget: PieceBudget
    ) -> list[ResponseRecord | None]:
        """Return several responses as they are now, None for each that is missing; raises as `get`."""
        return list(await asyncio.gather(*(self.get(tenant, response_id, budget) for response_id in response_ids)))

    async def cancel(self, record: ResponseRecord, budget: PieceBudget) -> ResponseRecord:
        """End a background response unless it has ended, and return it as it is then; `ApiError` 410 as `get`."""
        ref = job_of(record)
        if ref is not None and not has_ended(record):
            await self.jobs.cancel(ref)
            record = await self._current(record, budget)
        return record

    async def delete(self, record: ResponseRecord) -> None:
        """Forget a response; one that is still computed is cancelled."""
        await self.log.delete(record.tenant, record.draft.id)
        ref = job_of(record)
        if ref is not None:
            await self.jobs.forget(ref)

    async def _current(self, record: ResponseRecord, budget: PieceBudget | None = None) -> ResponseRecord:
        ref = job_of(record)
        if ref is None:
            return record
        result = await self.jobs.result(ref)
        if result is None:
            is_running = (await self.jobs.state(ref)).is_running
            response = msgspec.json.encode(response_fields(record.draft, "in_progress" if is_running else "queued"))
        else:
            if budget is not None:
                budget.num_bytes += len(result.text)
            read = partial(_ended_json, record, result, self.seal_of(record.tenant, record.model))
            response = await self.read_text(record.tenant, len(result.text), read)
        return msgspec.structs.replace(record, response=response)

    async def read_text(self, tenant: str, num_characters: int, read: Callable[[], Result]) -> Result:
        """Return what `read` makes of the text of a job, in a thread if it is long."""
        return await self.bodies.read_kept(tenant, _TEXT_COST * num_characters, read)


def job_of(record: ResponseRecord) -> JobRef | None:
    """Return the job that computes a response, if one does."""
    job = record.job
    return None if job is None else JobRef(record.tenant, record.served or record.model, record.draft.id, job)


def ended_response(
    record: ResponseRecord, result: BatchResult, reader: JobReader, output: ResponseOutput
) -> dict[str, Any]:
    """Return a response whose job has ended; `reader` has read its text into `output`."""
    draft, status = record.draft, status_of(result)
    has_usage = status in ("completed", "incomplete")
    return response_fields(
        draft,
        status,
        output.items,
        usage=reader.usage(result) if has_usage else None,
        error=error_of(result),
        completed_at=int(result.completed) if status == "completed" else None,
    )


def _ended_json(record: ResponseRecord, result: BatchResult, seal: Seal | None) -> bytes:
    output = ResponseOutput(record.draft, seal=seal)
    return msgspec.json.encode(ended_response(record, result, read_result(record, result, output), output))


def read_result(record: ResponseRecord, result: BatchResult, output: ResponseOutput) -> JobReader:
    """Read the whole text of a job."""
    assert record.job is not None
    reader = JobReader(record.job.reading, output)
    reader.read(result.text, in_reasoning=result.in_reasoning)
    reader.finish(is_complete=status_of(result) == "completed")
    return reader


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
    places: dict[int, str] = {}
    seen = set[str]()
    for index, item in enumerate(items):
        if item.type == "item_reference":
            if not item.id:
                raise missing_parameter(f"input.[{index}].id")
            # Twice the same item would not count twice against the budget, but be stored and sent twice.
            if item.id in seen:
                raise invalid_value(
                    f"input.[{index}].id", f"Item with id '{item.id}' is referred to twice. Do it once."
                )
            seen.add(item.id)
            places[index] = item.id
    if len(places) > _MAX_REFERENCES:
        message = f"'input' has {len(places)} references; at most {_MAX_REFERENCES} are allowed."
        raise invalid_value("input", message)
    return places


def _not_found(response_id: str) -> ApiError:
    message = f"Previous response with id '{response_id}' not found."
    return ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
