"""Tokenizer calls to the workers: a gateway has no tokenizer of its own."""

from __future__ import annotations

import msgspec
from nats.aio.client import Client
from nats.errors import Error as NatsError

from gateway.errors import ApiError
from shared.calls import call_process
from shared.messages import UNDECODABLE, encode
from shared.server_clock import ServerClock
from shared.subjects import tokenizer_subject
from shared.tokenizer_calls import TokenizerCall, TokenizerReply

TIMEOUT_S = 10.0

_decoder = msgspec.msgpack.Decoder(TokenizerReply)


class TokenizerClient:
    """Asks any one worker of a model, over NATS request and reply."""

    def __init__(self, nats: Client, timeout_s: float = TIMEOUT_S, clock: ServerClock | None = None) -> None:
        self._nats = nats
        self._timeout_s = timeout_s
        self._clock = clock or ServerClock()

    async def call(self, model: str, tenant: str, call: TokenizerCall) -> TokenizerReply:
        """Return a worker's reply to a tenant's call.

        Raises:
            ApiError: 400 when the worker finds the input bad, 413 when it is too large for the queue, 503 when no
                worker is there or it has too many calls, 504 when none answers in time.
        """
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
            raise ApiError(400, reply.error, code="invalid_value")
        return reply
