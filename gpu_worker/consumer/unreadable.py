"""What can still be said about a request that cannot be decoded: who asked, and which field is wrong."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Struct

from shared.bounds import Epoch, ReplySubject, RequestId
from shared.messages import UNDECODABLE, Request, decode_request
from shared.request_fields import UnknownFieldError

_PATH = re.compile(r"at `(?:key` in `)?\$\.(\w+)(?:\.(\w+))?")


class RequestEnvelope(Struct, frozen=True):
    """The fields that are needed to answer."""

    id: RequestId
    epoch: Epoch = 0
    reply: ReplySubject | None = None


class UnreadableRequestError(Exception):
    """A payload is not a request.

    Attributes:
        envelope: Where to send the error; None when that cannot be read either.
        param: Field at fault.
    """

    def __init__(self, error: Exception, envelope: RequestEnvelope | None) -> None:
        super().__init__(str(error)[:500] or type(error).__name__)
        self.envelope = envelope
        if isinstance(error, UnknownFieldError):
            self.param = error.param
            return
        path = _PATH.search(str(error))
        self.param = (path[2] if path and path[1] == "sampling" and path[2] else path[1]) if path else "request"


def read_request(payload: bytes) -> Request:
    """Decode a request; `UnreadableRequestError` if the payload is not one, whatever is wrong with it."""
    try:
        return decode_request(payload)
    except UNDECODABLE as error:
        raise UnreadableRequestError(error, _envelope(payload)) from None


def _envelope(payload: bytes) -> RequestEnvelope | None:
    decoder: Any = msgspec.json if payload[:1] == b"{" else msgspec.msgpack
    try:
        envelope: RequestEnvelope = decoder.decode(payload, type=RequestEnvelope)
    except UNDECODABLE:
        return None
    return envelope
