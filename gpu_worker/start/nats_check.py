"""Whether NATS will let a worker in, asked before the model is loaded, which may take minutes."""

from __future__ import annotations

import asyncio
import logging

from gpu_worker.start.config import WorkerConfig
from shared.errors import DependencyError
from shared.nats_connection import NatsRefusedError, connect, has_jetstream

# NATS may start after us, and there is the time until the model is loaded for it.
TIMEOUT_S = 2.0

_log = logging.getLogger(__name__)


def check_nats(config: WorkerConfig) -> None:
    """Connect once.

    Raises:
        ConfigError: The URL or one of the files cannot be used.
        NatsRefusedError: NATS refuses the login, speaks no TLS where that is required, is not trusted, or is too old.
    """
    try:
        asyncio.run(_connect_once(config))
    except NatsRefusedError:
        raise
    except DependencyError as error:
        _log.warning("loading the model meanwhile: %s", error)


async def _connect_once(config: WorkerConfig) -> None:
    client = await connect(
        config.nats_url,
        role="worker",
        name="headrace-worker-check",
        user=config.nats_user,
        password=config.nats_password,
        files=config,
        timeout_s=TIMEOUT_S,
    )
    if not has_jetstream(client):
        _log.warning("NATS runs without JetStream: start it with JetStream enabled (-js)")
    await client.close()
