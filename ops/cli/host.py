"""`headrace host`: loads and unloads models on a machine of its own, as operators order."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from ops.cli.options import settings_command
from ops.cli.parts import require
from ops.stack.config import AUDIT_FILE_NAME, DEFAULT_STATE_DIR, HostSettings
from shared.audit import AUDIT_HELP
from shared.config import setting


@dataclass(frozen=True, slots=True)
class HostConfig(HostSettings):
    """The host's NATS login, and its state."""

    state_dir: Path = setting(DEFAULT_STATE_DIR, "Directory for logs and the list of models to serve.")
    nats_url: str = setting("nats://127.0.0.1:4222", "NATS servers, separated by commas.")
    nats_user: str | None = setting(None, "NATS user of the worker role.")
    nats_password: str | None = setting(None, "Password of the NATS user.", secret=True)
    hang_timeout_s: float = setting(
        10.0, "Seconds without a sign of life after which a worker is killed.", minimum=2, maximum=3600
    )
    audit_file: Path | None = setting(None, f"{AUDIT_HELP} In the state directory if not given.")


def run(config: HostConfig) -> int:
    """Serve models that operators load here.

    `headrace model` loads and unloads them; each worker is a process. Variables such as HEADRACE_DEVICE set
    the options of all workers. The list of models is kept in the state directory, and served again after a restart.
    """
    require("worker", "tokenizers", "jinja2")
    asyncio.run(_run(config))
    return 0


async def _run(config: HostConfig) -> None:
    from ops.stack.console import Console
    from ops.stack.hosting.host import Host, without_model
    from ops.stack.hosting.worker_process import DRAIN_S, EXIT_S
    from ops.stack.plan import NatsAccess, files_of
    from ops.stack.state import StateDirectory

    # A second host of the directory would start all workers again.
    state = StateDirectory(config.state_dir)
    console, stopping = Console(), asyncio.Event()
    access = NatsAccess(config.nats_url, config.nats_user, config.nats_password, files_of(config))
    audit_file = config.audit_file or state.path / AUDIT_FILE_NAME
    parts = (config, access, without_model(os.environ), state.path, console)
    host = Host(*parts, hang_timeout_s=config.hang_timeout_s, audit_file=audit_file)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    await host.start()
    console.say("host", f"{config.host_name} is ready for `headrace model load`")
    running, told = asyncio.create_task(host.run()), asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait([running, told], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    finally:
        running.cancel()
        told.cancel()
        await host.stop(DRAIN_S + EXIT_S)
        state.close()


command = settings_command(HostConfig, "host", run)
