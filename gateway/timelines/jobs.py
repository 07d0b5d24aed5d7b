"""Timelines of batch jobs, lines of `/v1/batches` and background responses: read from their records in NATS.

Results are kept for days, so these timelines outlive every process. They tell of the last attempt alone.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
from nats.js import JetStreamContext

from shared.batch_progress import BatchProgress
from shared.errors import InvalidNameError
from shared.kept_results import JobEnd
from shared.messages import UNDECODABLE, BatchResult
from shared.publication import messages_after
from shared.streams import ENDS_STREAM, PROGRESS_STREAM, RESULTS_STREAM
from shared.subjects import decode_name, encode_name
from shared.timeline import MAX_SEQUENCES, Attempt, SequenceLife, Timeline

_ANSWERED = ("stop", "length")
_NO_RESULT = "its result is no longer kept"


class JobTimelines:
    """Finds jobs by their ids, of all tenants."""

    def __init__(self, js: JetStreamContext) -> None:
        self._js = js
        self._decode_result = msgspec.json.Decoder(BatchResult).decode

    async def find(self, job_id: str) -> list[Timeline]:
        """Return the jobs with an id, or those of the batch line with it; raises NATS's errors and `OSError`."""
        found = await self._jobs(job_id)
        if not found and job_id.startswith("batch_"):
            # One job for each choice of a line.
            parts: list[Timeline] = []
            while len(parts) < MAX_SEQUENCES and (part := await self._jobs(f"{job_id}-{len(parts)}")):
                parts.append(part[0])
            found = [_line(job_id, parts)] if parts else []
        return found

    async def _jobs(self, job_id: str) -> list[Timeline]:
        try:
            token = encode_name(job_id)
        except InvalidNameError:
            return []
        for stream, kind in ((RESULTS_STREAM, "result"), (ENDS_STREAM, "end"), (PROGRESS_STREAM, "progress")):
            found = []
            async for _, message in messages_after(self._js, stream, f"hr.{kind}.*.{token}"):
                with suppress(*UNDECODABLE, InvalidNameError):
                    tenant = decode_name((message.subject or "").split(".")[2])
                    found.append(self._timeline(kind, job_id, tenant, message.data or b""))
                if len(found) == MAX_SEQUENCES:
                    break
            if found:
                return found
        return []

    def _timeline(self, kind: str, job_id: str, tenant: str, data: bytes) -> Timeline:
        if kind == "result":
            return _of_result(self._decode_result(data))
        if kind == "end":
            end = msgspec.msgpack.decode(data, type=JobEnd)
            told: dict[str, Any] = {"began": end.ended, "outcome": _outcome(end.finish), "error": _NO_RESULT}
        else:
            progress = msgspec.msgpack.decode(data, type=BatchProgress)
            epoch = progress.num_delivered
            attempt = Attempt(epoch=epoch, why=_why(epoch + 1), tokens=len(progress.token_ids))
            told = {"began": 0.0, "sequences": [SequenceLife(job_id, [attempt])]}
        return Timeline(id=job_id, gateway="", route="job", tenant=tenant, **told)


def _of_result(result: BatchResult) -> Timeline:
    receipt = result.receipt
    began = result.created or (result.completed if receipt is None else receipt.taken - receipt.queued_s)
    ended_s = max(0.0, result.completed - began)
    claimed_s = None if receipt is None else min(ended_s, max(0.0, receipt.taken - began))
    attempts = []
    if result.attempt:
        attempts.append(
            Attempt(
                epoch=result.attempt - 1,
                why=_why(result.attempt),
                claimed_s=claimed_s,
                worker=result.worker or None,
                ended_s=ended_s,
                end=result.finish,
                tokens=result.completion_tokens,
                receipt=receipt,
            )
        )
    first_s = None if receipt is None or receipt.first_s is None or claimed_s is None else claimed_s + receipt.first_s
    return Timeline(
        id=result.id,
        gateway="",
        began=began,
        route="job",
        model=result.model,
        tenant=result.tenant,
        outcome=_outcome(result.finish),
        error=result.error,
        admitted_s=0.0,
        first_token_s=first_s,
        ended_s=ended_s,
        prompt_tokens=result.prompt_tokens,
        cached_tokens=result.cached_tokens,
        completion_tokens=result.completion_tokens,
        sequences=[SequenceLife(result.id, attempts)],
    )


def _line(line_id: str, parts: list[Timeline]) -> Timeline:
    """Return the timeline of a line, whose jobs began together."""
    firsts = [each.first_token_s for each in parts if each.first_token_s is not None]
    failed = next((each for each in parts if each.outcome != "completed"), parts[0])
    return msgspec.structs.replace(
        parts[0],
        id=line_id,
        outcome=failed.outcome,
        error=failed.error,
        first_token_s=min(firsts, default=None),
        ended_s=max(each.ended_s for each in parts),
        completion_tokens=sum(each.completion_tokens for each in parts),
        sequences=[life for each in parts for life in each.sequences],
    )


def _outcome(finish: str) -> str:
    return "completed" if finish in _ANSWERED else finish


def _why(attempt: int) -> str:
    return "first" if attempt <= 1 else "delivered_again"
