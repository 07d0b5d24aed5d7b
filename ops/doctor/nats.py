"""NATS: a login's rights, the streams and the clock, and the workers and hosts heard there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from ops.doctor.finding import Finding, Level, problem, warning
from ops.doctor.settings import place_of
from shared.errors import HeadraceError
from shared.hosted_models import HOST_BEAT_INTERVAL_S, HostBeat, HostedModel
from shared.messages import UNDECODABLE, Heartbeat
from shared.nats_connection import Role, WrongRoleError, connect, has_jetstream
from shared.nats_files import NatsFiles
from shared.server_clock import MOST_SKEW_S, WARN_SKEW_S, skew_s, told_skew
from shared.streams import INTERACTIVE_STREAM
from shared.subjects import (
    ALL_HOSTS,
    ALL_WORKERS,
    cancel_subject,
    encode_name,
    frame_subject,
    gateway_subject,
    probe_subject,
    served_by,
    tokenizer_subject,
    worker_subject,
)

LISTEN_S = 0.6
_HOSTS_LISTEN_S = 2 * HOST_BEAT_INTERVAL_S + 0.2
_SETTLE_S = 0.1
_TIMEOUT_S = 2.0
# Those that may; an administrator of an earlier version's configuration hears none.
_HEARS_HOSTS = frozenset({"admin", "gateway"})


@dataclass(frozen=True, slots=True)
class NatsLogin:
    """How to reach NATS, and as whom: a worker's login may be for its model alone, or for one worker."""

    url: str
    role: Role
    user: str | None = None
    password: str | None = None
    files: NatsFiles = field(default_factory=NatsFiles)
    model: str | None = None
    worker: str | None = None

    @property
    def scope(self) -> str | None:
        """The part of the role, as `connect` takes it."""
        return None if self.model is None else encode_name(self.model)

    @property
    def heartbeats(self) -> str | None:
        """Where a worker speaks whose login may be for one worker; None of other logins."""
        if self.model is None or served_by(self.user) is None:
            return None
        return worker_subject(self.model, self.worker or f"doctor-{secrets.token_hex(4)}")


async def nats_findings(login: NatsLogin, workers: Sequence[int] = ()) -> list[Finding]:
    """Connect once and look at what this login may do, which streams there are, what time it is, and who serves.

    Workers with the process ids `workers` should be heard.
    """
    refused: list[str] = []

    async def note(error: Exception) -> None:
        refused.append(str(error))

    try:
        client = await connect(
            login.url, role=login.role, name="headrace-doctor", user=login.user, password=login.password,
            files=login.files, on_error=note, timeout_s=_TIMEOUT_S, scope=login.scope, speaks_on=login.heartbeats,
        )  # fmt: skip
    except WrongRoleError as error:
        # It says itself which user to log in as.
        if login.role == "worker" and login.model is None and login.user not in get_args(Role):
            return [warning("nats rights", str(error), "if it is for one model, `headrace worker --check` tries it")]
        return [problem("nats rights", str(error))]
    except HeadraceError as error:
        return [problem("nats", str(error))]
    try:
        version = client.connected_server_version
        findings = [Finding("nats", f"{place_of(login.url)}, version {version.major}.{version.minor}.{version.patch}")]
        if not has_jetstream(client):
            remedy = "start it with JetStream (-js), or ops/nats/headrace.conf"
            return [*findings, problem("nats", "JetStream is off", remedy)]
        rights = await _rights(client, login, refused)
        findings += rights
        # A login without the rights fails here too: report one cause once.
        has_rights = all(one.level is not Level.PROBLEM for one in rights)
        findings += [one for one in await _queue_and_clock(client) if has_rights or one.level is not Level.PROBLEM]
        if login.role in _HEARS_HOSTS:
            fleet, hosts = await asyncio.gather(_fleet(client, login.model, workers), host_findings(client))
            return [*findings, *hosts, fleet]
        return [*findings, await _fleet(client, login.model, workers)]
    finally:
        await client.close()


