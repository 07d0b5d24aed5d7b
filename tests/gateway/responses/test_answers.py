"""Answers of Responses on a transport that keeps what it is given."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from gateway.admission.auth import Principal
from gateway.api.answer import Asked, Outcome, ResponseHead
from gateway.responses.answers import WholeResponse
from gateway.responses.draft import ResponseGeneration
from gateway.responses.request import own_items, parse_body, to_generation
from gateway.responses.store import ResponseStore
from shared.messages import Delta, Finish, Usage
from tests.gateway.kept_exchange import kept_exchange


@pytest.mark.parametrize("is_kept", [True, False])
async def test_client_is_told_nothing_until_its_response_is_stored_and_whether_it_is(is_kept: bool) -> None:
    stored: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    class Store(ResponseStore):
        async def keep(self, tenant: str, generation: ResponseGeneration, response: dict[str, Any]) -> bool:
            assert response["output"][0]["content"][0]["text"] == "text"
            return await stored

    exchange, _, transport = kept_exchange()
    body = parse_body(b'{"model": "m", "input": "x"}')
    generation = to_generation(body, [], own_items(body), ())
    store = Store(cast("Any", None), cast("Any", None))
    answer = WholeResponse(Asked(exchange, generation, ResponseHead("req_1", 0.0), Principal("k", "t")), store)
    answer.sinks[0].deliver(Delta("r", 0, 0, (1,), "text"))
    answer.sinks[0].deliver(Delta("r", 0, 1, finish=Finish("stop", Usage(1, 1))))
    await asyncio.sleep(0.01)
    assert not transport.writes
    assert not answer.done.done()
    stored.set_result(is_kept)
    assert await answer.done is Outcome.COMPLETED
    response = transport.body()
    assert (response["status"], response["store"]) == ("completed", is_kept)
