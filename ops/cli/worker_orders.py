"""Orders to one worker over NATS: heard first, so that a wrong name or an earlier version is told as such."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ops.cli.admin import AuditedAccess, admin_client
from ops.cli.running_system import find_admin_nats
from shared.audit import audited, nats_login
from shared.config import setting
from shared.errors import DependencyError

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg

    from shared.messages import Heartbeat

ANSWER_S = 5.0
# A worker sends five heartbeats a second.
_LISTEN_S = 1.0


@dataclass(frozen=True, slots=True)
class OrderConfig(AuditedAccess):
    """Where the worker is heard."""

    nats_url: str | None = setting(None, "NATS servers; found through the state directory if not given.")


class HeardWorkers:
    """Hears workers.

    Attributes:
        names: All that were heard.
        beat: The last heartbeat of the one that is ordered about; `heard_at` is when it came.
    """

    def __init__(self, worker: str) -> None:
        from shared.messages import Heartbeat

        self._worker = worker
        self._kind = Heartbeat
        self.names: set[str] = set()
        self.beat: Heartbeat | None = None
        self.heard_at = time.monotonic()

    async def hear(self, message: Msg) -> None:
        """Take note of a heartbeat."""
        import msgspec

        try:
            beat = msgspec.msgpack.decode(message.data, type=self._kind)
        except msgspec.MsgspecError:
            return
        self.names.add(beat.worker)
        if beat.worker == self._worker:
            self.beat, self.heard_at = beat, time.monotonic()

    async def find(self, client: Client, feature: str, instead: str) -> Heartbeat:
        """Return a heartbeat of the worker; `instead` says what works with one that lacks a feature.

        Raises:
            DependencyError: It is not heard, or lacks the feature.
        """
        from shared.subjects import ALL_WORKERS

        await client.subscribe(ALL_WORKERS, cb=self.hear)
        await asyncio.sleep(_LISTEN_S)
        beat = self.beat
        if beat is None:
            heard = ", ".join(sorted(self.names)) or "none"
            raise DependencyError(f"no worker {self._worker!r} is heard; heard: {heard}")
        if feature not in beat.features:
            raise DependencyError(f"{beat.worker} is of an earlier version, which {instead} (its process: {beat.pid})")
        return beat


async def order(client: Client, worker: str, content: bytes) -> None:
    """Tell a worker what to do, and wait until it says that it does.

    Raises:
        DependencyError: It does not answer, or says why it cannot.
    """
    from nats.errors import Error as NatsError

    from shared.subjects import drain_subject

    try:
        answer = await client.request(drain_subject(worker), content, timeout=ANSWER_S)
    except NatsError as error:
        problem = "NATS's permissions may be of an earlier version: see ops/nats/headrace.conf"
        raise DependencyError(f"{worker} does not answer ({error!r}); {problem}") from error
    if answer.data:
        raise DependencyError(f"{worker} does not: {answer.data.decode('utf-8', 'replace')}")


def give_order(config: OrderConfig, worker: str, content: bytes, feature: str = "cordon") -> None:
    """Cordon or uncordon a worker, or give it a role, as `content` says, and write it down.

    Raises:
        DependencyError: It is not heard, lacks the feature, or cannot.
    """
    url = find_admin_nats(config.nats_url, config.state_dir)
    user = nats_login(config.nats_user, url, config)
    name, _, value = content.decode().partition(" ")
    values = {"role": value} if value else {}
    with audited(config.audit_log, f"worker.{name}", nats_user=user, worker=worker, **values):
        asyncio.run(_give_order(config, url, worker, content, feature))


async def _give_order(config: OrderConfig, url: str, worker: str, content: bytes, feature: str) -> None:
    async with admin_client(url, "headrace-order", config, ANSWER_S) as client:
        await HeardWorkers(worker).find(client, feature, f"has no orders of the kind {feature!r}")
        await order(client, worker, content)
