"""Whether a worker may join: NATS lets it in, and others serve the same. Asked before the model is loaded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping

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


async def check_others(client: Client, identity: Identity, *, allows_revision_change: bool) -> None:
    """Refuse to serve under the name of another worker, or another model than those served under the same name.

    Raises:
        ConfigError: A worker of this name is alive, or other workers serve another revision.
    """
    others: dict[str, Heartbeat] = {}

    async def note(message: Msg) -> None:
        with contextlib.suppress(msgspec.MsgspecError):
            heartbeat = msgspec.msgpack.decode(message.data, type=Heartbeat)
            others[heartbeat.worker] = heartbeat

    of_all_workers = worker_subject(identity.model, identity.worker).rpartition(".")[0] + ".*"
    subscription = await client.subscribe(of_all_workers, cb=note)
    await asyncio.sleep(LISTEN_S)
    await subscription.unsubscribe()
    namesake = others.get(identity.worker)
    if namesake is not None:
        raise ConfigError(
            "HEADRACE_WORKER_ID",
            f"a worker named {identity.worker!r} serves {identity.model!r} already (process {namesake.pid} of its "
            "machine): stop it first, or give this one another name",
        )
    if not allows_revision_change:
        _check_revision(identity, others)


def _check_revision(identity: Identity, others: Mapping[str, Heartbeat]) -> None:
    for worker, heartbeat in sorted(others.items()):
        revision = heartbeat.revision
        if heartbeat.draining or revision == identity.revision:
            continue
        # Answers would alternate.
        difference = revision_difference(identity.revision, revision)
        raise ConfigError(
            "HEADRACE_ALLOW_REVISION_CHANGE",
            f"worker {worker} serves another revision of {identity.model!r} ({revision}; this one is "
            f"{identity.revision}): {difference}. Name the same model everywhere, serve this "
            "one under another name, or allow it while a new revision is rolled out",
        )


async def _check_clock(client: Client) -> None:
    """Log that the clocks differ. Deadlines are kept by that of NATS, which may be the wrong one."""
    skew = await ask_skew(client, INTERACTIVE_STREAM)
    if skew is not None and abs(skew) > WARN_SKEW_S:
        _log.warning(
            "this machine's clock is %s: set both (NTP). Deadlines follow the clock of NATS, log lines this one",
            told_skew(skew),
        )


async def _connect_once(config: WorkerConfig, identity: Identity) -> None:
    client = await connect(
        config.nats_url,
        role="worker",
        name="headrace-worker-check",
        scope=encode_name(identity.model),
        speaks_on=worker_subject(identity.model, identity.worker),
        user=config.nats_user,
        password=config.nats_password,
        files=config,
        timeout_s=TIMEOUT_S,
    )
    if not has_jetstream(client):
        _log.warning("NATS runs without JetStream: start it with JetStream enabled (-js)")
    try:
        await _check_clock(client)
        await check_others(client, identity, allows_revision_change=config.allow_revision_change)
    finally:
        await client.close()
