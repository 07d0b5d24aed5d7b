"""What the subject of a batch job says, which permissions protect, and what the job itself may say beside that."""

from __future__ import annotations

from shared.messages import Request
from shared.subjects import decode_name, is_batch_reply, reply_prefix


def queue_names(subject: str) -> tuple[str, str]:
    """Return the model and the tenant of a queue's subject, `hr.req.<model>.batch.<tenant>`.

    Raises:
        InvalidNameError: One of them is not the encoding of a name.
    """
    _, _, model, _, tenant = subject.split(".")
    return decode_name(model), decode_name(tenant)


def mismatch(request: Request, model: str, tenant: str) -> str | None:
    """Return what a job claims that its subject does not allow, or None."""
    if request.tenant != tenant:
        return f"the job says tenant {request.tenant[:64]!r}, but was published for tenant {tenant[:64]!r}"
    if request.model != model:
        return f"the job says model {request.model[:64]!r}, but was published for model {model[:64]!r}"
    if request.reply is not None and not is_batch_reply(request.reply, tenant):
        return f"reply must be a subject that begins with {reply_prefix(tenant)!r}"
    return None
