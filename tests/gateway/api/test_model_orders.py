"""What is wrong with an order is told before a host is asked."""

from __future__ import annotations

from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from gateway.api.operator_app import ModelOrders, OperatorRoute
from gateway.errors import ApiError
from gateway.fleet.hosted_models import HostedModels
from tests.gateway.api.test_app import assert_error
from tests.gateway.api.test_operator_app import client


@pytest.mark.parametrize(
    ("body", "status", "param", "told"),
    [
        (b"", 400, None, "body is empty"),
        (b'{"path": "p"}', 400, "name", "^Missing required parameter: 'name'[.]$"),
        (b'{"name": ""}', 400, "name", "^'name' is invalid: "),
        (b'{"name": "m", "workers": 0}', 400, "workers", "^'workers' is invalid: .*1"),
        (b'{"name": "m", "host": 3}', 400, "host", "^'host' is invalid"),
        (b'{"name": "m", "colour": "red"}', 400, "colour", "^Unknown parameter"),
        (b'{"name": "m", "action": "unload"}', 400, "action", "^Unknown parameter"),
        (b'{"name": "m"}', 404, None, "start `headrace host`"),
    ],
)
async def test_wrong_order_is_refused_with_the_field(body: bytes, status: int, param: str | None, told: str) -> None:
    orders = ModelOrders(cast("Any", None), HostedModels())
    with pytest.raises(ApiError, match=told) as refused:
        await orders.order("load", body)
    assert (refused.value.status, refused.value.param) == (status, param)


async def test_unknown_action_is_told_the_actions_alone() -> None:
    async with client(None) as http:
        answer = await http.post("/v1/hosted_models/banana", json={"name": "m"})
    message = assert_error(answer, 404, "unknown_url")["message"]
    assert "The actions are load, replace, unload, sleep, wake: " in message
    assert "/v1/scaling" not in message


async def test_unknown_path_is_told_each_path_once() -> None:
    both = tuple(OperatorRoute("/v1/aliases", AsyncMock(), method) for method in ("GET", "POST"))
    async with client(None, more=both) as http:
        message = assert_error(await http.get("/v1/models"), 404, "unknown_url")["message"]
    assert message.count("/v1/aliases") == 1
    assert "/v1/scaling, /v1/scaling/{model}, " in message
