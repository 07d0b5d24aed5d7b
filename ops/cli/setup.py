"""`headrace setup`."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from ops.cli.options import settings_command
from ops.cli.running_system import AuditedAccess, admin_client, find_admin_nats
from ops.cli.tenant import NatsUserConfig, account_block, login
from ops.stack.config import DEFAULT_STATE_DIR
from ops.stack.servers import accounts_file, add_account, tenant_login
from ops.stack.state import read_ready_file
from shared.audit import audited, nats_login, servers_in
from shared.config import setting
from shared.subjects import encode_name

_DEFAULT_URL = "nats://127.0.0.1:4222"
# How long NATS takes to read its configuration again.
_RELOAD_S = 0.5


@dataclass(frozen=True, slots=True)
class SetupConfig(AuditedAccess):
    """Where to create the streams."""

    nats_url: str | None = setting(
        None,
        "NATS servers, separated by commas; that of a `headrace up` on the state directory, or else, unless one is "
        "named, nats://127.0.0.1:4222, if not given.",
    )
    tenants: str = setting("default", "Tenants who get a batch queue, separated by commas.")
    tenant_max_bytes: int = setting(
        256 << 20, "Size of a new batch queue in bytes; its tenant is refused more jobs beyond it.", minimum=1 << 20
    )
    tenant_max_msgs: int = setting(100_000, "Jobs in a new batch queue.", minimum=1)
    tenant_max_wait_s: float = setting(
        7 * 86400.0, "Seconds after which a job that no worker has taken expires, in a new batch queue.", minimum=1
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


def run(config: SetupConfig) -> int:
    """Create the streams of the queue, and tenants' batch queues.

    Needs an administrator's credentials. Streams that exist keep their limits and are brought to this version's
    subjects, and to the replicas that are asked for. Run it before the first gateway, after each update, and for each
    new tenant (`headrace tenant` prints the account); `headrace up` does it by itself for the tenant `default`. Beside
    a `headrace up`, new tenants get their accounts too.
    """
    running = read_ready_file(config.state_dir) if config.nats_url is None and config.nats_user is None else None
    url = running.admin_nats_url if running else config.nats_url or _nats_without_url(config.state_dir)
    user = nats_login(config.nats_user, url, config)
    what = {"nats": servers_in(url), "tenants": config.tenants}
    with audited(config.audit_log, "setup", nats_user=user, **what):
        asyncio.run(_set_up(config, url))
        if running is not None and running.pids["nats"]:
            _add_accounts(config, running.pids["nats"][0])
    return 0


def _nats_without_url(state_dir: Path) -> str:
    # A named state directory means the system there.
    return _DEFAULT_URL if state_dir == DEFAULT_STATE_DIR else find_admin_nats(None, state_dir)


def _add_accounts(config: SetupConfig, nats_pid: int) -> None:
    """Give tenants accounts at the NATS of a `headrace up`, and have it read them."""
    from shared.batch_streams import DEFAULT_TENANT

    new = [name for name in _tenants(config) if name != DEFAULT_TENANT and not tenant_login(config.state_dir, name)]
    for name in new:
        add_account(config.state_dir, account_block(name, login(NatsUserConfig(), f"batch-{encode_name(name)}")))
    for _ in range(2 if new else 0):
        # NATS connects a new account's imports only at the next reload.
        os.kill(nats_pid, signal.SIGHUP)
        time.sleep(_RELOAD_S)
    if new:
        print(f"accounts ready: {', '.join(new)}; their logins are in {accounts_file(config.state_dir)}")


def _tenants(config: SetupConfig) -> list[str]:
    return [tenant.strip() for tenant in config.tenants.split(",") if tenant.strip()]


async def _set_up(config: SetupConfig, url: str) -> None:
    from shared.batch_streams import batch_stream
    from shared.streams import StreamLimits, ensure_streams, reshape_streams, stream_configs
    from shared.usage_ledger import delete_old_days, delete_old_receipts

    tenants = _tenants(config)
    streams = list(map(batch_stream, tenants))
    limits = StreamLimits(
        replicas=config.replicas,
        tenant_max_bytes=config.tenant_max_bytes,
        tenant_max_msgs=config.tenant_max_msgs,
        tenant_max_wait_s=config.tenant_max_wait_s,
        tenant_duplicate_window_s=config.tenant_duplicate_window_s,
    )
    async with admin_client(url, "headrace-setup", config, config.timeout_s) as client:
        await ensure_streams(client.jetstream(), limits, tenants)
        await reshape_streams(client.jetstream(), StreamLimits(replicas=config.replicas), tenants)
        await delete_old_receipts(client.jetstream())
        await delete_old_days(client.jetstream())
    print("streams ready:", ", ".join([*(str(stream.name) for stream in stream_configs(limits)), *streams]))


command = settings_command(SetupConfig, "setup", run)
