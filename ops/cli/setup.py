"""`headrace setup`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from ops.cli.admin import AdminAccess, admin_client
from ops.cli.options import settings_command
from ops.stack.config import DEFAULT_AUDIT_FILE
from shared.audit import AUDIT_HELP, audited, nats_login, servers_in
from shared.config import setting


@dataclass(frozen=True, slots=True)
class SetupConfig(AdminAccess):
    """Where to create the streams."""

    nats_url: str = setting("nats://127.0.0.1:4222", "NATS servers, separated by commas.")
    tenants: str = setting("default", "Tenants who get a batch queue, separated by commas.")
    tenant_max_bytes: int = setting(
        256 << 20, "Size of a new batch queue in bytes; its tenant is refused more jobs beyond it.", minimum=1 << 20
    )
    tenant_max_msgs: int = setting(100_000, "Jobs in a new batch queue.", minimum=1)
    tenant_max_wait_s: float = setting(
        7 * 86400.0, "Jobs that no worker has taken after so many seconds expire, in a new batch queue.", minimum=1
    )
    tenant_duplicate_window_s: float = setting(
        120.0, "Seconds in which a Nats-Msg-Id is stored once, in a new batch queue.", minimum=0.1, maximum=3600
    )
    replicas: int | None = setting(
        None,
        "Servers of a NATS cluster that keep each stream, 3 survive the loss of one; existing streams change too.",
        minimum=1,
        maximum=5,
    )
    timeout_s: float = setting(30.0, "How long NATS may take to appear.", minimum=0.1)
    audit_file: Path = setting(DEFAULT_AUDIT_FILE, AUDIT_HELP)


def run(config: SetupConfig) -> int:
    """Create the streams of the queue, and a batch queue for each tenant.

    Needs an administrator's credentials. Streams that exist keep their limits and are brought to this version's
    subjects, and to the replicas that are asked for. Run it before the first gateway, after each update, and for each
    new tenant (`headrace tenant` prints the account); `headrace up` does it by itself for the tenant `default`.
    """
    user = nats_login(config.nats_user, config.nats_url, config)
    what = {"nats": servers_in(config.nats_url), "tenants": config.tenants}
    with audited(config.audit_file, "setup", nats_user=user, **what):
        return asyncio.run(_set_up(config))


async def _set_up(config: SetupConfig) -> int:
    from shared.batch_streams import batch_stream
    from shared.streams import StreamLimits, ensure_streams, reshape_streams, stream_configs

    tenants = [tenant.strip() for tenant in config.tenants.split(",") if tenant.strip()]
    streams = list(map(batch_stream, tenants))
    limits = StreamLimits(
        replicas=config.replicas,
        tenant_max_bytes=config.tenant_max_bytes,
        tenant_max_msgs=config.tenant_max_msgs,
        tenant_max_wait_s=config.tenant_max_wait_s,
        tenant_duplicate_window_s=config.tenant_duplicate_window_s,
    )
    async with admin_client(config.nats_url, "headrace-setup", config, config.timeout_s) as client:
        await ensure_streams(client.jetstream(), limits, tenants)
        await reshape_streams(client.jetstream(), StreamLimits(replicas=config.replicas), tenants)
    print("streams ready:", ", ".join([*(str(stream.name) for stream in stream_configs(limits)), *streams]))
    return 0


command = settings_command(SetupConfig, "setup", run)
