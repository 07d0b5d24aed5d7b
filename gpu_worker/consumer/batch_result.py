"""Where the result of a batch request goes: stored once, and sent to the reply subject that the request names.

A result is stored only while its subject is empty. So a request that two workers end has one result.
"""

from __future__ import annotations

import logging

from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.errors import APIError

from gpu_worker.consumer.held_request import log_fields
from shared.messages import Request
from shared.nats_connection import SEND_ERRORS
from shared.subjects import is_batch_reply, result_subject

_IF_EMPTY = {"Nats-Expected-Last-Subject-Sequence": "0"}
_WRONG_LAST_SEQUENCE = 10071

_log = logging.getLogger(__name__)


async def store_result(js: JetStreamContext, request: Request, payload: bytes) -> bool:
    """Store the encoded result of a request; return False if it has one already.

    Raises:
        nats.errors.Error: NATS refuses it or does not answer.
        OSError: The connection failed.
    """
    try:
        await js.publish(result_subject(request.tenant, request.id), payload, headers=_IF_EMPTY)
    except APIError as error:
        if error.err_code != _WRONG_LAST_SEQUENCE:
            raise
        _log.info("batch request has a result already", extra=log_fields(request))
        return False
    return True


async def send_result(nats: Client, request: Request, payload: bytes) -> None:
    """Send the encoded result to the reply subject of the request, if it names one that its tenant may use."""
    if request.reply is None or not is_batch_reply(request.reply, request.tenant):
        return
    try:
        await nats.publish(request.reply, payload)
    except SEND_ERRORS as error:
        _log.warning("batch result not sent to its reply subject", extra=log_fields(request) | {"error": repr(error)})
