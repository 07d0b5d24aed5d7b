"""Fixtures of modules that share one gateway and its NATS server, which start in seconds; import both.

Use a model of your own, and leave the gateway and its servers as they are.
"""

from __future__ import annotations

import pytest

from tests.gateway.gateway_process import GatewayProcess

OPERATOR_KEY = "operator-key-of-32-characters-xx"


@pytest.fixture(scope="module")
def nats_url(shared_nats_url: str) -> str:
    return shared_nats_url


@pytest.fixture(scope="module")
def gateway(shared_gateway: GatewayProcess) -> GatewayProcess:
    return shared_gateway