async def _rights(client: Client, login: NatsLogin, refused: list[str]) -> list[Finding]:
    role, unused = login.role, f"doctor-{secrets.token_hex(4)}"
    publish, subscribe = _subjects(role, login.worker or unused, login.model or unused)
    for subject in subscribe:
        await client.subscribe(subject)
    for subject in publish:
        await client.publish(subject, b"")
    await client.flush()
    await asyncio.sleep(_SETTLE_S)
    denied = sorted({text.split(" for ", 1)[-1] for text in refused if "permissions violation" in text.lower()})
    if denied:
        return [problem("nats rights", f"refused: {'; '.join(denied)}", _RIGHTS_REMEDY.format(role=role))]
    return [Finding("nats rights", f"those of the role {role}, as far as can be tried without a request")]


_RIGHTS_REMEDY = "log in as the user `{role}` of ops/nats/headrace.conf, or give this one the same permissions"


def _subjects(role: Role, unused: str, model: str) -> tuple[list[str], list[str]]:
    """Return a role's publish and subscribe subjects, for a worker or gateway of this name, and a model."""
    beats, cancels, probes = worker_subject(model, unused), cancel_subject(model), probe_subject(unused)
    match role:
        case "worker":
            return [frame_subject(unused), beats], [beats, cancels, probes, tokenizer_subject(model)]
        case "gateway":
            return [cancels, probes, gateway_subject(unused)], [frame_subject(unused), beats]
        case "admin":
            return ["$JS.API.INFO"], [beats]
        case _:
            return [], []


async def _queue_and_clock(client: Client) -> list[Finding]:
    asked = time.time()
    try:
        reply = await client.request(f"$JS.API.STREAM.INFO.{INTERACTIVE_STREAM}", b"", timeout=_TIMEOUT_S)
    except NatsError as error:
        return [problem("queue", f"NATS does not tell of its streams ({error})", _RIGHTS_REMEDY.format(role="worker"))]
    answer = json.loads(reply.data)
    if "error" in answer:
        text = f"{INTERACTIVE_STREAM}: {answer['error'].get('description', 'error')}"
        return [warning("queue", text, "run `headrace setup`, or start a gateway or a worker")]
    state = answer["state"]
    text = f"{state['messages']} interactive requests wait, {state['bytes']} bytes"
    finding = cluster_finding(answer.get("cluster") or {}, text)
    clock = clock_finding(answer.get("ts", ""), (asked + time.time()) / 2)
    return [finding, *([] if clock is None else [clock])]


def cluster_finding(cluster: dict[str, Any], text: str) -> Finding:
    """Tell who keeps the queue, where that is a cluster: which server leads it, and which are away."""
    others = cluster.get("replicas") or []
    if not others:
        return Finding("queue", text)
    text = f"{text}; kept by {len(others) + 1} servers"
    if not cluster.get("leader"):
        return warning("queue", f"{text}, none of which leads", "wait some seconds: they elect one")
    text += f", led by {cluster['leader']}"
    away = sorted(other.get("name", "?") for other in others if other.get("offline"))
    if away:
        return warning("queue", f"{text}; away: {', '.join(away)}", "look at the log of NATS there")
    return Finding("queue", text)


def clock_finding(server_time: str, own_time: float) -> Finding | None:
    """Compare NATS's time of day with ours; None where it tells none."""
    skew = skew_s(server_time, own_time)
    if skew is None:
        return None
    text = told_skew(skew)
    if abs(skew) > MOST_SKEW_S:
        return problem("clock", text, "set both clocks (NTP): deadlines are times of day")
    return warning("clock", text, "set both clocks (NTP)") if abs(skew) > WARN_SKEW_S else Finding("clock", text)


