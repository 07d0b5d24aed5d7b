"""What is kept of a response, as it lies in the log."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from gateway.responses.body import ItemBody
from gateway.responses.draft import ResponseDraft, Status
from gateway.responses.job import BackgroundJob


class ResponseRecord(Struct, frozen=True, array_like=True, tag="response_1"):
    """One response.

    Attributes:
        tenant: Whose it is; compared with who asks, besides being part of the subject.
        model: Which it was asked of.
        draft: The response without its output, and the items of its request.
        response: JSON of the whole response; of one that is computed in the background, as it was at its begin.
        job: What computes it in the background.
    """

    tenant: str
    model: str
    draft: ResponseDraft
    response: bytes
    job: BackgroundJob | None = None


class _Output(Struct):
    status: Status
    output: list[ItemBody] = []


_decode_record = msgspec.msgpack.Decoder(ResponseRecord).decode
_decode_output = msgspec.json.Decoder(_Output).decode


def decode_record(payload: bytes) -> ResponseRecord:
    """Read a record.

    Raises:
        msgspec.MsgspecError: It is none, or of another version.
    """
    return _decode_record(payload)


def turn_of(record: ResponseRecord) -> list[ItemBody]:
    """Return what a response has added to its conversation: the items of its request, then those of its output."""
    return [*record.draft.input, *_decode_output(record.response).output]


def has_ended(record: ResponseRecord) -> bool:
    """Say whether a response, as it is in the record, changes no more."""
    return _decode_output(record.response).status not in ("queued", "in_progress")
