"""`headrace cordon`, `uncordon`, `role` and `drain`: orders to one worker over NATS.

The command listens for the worker's heartbeat first, to recognize a wrong name or an earlier version. If the worker is
not heard, lacks the feature or does not answer, `DependencyError` says so.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from ops.cli.options import settings_command
from ops.cli.running_system import AuditedAccess, admin_client, find_admin_nats
from shared.audit import audited, nats_login
from shared.config import setting
from shared.disaggregation import ROLES
from shared.errors import DependencyError

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg

    from shared.messages import Heartbeat

ANSWER_S = 5.0
# A worker sends five heartbeats a second.
_LISTEN_S = 1.0
_SILENCE_S = 2.0


@dataclass(frozen=True, slots=True)
class OrderConfig(AuditedAccess):
    """Where the worker is heard."""

    nats_url: str | None = setting(None, "NATS servers; found through the state directory if not given.")


class HeardWorkers:
    """The names of all workers that were heard, and the last heartbeat of the one that is ordered about."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self.names: set[str] = set()
        self.beat: Heartbeat | None = None
        self.heard_at = time.monotonic()

    async def hear(self, message: Msg) -> None:
        """Take note of a heartbeat."""
        import msgspec

        from shared.messages import Heartbeat

        try:
            beat = msgspec.msgpack.decode(message.data, type=Heartbeat)
        except msgspec.MsgspecError:
            return
        self.names.add(beat.worker)
        if beat.worker == self._worker:
            self.beat, self.heard_at = beat, time.monotonic()

    async def find(self, client: Client, feature: str, instead: str) -> Heartbeat:
        """Return a heartbeat of the worker; `instead` says what works with one that lacks a feature."""
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
    """Tell a worker what to do, and wait until it says that it does."""
    from nats.errors import Error as NatsError

    from shared.calls import call_process
    from shared.subjects import drain_subject

    try:
        answer = await call_process(client, drain_subject(worker), content, ANSWER_S)
    except NatsError as error:
        problem = "NATS's permissions may be of an earlier version: see ops/nats/headrace.conf"
        raise DependencyError(f"{worker} does not answer ({error!r}); {problem}") from error
    if answer.data:
        raise DependencyError(f"{worker} does not: {answer.data.decode('utf-8', 'replace')}")


def give_order(config: OrderConfig, worker: str, content: bytes, feature: str = "cordon") -> None:
    """Cordon or uncordon a worker, or give it a role, as `content` says, and write it down."""
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


def cordon(config: OrderConfig, worker: str) -> int:
    """Cordon a worker: it takes no more requests, and stays.

    It finishes those that it has begun, and keeps its model, its caches and its connection; `headrace uncordon WORKER`
    lets it take requests again, and so does its restart. WORKER is the name that `headrace doctor` and the metrics
    show. Requests that it has begun end there, however long they take: `headrace drain` hands them over. Needs an
    administrator's credentials.
    """
    give_order(config, worker, b"cordon")
    click.echo(f"{worker} takes no more requests")
    return 0


CORDON = settings_command(OrderConfig, "cordon", cordon, [click.Argument(["worker"])])


def uncordon(config: OrderConfig, worker: str) -> int:
    """Let a cordoned worker take requests again.

    WORKER is the name that `headrace doctor` and the metrics show. Needs an administrator's credentials.
    """
    give_order(config, worker, b"uncordon")
    click.echo(f"{worker} takes requests")
    return 0


UNCORDON = settings_command(OrderConfig, "uncordon", uncordon, [click.Argument(["worker"])])


def role(config: OrderConfig, worker: str, role: str) -> int:
    """Give a running worker a role.

    ROLE is prefill (it hands requests over with their first token), decode (it goes on with them) or both. WORKER is
    the name that `headrace doctor` and the metrics show; it was started with --role. What it has begun it finishes as
    before. Its restart brings back the role of --role. Needs an administrator's credentials.
    """
    give_order(config, worker, f"role {role}".encode(), "role")
    click.echo(f"{worker} has the role {role}")
    return 0


_ROLE = click.Argument(["role"], type=click.Choice(ROLES))
ROLE = settings_command(OrderConfig, "role", role, [click.Argument(["worker"]), _ROLE])


@dataclass(frozen=True, slots=True)
class DrainConfig(OrderConfig):
    """Where the worker is heard, and how long to wait for it."""

    wait: bool = setting(True, "Wait until the worker has ended.")
    timeout_s: float = setting(120.0, "How long to wait for that.", minimum=0.1)


def drain(config: DrainConfig, worker: str) -> int:
    """Drain a worker: it hands over its requests, and ends.

    It takes no more requests, finishes what it can, and hands the rest to others. WORKER is the name that `headrace
    doctor` and the metrics show. What it cannot finish within its --drain-timeout-s goes on at other workers, with
    the same text. Whatever supervises the worker may start it anew: `headrace up` and Kubernetes do, systemd does
    not. Needs an administrator's credentials.
    """
    url = find_admin_nats(config.nats_url, config.state_dir)
    user = nats_login(config.nats_user, url, config)
    with audited(config.audit_log, "worker.drain", nats_user=user, worker=worker):
        asyncio.run(_drain(config, url, worker))
    return 0


async def _drain(config: DrainConfig, url: str, worker: str) -> None:
    async with admin_client(url, "headrace-drain", config, ANSWER_S) as client:
        fleet = HeardWorkers(worker)
        beat = await fleet.find(client, "drain", "drains on SIGTERM")
        await order(client, worker, b"")
        click.echo(f"{worker} drains: {beat.running} running, {beat.waiting} waiting")
        if config.wait:
            await _wait(client, fleet, beat, config.timeout_s)


async def _wait(client: Client, fleet: HeardWorkers, first: Heartbeat, timeout_s: float) -> None:
    """Wait until nothing more is heard of this life of the worker."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() - fleet.heard_at < _SILENCE_S or not client.is_connected:
        if fleet.beat is not None and fleet.beat.started != first.started:
            break  # started anew
        if time.monotonic() > deadline:
            running = 0 if fleet.beat is None else fleet.beat.running
            raise DependencyError(f"{first.worker} has not ended after {timeout_s:g} s: {running} sequences run")
        await asyncio.sleep(0.1)
    click.echo(f"{first.worker} has ended")


DRAIN = settings_command(DrainConfig, "drain", drain, [click.Argument(["worker"])])
