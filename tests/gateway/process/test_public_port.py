"""Every route of the public port is described, and nothing else is."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

from gateway.config import GatewayConfig
from gateway.openapi.operations import OPERATIONS
from gateway.process.public_port import public_app


def test_every_route_is_described() -> None:
    services = cast("Any", SimpleNamespace(config=GatewayConfig()))
    app, _ = public_app(services, cast("Any", None))
    paths = {re.sub(r":path\}", "}", path) for path in app.paths}
    assert paths - {"/openapi.json"} == {operation.path for operation in OPERATIONS}
