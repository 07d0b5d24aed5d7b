"""What is kept of a response, as it lies in the log."""

from __future__ import annotations

import msgspec
from msgspec import Raw, Struct

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


class _DraftInPieces(ResponseDraft, frozen=True, kw_only=True):
    input: list[Raw]  # type: ignore[assignment]


class _RecordInPieces(ResponseRecord, frozen=True, array_like=True, tag="response_1"):
    draft: _DraftInPieces


class _Output(Struct):
    status: Status
    output: list[ItemBody] = []


_decode_pieces = msgspec.msgpack.Decoder(_RecordInPieces).decode
_decode_item = msgspec.msgpack.Decoder(ItemBody).decode
_decode_output = msgspec.json.Decoder(_Output).decode


def decode_record(payload: bytes) -> ResponseRecord:
    """Read a record.

    Its items are decoded one by one: a decoder holds Python's lock until it is done, also in a thread.

    Raises:
        msgspec.MsgspecError: It is none, or of another version.
    """
    pieces = _decode_pieces(payload)
    fields = {name: getattr(pieces.draft, name) for name in ResponseDraft.__struct_fields__}
    draft = ResponseDraft(**fields | {"input": [_decode_item(item) for item in pieces.draft.input]})
    return ResponseRecord(pieces.tenant, pieces.model, draft, pieces.response, pieces.job)


def turn_of(record: ResponseRecord) -> list[ItemBody]:
    """Return what a response has added to its conversation: the items of its request, then those of its output."""
    return [*record.draft.input, *_decode_output(record.response).output]


def has_ended(record: ResponseRecord) -> bool:
    """Say whether a response, as it is in the record, changes no more."""
    return _decode_output(record.response).status not in ("queued", "in_progress")
