"""`headrace setup`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from ops.cli.options import settings_command
from ops.stack.config import DEFAULT_AUDIT_FILE
from shared.audit import AUDIT_HELP, audited, servers_in, user_in
from shared.config import setting
from shared.nats_files import NatsFiles


@dataclass(frozen=True, slots=True)
class SetupConfig(NatsFiles):
    """Where to create the streams."""

    nats_url: str = setting("nats://127.0.0.1:4222", "NATS servers, separated by commas.")
    nats_user: str | None = setting(None, "NATS user of the admin role.")
    nats_password: str | None = setting(None, "Password of the NATS user.", secret=True)
    timeout_s: float = setting(30.0, "How long NATS may take to appear.", minimum=0.1)
    audit_file: Path = setting(DEFAULT_AUDIT_FILE, AUDIT_HELP)


def run(config: SetupConfig) -> int:
    """Create the streams of the queue.

    Needs an administrator's credentials. Streams that exist keep their limits and are brought to this version's
    subjects. Run it before the first gateway, and after each update; `headrace up` does it by itself.
    """
    user = config.nats_user or user_in(config.nats_url)
    with audited(config.audit_file, "setup", nats_user=user, nats=servers_in(config.nats_url)):
        return asyncio.run(_set_up(config))


async def _set_up(config: SetupConfig) -> int:
    from shared.nats_connection import connect
    from shared.streams import StreamLimits, ensure_streams, reshape_streams, stream_configs

    client = await connect(
        config.nats_url,
        role="admin",
        name="headrace-setup",
        user=config.nats_user,
        password=config.nats_password,
        files=config,
        timeout_s=config.timeout_s,
    )
    try:
        await ensure_streams(client.jetstream(), StreamLimits())
        await reshape_streams(client.jetstream(), StreamLimits())
    finally:
        await client.close()
    print("streams ready:", ", ".join(str(stream.name) for stream in stream_configs(StreamLimits())))
    return 0


command = settings_command(SetupConfig, "setup", run)
