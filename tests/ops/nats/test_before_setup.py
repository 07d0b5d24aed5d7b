"""A gateway or worker that runs before `headrace setup` logs the remedy once, and finds streams that are made later."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Literal

import pytest

from shared.dependency_wait import RECORDS_LOG_INTERVAL_S, wait_for
from shared.errors import DependencyError
from shared.nats_connection import connect
from shared.streams import StreamLimits, ensure_streams
from tests.gateway.wire_worker import until
from tests.ops.nats.secured import connect_as, secured_server


@pytest.mark.parametrize("role", ["gateway", "worker"])
async def test_missing_streams_are_one_line_that_names_setup(
    role: Literal["gateway", "worker"], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with secured_server(tmp_path) as server, caplog.at_level(logging.WARNING):
        client = (await connect_as(server.url, role)).client
        num_attempts = 0

        async def ensure() -> None:
            nonlocal num_attempts
            num_attempts += 1
            await ensure_streams(client.jetstream(timeout=0.4), StreamLimits())

        waiting = asyncio.create_task(wait_for("the streams of batch results", ensure, 0.05, RECORDS_LOG_INTERVAL_S))
        # NATS refuses each.
        await until(lambda: num_attempts > 2, 30)
        (line,) = caplog.messages
        assert line == (
            "waiting for the streams of batch results: NATS stream HR_RESULTS could not be created: NATS did not "
            "answer. If this login may not create it, run `headrace setup` once, with the admin user; if NATS is slow, "
            "its log says `took too long`."
        )
        admin = (await connect_as(server.url, "admin")).client
        await ensure_streams(admin.jetstream(), StreamLimits())
        await asyncio.wait_for(waiting, 30)
        assert caplog.messages == [line]
        await admin.close()
        await client.close()


async def test_login_that_may_not_ask_for_streams_is_told_as_that(tmp_path: Path) -> None:
    half = '{ user: half, password: "passwordhalf", permissions: { publish: { deny: ["_R_.API.INFO.>"] } } }'
    with secured_server(tmp_path, half) as server:
        client = await connect(server.url, role="admin", name="half", user="half", password="passwordhalf")
        with pytest.raises(DependencyError, match="NATS does not answer JetStream calls: check HEADRACE_NATS_USER"):
            await ensure_streams(client.jetstream(timeout=0.4), StreamLimits())
        await client.close()
