"""Commands of an administrator say what they wait for."""

from __future__ import annotations

import asyncio

import pytest

from ops.cli.running_system import AdminAccess, admin_client
from ops.stack import console
from shared.errors import DependencyError


def test_wait_for_nats_that_does_not_run_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "QUIET_S", 0.05)

    async def connect() -> None:
        async with admin_client("nats://admin:secret@127.0.0.1:1", "test", AdminAccess(), 0.4):
            raise AssertionError("nothing listens there")

    with pytest.raises(DependencyError):
        asyncio.run(connect())
    assert capsys.readouterr().err == "headrace: waiting up to 0.4 s for NATS at 127.0.0.1:1\n"
