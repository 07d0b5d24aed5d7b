from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
from nats.aio.client import Client

from shared.nats_connection import connect
from tests.servers import NatsServer


@pytest.fixture
async def nats(start_nats: Callable[..., NatsServer]) -> AsyncIterator[Client]:
    client = await connect(start_nats().url, role="admin", name="test")
    yield client
    await client.close()
