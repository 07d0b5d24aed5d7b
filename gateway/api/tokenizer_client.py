"""Tokenizer calls to the workers: a gateway has no tokenizer of its own."""

from __future__ import annotations

from collections import Counter

import msgspec
from nats.aio.client import Client
from nats.errors import Error as NatsError

from gateway.errors import ApiError
from shared.calls import call_process
from shared.messages import UNDECODABLE, encode
from shared.server_clock import ServerClock
from shared.subjects import tokenizer_subject
from shared.tenant_bounds import counted
from shared.tokenizer_calls import TokenizerCall, TokenizerReply

TIMEOUT_S = 10.0
# Under way at once, with their payloads. The workers have bounds of their own.
MAX_CALLS = 256
# So that no tenant keeps the others out.
MAX_CALLS_OF_ONE = MAX_CALLS // 4
_BUSY_S = 1.0

_decoder = msgspec.msgpack.Decoder(TokenizerReply)


class TokenizerClient:
    """Asks any one worker of a model, over NATS request and reply."""

    def __init__(self, nats: Client, timeout_s: float = TIMEOUT_S, clock: ServerClock | None = None) -> None:
        self._nats = nats
        self._timeout_s = timeout_s
        self._clock = clock or ServerClock()
        self._calls: Counter[str] = Counter()

    async def call(self, model: str, tenant: str, call: TokenizerCall) -> TokenizerReply:
        """Return a worker's reply to a tenant's call.

        Raises:
            ApiError: 400 when the worker finds the input bad, 413 when it is too large for the queue, 503 when no
                worker is there, or it or this gateway has too many calls, 504 when none answers in time.
        """
        if self._calls[tenant] >= MAX_CALLS_OF_ONE or self._calls.total() >= MAX_CALLS:
            whose = "of this tenant" if self._calls[tenant] >= MAX_CALLS_OF_ONE else "of all tenants"
            message = f"This gateway has as many tokenizer calls {whose} under way as it takes; send fewer at once."
            raise ApiError(503, message, code="tokenizer_busy", retry_after_s=_BUSY_S)
        with counted(self._calls, tenant):
            return await self._call(model, tenant, call)

    async def _call(self, model: str, tenant: str, call: TokenizerCall) -> TokenizerReply:
        # A worker drops calls whose deadline has passed.
        call = msgspec.structs.replace(call, tenant=tenant, deadline=self._clock.now() + self._timeout_s)
        payload = encode(call)
        if len(payload) > self._nats.max_payload:
            message = f"The input is larger than the {self._nats.max_payload} bytes that fit through the queue."
            raise ApiError(413, message, code="request_too_large")
        try:
            answer = await call_process(self._nats, tokenizer_subject(model), payload, self._timeout_s)
            reply = _decoder.decode(answer.data)
        except TimeoutError:
            message = f"No worker answered within {self._timeout_s:g} s."
            raise ApiError(504, message, code="timeout") from None
        except NatsError:
            message = f"No worker serves `{model}` at the moment."
            raise ApiError(503, message, code="no_worker", retry_after_s=2.0) from None
        except UNDECODABLE as error:
            raise ApiError(502, "A worker's reply could not be read.", code="bad_reply") from error
        if reply.retry_after_s is not None:
            message = reply.error or "The tokenizer is busy."
            raise ApiError(503, message, code="tokenizer_busy", retry_after_s=reply.retry_after_s)
        if reply.error is not None:
            raise ApiError(400, reply.error, param=reply.param, code=reply.code or "invalid_value")
        return reply
