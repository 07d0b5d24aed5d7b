"""A NATS server with the shipped configuration and a second tenant, and clients that record what it refuses them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client

from ops.cli.tenant import account_block
from ops.stack.servers import NATS_CONFIG, NATS_ROLES, nats_password_variable
from shared.nats_connection import Role, connect
from tests.servers import NatsServer

# Passwords by user: the roles' own tenant is `default`, that of the other user `acme corp.`.
OTHER_TENANT = "acme corp."
OTHER_TOKEN = "acme_20corp_2e"
PASSWORDS = {role: f"password{role}" for role in NATS_ROLES} | {f"batch-{OTHER_TOKEN}": "passwordacme"}


class Connection:
    """A client that records what the server refuses."""

    def __init__(self) -> None:
        self.client: Client
        self.refusals: list[str] = []

    async def on_error(self, error: Exception) -> None:
        self.refusals.append(str(error).lower())

    async def is_refused(self) -> bool:
        """Whether the server has refused anything since the last time this was asked."""
        await self.client.flush()
        # A refusal came before the answer to this: what it calls takes a turn of the loop or two.
        for _ in range(3):
            await asyncio.sleep(0)
        refused = [text for text in self.refusals if "permissions violation" in text]
        self.refusals.clear()
        return bool(refused)

    async def can_publish(self, subject: str) -> bool:
        await self.client.publish(subject, b"x")
        return not await self.is_refused()

    async def can_subscribe(self, subject: str) -> bool:
        subscription = await self.client.subscribe(subject)
        refused = await self.is_refused()
        if not refused:
            await subscription.unsubscribe()
        return not refused


async def connect_as(url: str, user: str, role: Role | None = None, **options: Any) -> Connection:
    """Connect as a user, in the role of that name unless one is given; the password of a user of one model is `pw`."""
    connection = Connection()
    connection.client = await connect(
        url,
        role=role or user,  # type: ignore[arg-type]
        name=user,
        user=user,
        password=PASSWORDS.get(user, "pw"),
        on_error=connection.on_error,
        **options,
    )
    return connection


@contextmanager
def secured_server(directory: Path, users: str = "", *, is_closed: bool = True) -> Iterator[NatsServer]:
    """Run nats-server with the shipped configuration, one tenant more, and more `users` of the main account.

    Unless `is_closed`, the lines are taken out by which NATS itself can make no calls of JetStream's API.
    """
    configuration = directory / "configuration"
    shutil.copytree(NATS_CONFIG.parent, configuration, ignore=shutil.ignore_patterns("__pycache__"))
    with (configuration / "tenants.conf").open("a") as file:
        user = f"batch-{OTHER_TOKEN}"
        file.write(account_block(OTHER_TENANT, f'user: "{user}", password: "{PASSWORDS[user]}"'))
    main = configuration / NATS_CONFIG.name
    place = "{ user: gateway,"
    assert main.read_text().count(place) == 1
    lines = main.read_text().replace(place, f"{users}\n      {place}").splitlines()
    main.write_text("\n".join(line for line in lines if is_closed or not line.endswith('": "headrace.closed.>"')))
    server = NatsServer(directory / "server", ("-c", str(configuration / NATS_CONFIG.name)))
    with pytest.MonkeyPatch.context() as patch:
        for role in NATS_ROLES:
            patch.setenv(nats_password_variable(role), PASSWORDS[role])
        server.start()
    yield server
    server.kill()
