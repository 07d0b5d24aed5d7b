"""Whether a worker may join: NATS lets it in, and others serve the same. Asked before the model is loaded."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg

from gpu_worker.start.assembly import Identity
from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.model_revision import revision_difference
from shared.errors import ConfigError, DependencyError
from shared.messages import Heartbeat
from shared.nats_connection import NatsRefusedError, connect, has_jetstream
from shared.server_clock import WARN_SKEW_S, ask_skew, told_skew
from shared.streams import INTERACTIVE_STREAM
from shared.subjects import encode_name, worker_subject

# NATS may start after us, and there is the time until the model is loaded for it.
TIMEOUT_S = 2.0
# Workers say every 200 ms what they serve, so that two may be lost.
LISTEN_S = 0.6

_log = logging.getLogger(__name__)


def check_nats(config: WorkerConfig, identity: Identity) -> None:
    """Connect once, and see who serves under the same name.

    Raises:
        ConfigError: The URL or one of the files cannot be used, or others serve another revision of the model.
        NatsRefusedError: NATS refuses the login, speaks no TLS where that is required, is not trusted, or is too old.
    """
    try:
        asyncio.run(_connect_once(config, identity))
    except NatsRefusedError:
        raise
    except DependencyError as error:
        _log.warning("loading the model meanwhile: %s", error)


async def check_revision(client: Client, identity: Identity) -> None:
    """Refuse to serve another model than those that are served under the same name: answers would alternate.

    Raises:
        ConfigError: Other workers serve another revision.
    """
    others: dict[str, str] = {}

    async def note(message: Msg) -> None:
        with contextlib.suppress(msgspec.MsgspecError):
            heartbeat = msgspec.msgpack.decode(message.data, type=Heartbeat)
            if not heartbeat.draining and heartbeat.revision != identity.revision:
                others[heartbeat.worker] = heartbeat.revision

    of_all_workers = worker_subject(identity.model, identity.worker).rpartition(".")[0] + ".*"
    subscription = await client.subscribe(of_all_workers, cb=note)
    await asyncio.sleep(LISTEN_S)
    await subscription.unsubscribe()
    if others:
        worker, revision = sorted(others.items())[0]
        difference = revision_difference(identity.revision, revision)
        raise ConfigError(
            "HEADRACE_ALLOW_REVISION_CHANGE",
            f"worker {worker} serves another revision of {identity.model!r} ({revision}; this one is "
            f"{identity.revision}): {difference}. Name the same model everywhere, choose "
            "another --served-model-name, or allow it while a new revision is rolled out",
        )


async def _check_clock(client: Client) -> None:
    """Tell who reads this log that requests expire here at once, or too late. The wrong clock may be that of NATS."""
    skew = await ask_skew(client, INTERACTIVE_STREAM)
    if skew is not None and abs(skew) > WARN_SKEW_S:
        _log.warning(
            "this machine's clock is %s: set both (NTP); requests whose deadline has passed here are given back",
            told_skew(skew),
        )


async def _connect_once(config: WorkerConfig, identity: Identity) -> None:
    client = await connect(
        config.nats_url,
        role="worker",
        name="headrace-worker-check",
        scope=encode_name(identity.model),
        user=config.nats_user,
        password=config.nats_password,
        files=config,
        timeout_s=TIMEOUT_S,
    )
    if not has_jetstream(client):
        _log.warning("NATS runs without JetStream: start it with JetStream enabled (-js)")
    try:
        await _check_clock(client)
        if not config.allow_revision_change:
            await check_revision(client, identity)
    finally:
        await client.close()