async def _fleet(client: Client, model: str | None, expected: Sequence[int]) -> Finding:
    heard: dict[str, Heartbeat] = {}
    with contextlib.suppress(NatsError):
        subscription = await client.subscribe(ALL_WORKERS if model is None else f"hr.worker.{encode_name(model)}.*")
        deadline = time.monotonic() + LISTEN_S
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(msgspec.MsgspecError, NatsError, TimeoutError):
                message = await subscription.next_msg(left)
                heartbeat = msgspec.msgpack.decode(message.data, type=Heartbeat)
                heard[heartbeat.worker] = heartbeat
        await subscription.unsubscribe()
    if not heard:
        return warning("workers", "none is heard", "start one: `headrace worker`; see its log if it runs")
    text = "; ".join(_described(heartbeat) for heartbeat in heard.values())
    if any(_missing_ranks(heartbeat) for heartbeat in heard.values()):
        return warning("workers", text, "the worker replaces a rank that is gone; its log says why it was")
    if any(_golden_problem(heartbeat) for heartbeat in heard.values()):
        return warning("workers", text, "see ops/docs/runbooks/wrong-answers.md")
    silent = sorted(set(expected) - {heartbeat.pid for heartbeat in heard.values()})
    if silent:
        text += f"; not heard: process {', '.join(map(str, silent))}"
        return warning("workers", text, "it still loads its model, or stands still: see its log")
    return Finding("workers", text)


def _missing_ranks(beat: Heartbeat) -> list[str]:
    """Return the ranks of a worker that are gone, or load."""
    return [] if beat.metrics is None else [str(rank.rank) for rank in beat.metrics.ranks if not rank.is_alive]


def _golden_problem(beat: Heartbeat) -> str:
    return "" if beat.metrics is None or beat.metrics.golden is None else beat.metrics.golden.problem


def _described(beat: Heartbeat) -> str:
    role = "" if beat.roles is None else f", role {beat.roles.role}"
    draining = f"{role}, {'draining' if beat.is_ending else 'cordoned'}" if beat.draining else role
    if beat.metrics is not None and beat.metrics.ranks:
        draining += f", {len(beat.metrics.ranks)} ranks"
        if missing := _missing_ranks(beat):
            draining += f" of which {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
    if problem := _golden_problem(beat):
        draining += f", its answers are wrong ({problem})"
    blocks = f"{beat.free_blocks} of {beat.total_blocks} blocks free"
    return f"{beat.worker} serves {beat.model} (revision {beat.revision}), {beat.running} running, {blocks}{draining}"


async def host_findings(client: Client) -> list[Finding]:
    """Listen to the hosts; there may be none, or none that has a model."""
    heard: dict[str, HostBeat] = {}

    async def note(message: Msg) -> None:
        with contextlib.suppress(*UNDECODABLE):
            beat = msgspec.msgpack.decode(message.data, type=HostBeat)
            heard[beat.host] = beat

    with contextlib.suppress(NatsError):
        subscription = await client.subscribe(ALL_HOSTS, cb=note)
        await asyncio.sleep(_HOSTS_LISTEN_S)
        await subscription.unsubscribe()
    return [_host_finding(beat) for beat in heard.values() if beat.models]


def _host_finding(beat: HostBeat) -> Finding:
    counts = Counter(model.state for model in beat.models)
    text = f"{beat.host}: " + ", ".join(f"{count} {state}" for state, count in counts.items())
    for model in beat.models:
        if model.num_withheld:
            text += f"; {model.name}: {model.num_withheld} of {model.num_ready} workers cordoned"
    wrong = [model for model in beat.models if model.state == "failed" or _waits_for_room(model)]
    if not wrong:
        return Finding("models", text)
    text += "".join(f"; {model.name}: {model.error or 'no room'}" for model in wrong)
    name = min(model.name for model in wrong)
    remedy = f"mend that, then `headrace model wake {name}`; or `headrace model unload {name}`"
    if all(map(_waits_for_room, wrong)):
        remedy = "unload a model, or raise HEADRACE_HOST_MEMORY_BYTES"
    return warning("models", text, remedy)


def _waits_for_room(model: HostedModel) -> bool:
    """Whether an always-on model has no room; on-demand models take turns."""
    return model.state == "no_room" and not model.on_demand
