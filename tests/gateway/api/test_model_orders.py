"""What is wrong with an order is told before a host is asked."""

from __future__ import annotations

from typing import Any, cast

import pytest

from gateway.api.operator_app import ModelOrders
from gateway.errors import ApiError
from gateway.fleet.hosted_models import HostedModels


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
