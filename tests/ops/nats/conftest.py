from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
from nats.aio.client import Client

from shared.nats_connection import Role
from shared.streams import StreamLimits, ensure_streams
from tests.ops.nats.secured import OTHER_TENANT, Connection, connect_as, secured_server
from tests.servers import NatsServer


@pytest.fixture(scope="module")
def secured_nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """nats-server with the shipped configuration and a second tenant."""
    with secured_server(tmp_path_factory.mktemp("secured")) as server:
        yield server


@pytest.fixture
async def as_role(secured_nats: NatsServer) -> AsyncIterator[Callable[..., Awaitable[Connection]]]:
    """Connect as a user, in the role of that name unless one is given."""
    opened: list[Client] = []

    async def open_as(user: str, role: Role | None = None) -> Connection:
        connection = await connect_as(secured_nats.url, user, role)
        opened.append(connection.client)
        return connection

    admin = await open_as("admin")
    await ensure_streams(admin.client.jetstream(), StreamLimits(), ["default", OTHER_TENANT])
    yield open_as
    for client in opened:
        await client.close()
