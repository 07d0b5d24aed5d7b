"""Reads batch jobs: what a message asks for, as far as its subject allows it, which permissions protect."""

from __future__ import annotations

import msgspec

from gpu_worker.consumer.queued_message import QueuedMessage, UnreadableRequestError, read_request
from shared.bounds import MAX_JOB_PRIORITY, MAX_JOB_WEIGHT
from shared.errors import InvalidNameError
from shared.messages import Request
from shared.sampling import SamplingDefaults, with_advice
from shared.subjects import decode_name, is_batch_reply, reply_prefix


class NotAJobError(Exception):
    """A message is not a job of a tenant, so no result is waited for; the text is for the log."""

    def __init__(self, text: str, cause: Exception) -> None:
        super().__init__(text)
        self.cause = str(cause)


class RefusedJobError(Exception):
    """A job can never run; the text says why."""

    def __init__(self, problem: str, request: Request) -> None:
        super().__init__(problem)
        self.request = request


def read_job(message: QueuedMessage, defaults: SamplingDefaults | None) -> Request:
    """Return the request of a job, with the names of its subject and with what its publisher has left out.

    Raises:
        NotAJobError: The subject or the message is none of a job.
        RefusedJobError: The job cannot be read, or claims something that its subject does not allow.
    """
    try:
        model, tenant = _queue_names(message.subject)
        request = read_request(message.data)
    except InvalidNameError as error:
        # Publishers may use encoded names only.
        raise NotAJobError("batch subject is malformed", error) from None
    except UnreadableRequestError as error:
        if error.envelope is None:
            raise NotAJobError("message is not a batch request", error) from None
        identity, reply = error.envelope.id, error.envelope.reply
        refused = Request(id=identity, model=model, tenant=tenant, lane="batch", reply=reply, created=message.stored_at)
        raise RefusedJobError(str(error), refused) from None
    problem = _mismatch(request, model, tenant)
    request = msgspec.structs.replace(
        request,
        lane="batch",
        model=model,
        tenant=tenant,
        # A publisher asks no gateway, so nothing else bounds it.
        priority=min(request.priority, MAX_JOB_PRIORITY),
        weight=min(request.weight, MAX_JOB_WEIGHT),
        # The result of a job that does not say when it was made reports when it was stored.
        created=request.created or message.stored_at,
        sampling=with_advice(request.sampling, request.left_out, defaults),
    )
    if problem is not None:
        raise RefusedJobError(problem, request)
    return request


def _queue_names(subject: str) -> tuple[str, str]:
    """Return the model and the tenant of a queue's subject, `hr.req.<model>.<batch or background>.<tenant>`."""
    _, _, model, _, tenant = subject.split(".")
    return decode_name(model), decode_name(tenant)


def _mismatch(request: Request, model: str, tenant: str) -> str | None:
    """Return the error message for a claim that the job's subject does not allow, or None."""
    if request.tenant != tenant:
        return f"the job says tenant {request.tenant[:64]!r}, but was published for tenant {tenant[:64]!r}"
    if request.model != model:
        return f"the job says model {request.model[:64]!r}, but was published for model {model[:64]!r}"
    if request.reply is not None and not is_batch_reply(request.reply, tenant):
        return f"reply must be a subject that begins with {reply_prefix(tenant)!r}"
    # What a job has had is in its record, which workers write.
    if request.evicted is not None:
        return "evicted: leave it out, because a job has evicted nothing before it runs"
    if request.emitted:
        return "emitted: leave it out, because a job has emitted nothing before it runs"
    if request.ready is not None:
        return "ready: leave it out, because no worker has computed a job before it runs"
    return None
